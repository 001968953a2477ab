import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from onesweep.loadtest.pictures.bench import REAL, PictureRow, delays_of, floor_s, least_seconds
from onesweep.loadtest.pictures.drawing import ChainSet, ExpertSet
from onesweep.loadtest.pictures.judge import (
    accuracy,
    distance_interval,
    frechet_distance,
    load_judge,
    nearest,
    save_judge,
    train_judge,
)
from onesweep.serving.cli.__main__ import main
from onesweep.stages.backends import backend_named
from onesweep.stages.checkpoint.checkpoint import load_picture_part
from onesweep.stages.errors import CheckpointError, InputError
from onesweep.stages.model.codec import codec_named
from onesweep.stages.pictures.trajectory import DrawPlan, Trajectory, block_sigmas, range_sigmas
from onesweep.trainer.pictures.data import PictureSet, load_pictures
from tests.stages.pictures.tiny import TINY, tiny_experts, tiny_part, tiny_partition, tiny_picture_bundle

CLASSES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_picture_bundle(tmp_path_factory.mktemp("bundle"))
    tiny_experts(directory / "experts")
    return directory


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> PictureSet:
    """Pictures whose class is how bright they are, in the classes of the tiny bundle."""
    generator = np.random.default_rng(0)
    labels = (np.arange(300) % 3).astype(np.uint8)
    pixels = (labels[:, None, None, None] * 90 + generator.integers(60, size=(300, 1, 8, 8))).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "bright.npz"
    np.savez(
        path,
        train_x=pixels[:200],
        train_y=labels[:200],
        test_x=pixels[200:],
        test_y=labels[200:],
        classes=np.array(TINY.classes),
    )
    return load_pictures(path)


def test_the_frechet_distance_is_that_of_gaussians() -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=(400, 5)) @ generator.normal(size=(5, 5))
    other = generator.normal(size=(300, 5)) + 1.5
    means = [x.mean(0) for x in (one, other)]
    first, second = (np.cov(x, rowvar=False) for x in (one, other))
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one + 3) == pytest.approx(5 * 9)
    low, high = distance_interval(one, other)
    assert low < frechet_distance(one, other) < high


def test_copies_are_found() -> None:
    known = torch.randint(256, (50, 1, 4, 4), dtype=torch.uint8)
    shifted = known[:2].int().add(torch.tensor([3, -2]).view(2, 1, 1, 1)).clamp(0, 255)
    found = nearest(torch.cat([known[7:8], shifted.to(torch.uint8)]), known)
    exact = (torch.cat([known[7:8], shifted.to(torch.uint8)]).float()[:, None] - known.float()).flatten(2).norm(dim=2)
    assert found[0] == 0
    assert np.allclose(found, exact.min(1).values.numpy(), atol=1e-2)


def test_a_judge_learns_is_kept_and_is_refused_when_damaged(pictures: PictureSet, tmp_path: Path) -> None:
    path = tmp_path / "judge.safetensors"
    save_judge(train_judge(pictures, epochs=30), path, pictures)
    stored = load_judge(path)
    assert accuracy(stored.judge, pictures.test) > 0.9
    assert stored.classes == TINY.classes
    with pytest.raises(InputError, match=r"the judge knows pictures of \(1, 8, 8\), these have \(1, 9, 8\)"):
        stored.judge.look(torch.zeros(1, 1, 9, 8, dtype=torch.uint8))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not have the recorded SHA-256"):
        load_judge(path)
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="is no judge"):
        load_judge(path)
    with pytest.raises(CheckpointError, match="no judge at"):
        load_judge(tmp_path / "none")


def test_a_chain_is_drawn_block_by_block_with_the_codec_between(bundle: Path) -> None:
    drawn = ChainSet(bundle / "chain", "int8").draw(CLASSES, 5, 6, "2m", 1.5)
    plan, partition, codec = DrawPlan(5, tuple(CLASSES), 6, "2m", 1.5), tiny_partition(), codec_named("int8")
    estimate = None
    for block in range(3):
        runner = backend_named("torch").picture(load_picture_part(bundle / "chain", block))
        sigmas = block_sigmas(partition, block, 6)
        trajectory = Trajectory(TINY, plan, partition.sigma_max, sigmas, is_last=block == 2, estimate=estimate)
        with torch.inference_mode():
            while not trajectory.done:
                trajectory.supply(runner.evaluate([trajectory.piece()])[0])
        estimate = codec.round_trip(trajectory.estimate.flatten(0, 1), TINY.limit).view_as(trajectory.estimate)
    assert torch.equal(drawn.pixels, trajectory.pixels())
    assert drawn.evaluations == 7 * TINY.layers * 2


def test_experts_that_are_alike_draw_what_one_of_them_draws(tmp_path: Path) -> None:
    whole = Trajectory(
        TINY, DrawPlan(5, tuple(CLASSES), 6, "2m", 1.5), 80.0, range_sigmas(80.0, 0.002, 6), is_last=True
    )
    runner = backend_named("torch").picture(tiny_part(0, "experts"))
    with torch.inference_mode():
        while not whole.done:
            whole.supply(runner.evaluate([whole.piece()])[0])
    path = tiny_experts(tmp_path, alike=True)
    for net in (ExpertSet(path, "once", "fp32"), ExpertSet(path, "top1", "fp32")):
        drawn = net.draw(CLASSES, 5, 6, "2m", 1.5)
        assert (drawn.pixels.int() - whole.pixels().int()).abs().max() <= 1


def test_experts_cost_what_they_evaluate_and_how_often_they_move(bundle: Path) -> None:
    moving = ExpertSet(bundle / "experts", "top1", "int8").draw(CLASSES, 5, 6, "2m", 1.5)
    assert moving.moves is not None
    assert 0 < moving.moves <= 6
    assert moving.evaluations == 7 * 2 + 7  # one layer with and without class, and the router net's
    once = ExpertSet(bundle / "experts", "once", "fp32").draw(CLASSES, 5, 6, "2m", 1.0)
    assert (once.evaluations, once.moves) == (7 + 1, 0)


def test_a_picture_alone_is_drawn_by_the_experts_that_draw_it_in_company(bundle: Path) -> None:
    for net in (ExpertSet(bundle / "experts", "once", "fp32"), ExpertSet(bundle / "experts", "top1", "int8")):
        together = net.draw(CLASSES, 5, 6, "2m", 1.0).pixels
        alone = net.draw(CLASSES[2:3], 7, 6, "2m", 1.0).pixels
        assert torch.equal(together[2:3], alone)


def test_floors_are_those_of_the_links() -> None:
    assert [delays_of(mode, 3, 12) for mode in ("chain", "steps", "local")] == [4, 40, 0]
    assert [delays_of(f"experts:{top}", 3, 12, moves=0.5) for top in ("once", 1)] == [2, 2.5]
    assert floor_s(4, 10.0, 0, 60) == pytest.approx(0.13)
    assert floor_s(4, 0.0, 125_000, 0) == pytest.approx(0.04)  # ten milliseconds a hop at 100 Mbit/s


def test_an_opponent_has_its_least_seconds_at_an_fd_no_worse_than_the_chains() -> None:
    def row(mode: str, levels: int, distance: float, seconds: float, codec: str = "fp32") -> PictureRow:
        found = {"distance_low": 0.0, "distance_high": 0.0, "accuracy": 1.0, "copies": 0.0}
        return PictureRow(mode, 100, distance, levels=levels, codec=codec, seconds_60=seconds, **found)

    real = row(REAL, 0, 1.0, 0.0)
    steps = [row("steps", 4, 50.0, 0.5), row("steps", 6, 40.0, 0.75), row("steps", 12, 45.0, 1.25)]
    chain = [row("chain", 6, 50.0, 0.125, "int8"), row("chain", 12, 39.0, 0.125, "int8"), row("chain", 6, 90.0, 0.125)]
    lines = least_seconds([real, *chain, *steps, row("local", 6, 41.0, 0.25)]).splitlines()
    assert lines[0].split()[-4:] == ["6", "levels", "12", "levels"]
    assert [line.split() for line in lines[-2:]] == [
        ["steps", "0.500", "(4.0", "x)", "never"],
        ["local", "0.250", "(2.0", "x)", "never"],
    ]
    assert least_seconds([real, *chain]) == least_seconds([real, *steps]) == ""


def test_the_commands_measure_and_refuse_in_sentences(
    bundle: Path, pictures: PictureSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "bright.npz"
    arrays = {f"{part}_{axis}": values for part in ("train", "test") for axis, values in parts_of(pictures, part)}
    np.savez(data, **arrays, classes=np.array(TINY.classes))  # type: ignore[arg-type]
    judge, record = tmp_path / "judge.safetensors", tmp_path / "record.json"
    assert main(["bench", "picture-judge", "--data", str(data), "--out", str(judge), "--epochs", "5"]) == 0
    bench = ["bench", "pictures", "--data", str(data), "--checkpoint", str(bundle), "--judge", str(judge)]
    few = ["--count", "100", "--levels", "3,6"]
    assert main([*bench, *few, "--json", str(record), "--svg", str(tmp_path / "chart.svg")]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["mode"], row["levels"]) for row in rows] == [
        ("training pictures", None),
        *((mode, levels) for mode in ("chain", "steps", "local") for levels in (3, 6)),
    ]
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    codecs = {"experts:once": "fp32", "experts:1": "int8"}
    experts = ["--checkpoint", str(bundle), "--modes", ",".join(codecs), "--levels", "2,3"]
    assert main([*bench, *few[:2], *experts, "--json", str(record)]) == 0
    found = [(row["mode"], row["levels"], row["codec"]) for row in json.loads(record.read_text())["rows"][1:]]
    assert found == [(mode, levels, codec) for mode, codec in codecs.items() for levels in (2, 3)]
    capsys.readouterr()
    for arguments, message in (
        (["--modes", "chian"], "unknown mode 'chian' (did you mean chain?)"),
        (["--levels", "0"], "--levels takes numbers from 1 to 256"),
        (["--solver", "heun"], "unknown solver 'heun'"),
        (["--count", "1"], "--count must be from 100"),
        (["--judge", str(data)], "is no judge"),
        (["--checkpoint", str(bundle / "chain"), "--modes", "experts:1"], "has no experts/: leave experts:1 out of"),
        (["--checkpoint", str(bundle / "chain"), "--modes", "steps"], "has no steps/: leave steps out of --modes"),
    ):
        assert main([*bench, *arguments]) in (1, 2)
        assert message in capsys.readouterr().err


def parts_of(pictures: PictureSet, part: str) -> tuple[tuple[str, object], ...]:
    found = getattr(pictures, part)
    return ("x", found.pixels.numpy()), ("y", found.labels.numpy().astype(np.uint8))
