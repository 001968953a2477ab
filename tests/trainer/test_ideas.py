"""Features and plans beside a local model: what they tell it, what they may not, and what it writes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.ar import ArModel, ArStage, new_caches
from stages.architecture import Architecture
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.block import Block
from stages.codec import codec_named
from stages.errors import InputError
from stages.partition import NoisePartition
from stages.sweep import BlockWork, Boundary, SweepPlan, run_alone
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.ideas.guided import GuidedLocal
from trainer.ideas.lagged import LaggedTask, deep_features, lagged_guide
from trainer.ideas.measure import gain_bits, window_nats
from trainer.ideas.planned import PlannedTask, planned_guide
from trainer.ideas.planning import Planner
from trainer.ideas.report import Report, Told, table
from trainer.ideas.trial import Trial
from trainer.ideas.writing import Writer, entropy_bits
from trainer.objectives import ChunkLayout
from trainer.run import Run, train_step
from trainer.untrained import create_untrained

LENGTH, CHUNK = 24, 6


def text(rows: int = 2, length: int = LENGTH + 1) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def local(architecture: Architecture) -> Architecture:
    return replace(architecture, parts=1)


def loud(module: GuidedLocal) -> GuidedLocal:
    """With every weight far from its start, so that nothing is silent by being zero."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


@pytest.fixture
def deep(tiny: TrainingConfig) -> ArModel:
    return ArModel(tiny.architecture).eval()


@pytest.fixture
def planner(make_blocks: Callable[..., list[Block]], partition: NoisePartition) -> Planner:
    return Planner(make_blocks(), partition, 4)


@pytest.fixture
def writer(tiny: TrainingConfig, planner: Planner) -> Writer:
    model = loud(GuidedLocal(ArStage(local(tiny.architecture), 0), tiny.architecture.code_dim))
    return Writer(model, planner, CHUNK)


def test_a_guided_model_starts_as_the_local_model(tiny: TrainingConfig, deep: ArModel) -> None:
    stage = ArStage(local(tiny.architecture), 0)
    known = text()[:, :-1]
    expected = ArModel(stage.architecture, [stage])(known)
    model = GuidedLocal(stage, tiny.architecture.width)
    torch.testing.assert_close(model(known), expected)
    torch.testing.assert_close(model(known, lagged_guide(deep_features(deep, known), 3)), expected)


@pytest.mark.parametrize("lag", [1, 4, LENGTH])
def test_a_byte_learns_nothing_through_features_of_what_is_nearer_than_the_lag(
    tiny: TrainingConfig, deep: ArModel, lag: int
) -> None:
    model = loud(GuidedLocal(ArStage(local(tiny.architecture), 0), tiny.architecture.width))
    known = text()[:, :-1]
    other, changed = known.clone(), 9
    other[:, changed:] = (other[:, changed:] + 1) % 256
    # the local model reads the same text: only the features are of another
    ours = model(known, lagged_guide(deep_features(deep, known), lag))
    theirs = model(known, lagged_guide(deep_features(deep, other), lag))
    # the byte at t is predicted at position t - 1 and may know of position t - lag
    first = changed + lag - 1
    assert torch.equal(ours[:, :first], theirs[:, :first])
    assert lag == LENGTH or not torch.allclose(ours[:, first], theirs[:, first])


def test_a_lag_beyond_the_text_is_no_feature_at_all(tiny: TrainingConfig, deep: ArModel) -> None:
    model = loud(GuidedLocal(ArStage(local(tiny.architecture), 0), tiny.architecture.width))
    known = text()[:, :-1]
    torch.testing.assert_close(model(known, lagged_guide(deep_features(deep, known), LENGTH + 5)), model(known))


def test_a_plan_is_of_its_own_chunk_and_what_was_before_it(planner: Planner) -> None:
    layout, whole = ChunkLayout(LENGTH, CHUNK, 2), text(length=LENGTH)
    eps = torch.randn(2, LENGTH, planner.blocks[0].architecture.code_dim)
    for rolled in (1.0, 2.0):
        plan = planner.of_text(whole, layout, 0.7, rolled, eps)
        end = 2 * CHUNK - 2  # of the second chunk
        other = whole.clone()
        other[:, end:] = (other[:, end:] + 1) % 256
        changed = planner.of_text(other, layout, 0.7, rolled, eps)
        torch.testing.assert_close(plan[:, :end], changed[:, :end])
        assert not torch.allclose(plan[:, end], changed[:, end])


def test_a_byte_reads_its_own_chunk_s_plan_and_no_later_one(writer: Writer) -> None:
    layout, whole = ChunkLayout(LENGTH + 1, CHUNK), text()
    has_plan = torch.ones(whole.shape, dtype=torch.bool)
    plan = torch.randn(2, LENGTH + 1, writer.planner.blocks[0].architecture.code_dim)
    other = plan.clone()
    last = 2 * CHUNK - 1  # the second chunk's last slot
    other[:, last] += 1
    ours = writer.model(whole[:, :-1], planned_guide(plan, layout, has_plan))
    theirs = writer.model(whole[:, :-1], planned_guide(other, layout, has_plan))
    first = CHUNK - 1  # writes the second chunk's first byte, which reads all of its slots
    torch.testing.assert_close(ours[:, :first], theirs[:, :first])
    assert not torch.allclose(ours[:, first], theirs[:, first])
    none = writer.model(whole[:, :-1], planned_guide(plan, layout, ~has_plan))
    torch.testing.assert_close(none, writer.model(whole[:, :-1]))


def test_truly_noised_plans_tell_more_the_less_noise_there_is(planner: Planner) -> None:
    layout, whole, codes = ChunkLayout(LENGTH, CHUNK), text(length=LENGTH), planner.blocks[0].codes
    eps = torch.randn(2, LENGTH, codes.shape[1], generator=torch.Generator().manual_seed(2))

    def distance(sigma: float, rolled: float) -> float:
        return float((planner.of_text(whole, layout, sigma, rolled, eps) - codes[whole]).norm(dim=-1).mean())

    assert distance(0.15, 1.0) < 0.1 < distance(1.0, 1.0) < distance(10.0, 1.0) + 0.1
    assert distance(0.15, 1.0) < distance(0.15, 20.0)  # what is rolled settles on what the chain likes


def test_plans_to_the_end_are_those_of_a_served_sweep(planner: Planner) -> None:
    architecture, known = planner.blocks[0].architecture, text(rows=2, length=9)
    plans = planner.from_noise(known, CHUNK, planner.partition.sigma_min, seed=5)
    for row in range(2):
        plan, before = SweepPlan(5 + row, 9, CHUNK, planner.steps, 0.0), None
        for block in planner.blocks:
            caches = new_caches(architecture.layers, architecture, 9)
            clean = bytes(known[row].tolist())
            work = BlockWork(
                architecture, block.index, planner.partition, caches, plan, codec_named("fp32"), clean, before
            )
            outcome = run_alone(work, backend_named(DEFAULT_BACKEND).block(block.eval()))
            before = outcome if isinstance(outcome, Boundary) else None
        expected = planner.blocks[-1].point(work._logits)
        torch.testing.assert_close(plans[row], expected, atol=1e-3, rtol=1e-3)


def test_a_plan_stops_where_it_is_told(planner: Planner) -> None:
    steps = list(planner.euler_steps(10.0, 0.7))
    assert steps[0][1] == 10.0
    assert steps[-1][2] == 0.7
    assert all(after < sigma for _, sigma, after in steps)
    assert [a[2] for a in steps[:-1]] == [b[1] for b in steps[1:]]
    assert not list(planner.euler_steps(10.0, 10.0))
    assert len(list(planner.euler_steps(10.0, 0.15))) == 4 * 2
    assert [planner.owner(sigma) for sigma in (10.0, planner.partition.boundaries[1], 0.2, 0.15)] == [0, 0, 1, 1]


def test_writing_step_by_step_reads_what_training_reads(writer: Writer) -> None:
    prompt = 7
    whole = text(length=prompt + CHUNK)
    plan = writer._plan(whole[:, :prompt], CHUNK, 0.7, seed=0)
    assert plan is not None
    layout = ChunkLayout(prompt + CHUNK, CHUNK, CHUNK - prompt % CHUNK)
    padded = torch.cat([torch.zeros(2, prompt, plan.shape[2]), plan], dim=1)
    has_plan = (torch.arange(prompt + CHUNK) >= prompt).expand(2, -1)
    at_once = writer.model(whole[:, :-1], planned_guide(padded, layout, has_plan))[:, prompt - 1 :]
    architecture = writer.model.stage.architecture
    caches = new_caches(architecture.layers, architecture, prompt + CHUNK, 2)
    unread, logits = whole[:, :prompt], []
    for slot in range(CHUNK):
        logits.append(writer.model(unread, writer._guide(plan, prompt, slot, unread.shape[1]), caches)[:, -1])
        unread = whole[:, prompt + slot : prompt + slot + 1]
    torch.testing.assert_close(torch.stack(logits, dim=1), at_once, atol=1e-4, rtol=1e-4)


def test_texts_are_a_pure_function_of_the_seed(writer: Writer) -> None:
    prompts = text(length=8)
    for sigma in (None, 0.7):
        written = writer.write(prompts, 2 * CHUNK + 1, sigma, seed=4)
        assert written.shape == (2, 8 + 2 * CHUNK + 1)
        assert torch.equal(written[:, :8], prompts)
        assert torch.equal(written, writer.write(prompts, 2 * CHUNK + 1, sigma, seed=4))
        assert not torch.equal(written, writer.write(prompts, 2 * CHUNK + 1, sigma, seed=5))


@pytest.mark.parametrize("idea", ["lagged", "planned"])
def test_a_resumed_run_is_the_one_that_was_never_stopped(
    tmp_path: Path, tiny: TrainingConfig, corpus: Corpus, deep: ArModel, planner: Planner, idea: str
) -> None:
    config = replace(tiny, architecture=replace(tiny.architecture, context_bytes=LENGTH))

    def task() -> LaggedTask | PlannedTask:
        torch.manual_seed(0)
        stage = ArStage(local(config.architecture), 0)
        if idea == "lagged":
            return LaggedTask("it", GuidedLocal(stage, config.architecture.width), deep, 2, corpus, config)
        model = GuidedLocal(stage, config.architecture.code_dim)
        return PlannedTask("it", model, planner, (3.0, 0.3), CHUNK, 2.0, corpus, config)

    whole = task()
    losses = Run(whole, config, tmp_path / "whole", "run").train()
    assert all(0 < nats < 20 for nats in losses.values())
    stopped = Run(task(), config, tmp_path / "stopped", "run")
    for _ in range(4):
        train_step(stopped.task, stopped.optimizers, stopped.config, stopped.step)
        stopped.step += 1
    stopped._save()
    resumed = task()
    Run(resumed, config, tmp_path / "stopped", "run").train()
    for ours, theirs in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_window_by_window_is_the_mean_over_all(deep: ArModel) -> None:
    whole = text(rows=6)
    nats = window_nats(lambda part: deep(part[:, :-1]), whole, 5)
    assert nats.shape == (6,)
    scores = deep(whole[:, :-1])[:, 4:]
    expected = torch.nn.functional.cross_entropy(scores.reshape(-1, 256), whole[:, 5:].reshape(-1))
    torch.testing.assert_close(nats.mean(), expected)
    gain, error = gain_bits(nats + 0.6931472, nats)
    assert gain == pytest.approx(1, abs=1e-5)
    assert error == pytest.approx(0, abs=1e-5)


def test_entropy_is_counted_by_hand() -> None:
    assert entropy_bits(torch.tensor([[1, 2], [1, 2]]), 1) == pytest.approx(1)
    assert entropy_bits(torch.tensor([[1, 2], [1, 2]]), 2) == pytest.approx(0)


def test_the_table_takes_the_mean_over_seeds() -> None:
    rows = [Told("alone", "next byte", s, 3.0, 0.0, 0.0) for s in (0, 1)]
    rows += [Told("lagged-ar-8", "next byte", s, 2.0 + s, 1.0 - s, 0.1) for s in (0, 1)]
    assert "| lagged-ar-8 | next byte | 2.500 | 0.500 ± 0.500 |" in table(Report(rows, []))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    architecture = Architecture(
        parts=2, layers=1, width=16, heads=2, context_bytes=64, code_dim=8, condition_dim=8, context="own"
    )
    create_untrained(directory / "chain", "chain", architecture)
    create_untrained(directory / "ar", "ar", architecture)
    create_untrained(directory / "local", "ar", local(architecture))
    return directory


def test_the_command_trains_each_arm_once_and_measures(
    tmp_path: Path, bundle: Path, onesweep: Callable[..., Any], settings: Callable[..., Path], text_file: Path
) -> None:
    given = ["train", "ideas", "--checkpoint", bundle, "--config", settings(), "--data", text_file, "--threads", 1]
    given += ["--steps", 2, "--out", tmp_path / "out", "--from-local", "--json"]
    lagged = json.loads(onesweep(*given, "--idea", "lagged", "--lags", "1,4").out)
    assert [row["arm"] for row in lagged["told"]] == ["alone", "lagged-ar-1", "lagged-ar-4"]
    assert lagged["written"] == []
    few = ["--sigmas", "3,0.3", "--chunk", 8, "--prompts", 2, "--prompt-bytes", 8, "--written-bytes", 12]
    planned = json.loads(onesweep(*given, "--idea", "planned", *few).out)
    assert [row["told"] for row in planned["told"]] == ["no plan", "no plan", "sigma 3", "sigma 0.3"]
    assert planned["told"][0]["bits_per_byte"] == lagged["told"][0]["bits_per_byte"]  # the same model alone
    kinds = ["human", "chain alone", "alone", "planned-1, no plan", "planned-1, sigma 3", "planned-1, sigma 0.3"]
    assert [row["arm"] for row in planned["written"]] == kinds
    logs = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.jsonl")}
    again = onesweep(*given[:-1], "--idea", "planned", *few)
    assert "| planned-1, sigma 0.3 |" in again.out
    assert {path for path, log in logs.items() if path.read_bytes().count(b"\n") != log.count(b"\n")} == set()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--idea", "lagged", "--lags", "0"], "lags are numbers of bytes of at least 1"),
        (["--idea", "lagged", "--features", "scorer"], "has no scorer/"),
        (["--idea", "planned", "--sigmas", "11"], "from 10 down to 0.15"),
        (["--idea", "planned", "--sigmas", "nan"], "sigmas must be above 0"),
        (["--idea", "planned", "--rolled", "0.5"], "rolled must be at least 1"),
        (["--idea", "planned", "--chunk", "0"], "chunk must be at least 1"),
        (["--idea", "planned", "--prompt-bytes", "30"], "do not fit into a context of 32 bytes"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(
    tmp_path: Path,
    bundle: Path,
    onesweep: Callable[..., Any],
    settings: Callable[..., Path],
    text_file: Path,
    flags: list[str],
    says: str,
) -> None:
    given = ["--checkpoint", bundle, "--config", settings(), "--data", text_file, "--threads", 1]
    outcome = onesweep("train", "ideas", *given, "--out", tmp_path / "out", *flags)
    assert outcome.code != 0
    assert says in outcome.message
    assert not (tmp_path / "out").exists()


def test_a_trial_needs_something_to_try() -> None:
    with pytest.raises(InputError, match="windows must be at least 1"):
        Trial("lagged", Path("weights"), windows=0)
