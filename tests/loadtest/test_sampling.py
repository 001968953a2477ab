"""`onesweep bench sampler`: the unchanged variant is what is served, and each change does what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from loadtest.inprocess import InProcess, Work
from loadtest.sampling.sampler import Sampler, Streams, byte_nats, continue_text
from loadtest.sampling.study import SamplerStudy, measure_sampler
from loadtest.sampling.variant import USUAL, Variant, parse_variant, parse_variants
from serving.cli import main
from stages.ar import new_caches
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.checkpoint import load_ar, load_chain
from stages.codec import codec_named
from stages.errors import InputError
from stages.manifest import read_manifest
from stages.sweep import BlockWork, Boundary, SweepPlan, run_alone

PROMPT = b"The ship had no name"
SEEDS = (3, 4, 11)
BYTES = 24


def open_sampler(bundle: Path) -> Sampler:
    partition = read_manifest(bundle / "chain").partition
    assert partition is not None
    return Sampler(load_chain(bundle / "chain"), partition, load_ar(bundle / "local"))


def write(sampler: Sampler, spec: str = "default", max_bytes: int = BYTES, seeds: Sequence[int] = SEEDS) -> list[bytes]:
    prompts = torch.tensor([list(PROMPT)] * len(seeds))
    return sampler.write(prompts, max_bytes, parse_variant(spec, Variant()), seeds).texts


def served(bundle: Path, seed: int, sampler: str, temperature: float) -> bytes:
    """What hosts write: one sweep, block by block."""
    partition, backend = read_manifest(bundle / "chain").partition, backend_named(DEFAULT_BACKEND)
    assert partition is not None
    plan, outcome = SweepPlan(seed, len(PROMPT), BYTES, 8, temperature, sampler), None
    for block in load_chain(bundle / "chain"):
        a, before = block.architecture, outcome
        assert before is None or isinstance(before, Boundary)
        caches = new_caches(a.layers, a, 96)
        work = BlockWork(a, block.index, partition, caches, plan, codec_named("int8"), PROMPT, before)
        outcome = run_alone(work, backend.block(block))
    assert isinstance(outcome, bytes)
    return outcome


@pytest.fixture(scope="module")
def own(bundles: Path) -> Sampler:
    return open_sampler(bundles / "own")


# Against what is served


@pytest.mark.parametrize("context", ["own", "chained"])
def test_the_unchanged_variant_is_the_served_sweep(bundles: Path, context: str) -> None:
    floor = InProcess(bundles / context)
    expected = [floor.generate(Work("sweep", PROMPT, BYTES, seed)) for seed in SEEDS]
    assert write(open_sampler(bundles / context)) == expected


@pytest.mark.parametrize("context", ["own", "chained"])
def test_with_chunks_it_is_the_served_mode_chunked(bundles: Path, context: str) -> None:
    floor = InProcess(bundles / context)
    expected = [floor.generate(Work("chunked", PROMPT, 70, seed)) for seed in SEEDS]
    assert write(open_sampler(bundles / context), "chunk=32", 70) == expected


def test_kept_noise_is_the_served_ode(bundles: Path, own: Sampler) -> None:
    expected = [served(bundles / "own", seed, "ode", 0.8) for seed in SEEDS]
    assert write(own, "noise=kept:temperature=1:final=0.8") == expected


def test_the_ar_row_is_the_served_mode_ar(bundles: Path) -> None:
    floor, model = InProcess(bundles / "own"), load_ar(bundles / "own" / "ar")
    expected = [floor.generate(Work("ar", PROMPT, BYTES, seed)) for seed in SEEDS]
    prompts = torch.tensor([list(PROMPT)] * 3)
    assert [bytes(row) for row in continue_text(model, prompts, BYTES, 0.8, Streams(SEEDS, (0, 0, 0))).tolist()] == (
        expected
    )


# What a variant changes


@pytest.mark.parametrize("spec", USUAL.split(","))
def test_every_usual_variant_writes_and_is_repeatable(own: Sampler, spec: str) -> None:
    texts = write(own, spec)
    assert [len(text) for text in texts] == [BYTES] * 3
    assert write(own, spec, seeds=SEEDS[1:]) == texts[1:], "a text depends on its company"


def test_ddim_without_noise_is_the_ode(own: Sampler) -> None:
    assert write(own, "noise=ancestral:eta=0") == write(own, "noise=kept") == write(own, "noise=fresh:eta=0")


def test_the_price_is_counted(own: Sampler) -> None:
    def price(spec: str) -> tuple[int, int]:
        written = own.write(torch.tensor([list(PROMPT)]), 24, parse_variant(spec, Variant()), [0])
        return written.sweeps, written.evaluated

    assert price("steps=2") == (1, 24 * 7)
    assert price("steps=2:condition=twice") == (1, 24 * 14)
    assert price("steps=2:chunk=8") == (3, 24 * 7)
    assert price("steps=2:candidates=3") == (1, 24 * 21)
    assert price("steps=2:chunk=16:keep=8") == (2, 32 * 7)
    assert price("steps=2:read=1.5") == (1, 24 * 3)  # the end of block 0
    assert price("steps=2:reader=local") == (1, 24 * 6)


def test_the_favourite_is_the_local_models(own: Sampler) -> None:
    assert own.local is not None
    prompts, variant = torch.tensor([list(PROMPT)]), parse_variant("candidates=6", Variant())
    (best,) = own.write(prompts, BYTES, variant, [7]).texts
    nats = []
    for text in (best, *write(own, seeds=[7])):
        nats.append(float(byte_nats(own.local, torch.tensor([list(PROMPT + text)]), BYTES).sum()))
    assert nats[0] <= nats[1]


def test_nothing_is_left_of_a_draft_under_much_noise_and_all_under_none(own: Sampler) -> None:
    assert own.local is not None
    kept = write(own, "draft=yes:noise=kept:start=0.201:steps=1")
    assert kept != write(own, "noise=kept:start=0.201:steps=1")
    evidence = 1000.0 * torch.nn.functional.one_hot(torch.tensor([list(b"abc")]), 256).float()
    prompts = torch.tensor([list(PROMPT)])
    written = continue_text(own.local, prompts, 3, 1.0, Streams((0,), (0,)), evidence=evidence)
    assert bytes(written[0].tolist()) == b"abc"


# The command


@pytest.fixture
def data(tmp_path: Path) -> Path:
    topics = __import__("pydoc_data.topics", fromlist=["topics"]).topics
    text = "".join(topics[name] for name in sorted(topics))
    (tmp_path / "train.txt").write_text(text[:200_000], encoding="utf-8")
    (tmp_path / "valid.txt").write_text(text[200_000:260_000], encoding="utf-8")
    return tmp_path


def test_a_whole_run(bundles: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", "sampler", "--data", str(data), "--weights", str(bundles / "own"), "--count", "5"]
    variants = "steps=2,noise=kept:temperature=1"
    assert main([*command, "--bytes", "16", "--variants", variants, "--json", str(path)]) == 0
    table, record = capsys.readouterr().out, json.loads(path.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["human", "local", "ar", "default", "steps=2", "noise=kept:temperature=1"]
    assert all(name in table for name in rows)
    assert rows["human"]["unseen_words"]["value"] < 0.5
    assert rows["default"]["less_default"] is None
    assert rows["default"]["work"] == 25
    less = rows["steps=2"]["less_default"]
    assert less["value"] == pytest.approx(rows["steps=2"]["bits"]["value"] - rows["default"]["bits"]["value"])
    assert less["low"] <= less["value"] <= less["high"]
    assert record["variants"]["steps=2"]["steps"] == 2


def test_the_same_study_gives_the_same_rows(bundles: Path, data: Path) -> None:
    study = SamplerStudy(bundles / "own", data, parse_variants("steps=1", Variant()), count=3, max_bytes=8)
    first, second = (list(measure_sampler(study, lambda _: None)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("steps", "not KEY=VALUE"),
        ("depth=3", "with a key of chunk, keep, steps"),
        ("steps=0", "steps must be at least 1"),
        ("steps=x", "'x' is no value for steps"),
        ("rounded=maybe", "'maybe' is no value for rounded"),
        ("noise=white", "noise must be one of kept, ancestral, fresh"),
        ("temperature=nan", "temperatures and noise levels must be positive"),
        ("temperature=0", "temperatures and noise levels must be positive"),
        ("eta=2", "eta and sure are shares"),
        ("chunk=8:keep=9", "of a chunk of 8 bytes no 9 can be kept"),
        ("read=inf", "read must be at least 0"),
    ],
)
def test_a_wrong_variant_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_variant(spec, Variant())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--count", "0"], "--count must be at least 1"),
        (["--bytes", "500"], "must be at most 512"),
        (["--prompt-bytes", "1"], "--prompt-bytes must be at least 8"),
        (["--count", "100000"], "not for 100000"),
        (["--variants", "start=20"], "noise falls from at most 8 to at least 0.2"),
        (["--base", "steps=-1"], "steps must be at least 1"),
        (["--data", "nowhere"], "no text at nowhere"),
    ],
)
def test_a_wrong_command_is_refused(bundles: Path, data: Path, arguments: list[str], problem: str, capsys) -> None:
    command = ["bench", "sampler", "--data", str(data), "--weights", str(bundles / "own")]
    assert main([*command, *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_variant_without_its_local_model_is_refused(bundle: Path, data: Path, capsys) -> None:
    command = ["bench", "sampler", "--data", str(data), "--weights", str(bundle), "--bytes", "8"]
    assert main([*command, "--variants", "candidates=2"]) == 2
    assert "has no local/" in capsys.readouterr().err
