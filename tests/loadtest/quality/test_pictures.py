"""Pictures: the judge and its distance, and a whole run over a ring that draws."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from loadtest.quality.pictures import distance_interval, frechet_distance, load_judge, save_judge, train_judge
from stages.errors import InputError, ResumeError
from tests.conftest import Run
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle
from trainer.blocks.state import save_state
from trainer.pictures.data import load_pictures


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose class is how bright they are, in the classes of the tiny bundle."""
    generator = np.random.default_rng(0)
    labels = (np.arange(300) % 3).astype(np.uint8)
    pixels = (labels[:, None, None, None] * 90 + generator.integers(60, size=(300, 1, 8, 8))).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "bright.npz"
    parts = {"train_x": pixels[:200], "train_y": labels[:200], "test_x": pixels[200:], "test_y": labels[200:]}
    np.savez(path, **parts, classes=np.array(TINY.classes))  # type: ignore[arg-type]
    return path


def test_the_frechet_distance_is_that_of_gaussians() -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=(400, 5)) @ generator.normal(size=(5, 5))
    other = generator.normal(size=(300, 5)) + 1.5
    means = [x.mean(0) for x in (one, other)]
    first, second = (np.cov(x, rowvar=False) for x in (one, other))
    root_trace = np.sqrt(np.linalg.eigvals(first @ second).real.clip(0)).sum()
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(first + second) - 2 * root_trace
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one + 3) == pytest.approx(5 * 9)
    low, high = distance_interval(one, other)
    assert low < frechet_distance(one, other) < high


def test_a_judge_is_trained_saved_and_refused_when_damaged(bright: Path, tmp_path: Path) -> None:
    path, pictures = tmp_path / "judge.safetensors", load_pictures(bright)
    save_judge(train_judge(pictures, epochs=30), path, pictures)
    judge, _ = load_judge(path)
    assert (judge.classify(pictures.test.pixels)[1] == pictures.test.labels.numpy()).mean() > 0.9
    with pytest.raises(InputError, match=r"the judge needs pictures of \(1, 8, 8\), but these have \(1, 9, 8\)"):
        judge.classify(torch.zeros(1, 1, 9, 8, dtype=torch.uint8))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ResumeError, match="do not match the recorded SHA-256"):
        load_judge(path)
    save_state(path, {}, {})
    with pytest.raises(ResumeError, match="is not a judge"):
        load_judge(path)


@pytest.mark.slow
def test_a_whole_run(bright: Path, tmp_path: Path, onesweep: Run) -> None:
    judge, record = tmp_path / "judge.safetensors", tmp_path / "record.json"
    bench = ["bench", "quality", "--pictures", bright, "--judge", judge, "--count", 100]
    served = ["--checkpoint", tiny_picture_bundle(tmp_path / "bundle"), "--levels", "3,6"]
    ended = onesweep(*bench, *served, "--modes", "chain,steps:int8,local", "--json", record)
    rows = json.loads(record.read_text())["rows"]
    assert [(row["mode"], row["levels"]) for row in rows] == [
        ("training pictures", None),
        *((mode, levels) for mode in ("chain", "steps:int8", "local") for levels in (3, 6)),
    ]
    assert [row["trips"] for row in rows] == [None, 1, 1, 4, 7, 0, 0]
    assert all(row["count"] == 102 for row in rows[1:]), "a picture of every class in each request"
    assert judge.exists(), "it was learned from the pictures"
    assert (ended.code, "FD" in ended.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "chian"], "unknown mode 'chian' in --modes (did you mean chain?)"),
        (["--write", "frontier.json"], "--write needs --prompts"),
        (["--bytes", "256"], "--bytes needs --prompts"),
        (["--judge", "/no/such/judge"], "cannot write /no/such/judge"),
        (["--judge", __file__], "cannot read"),
    ],
)
def test_a_wrong_option_is_explained(bright: Path, onesweep: Run, arguments: list[str], message: str) -> None:
    ended = onesweep("bench", "quality", "--pictures", bright, *arguments)
    assert ended.code in (1, 2)
    assert message in ended.message
