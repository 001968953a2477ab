"""A trial of an idea: the same local model with and without it, on equal steps and batches, over several seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from stages.ar import ArModel, ArStage
from stages.bundle import find_bundle
from stages.checkpoint import load_ar, load_chain
from stages.errors import CheckpointError, ConfigError, InputError
from stages.manifest import read_manifest
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.evaluation import bits
from trainer.ideas.guided import GuidedLocal
from trainer.ideas.lagged import LaggedTask
from trainer.ideas.measure import Measured, gain_bits, mean_bits
from trainer.ideas.planned import PlannedTask
from trainer.ideas.planning import Planner
from trainer.ideas.report import ALONE, Report, Told, Written
from trainer.ideas.writing import GRAM, Writer, entropy_bits, judge_nats, write_alone
from trainer.run import Run, Task

Idea = Literal["lagged", "planned"]
NO_GUIDE = 1
"""Dimension of the guide that `alone` never gets: both ideas share one trained model."""


@dataclass(frozen=True)
class Trial:
    """What is tried, beside the settings of the training."""

    idea: Idea
    checkpoint: Path
    """A bundle: its models are frozen; `local` is where the local model starts with `from_local`."""
    from_local: bool = False
    features: Literal["ar", "scorer", "local"] = "ar"
    lags: tuple[int, ...] = (1, 8, 32)
    sigmas: tuple[float, ...] = (10.0, 3.0, 1.0, 0.5, 0.15)
    chunk: int = 32
    rolled: float = 1.0
    """Plans of training are denoised from this many times sigma_end."""
    steps_per_block: int = 8
    windows: int = 64
    prompts: int = 64
    prompt_bytes: int = 64
    written_bytes: int = 128

    def __post_init__(self) -> None:
        for name in ("chunk", "steps_per_block", "windows", "prompts", "prompt_bytes", "written_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.lags or min(self.lags) < 1:
            raise InputError(f"lags are numbers of bytes of at least 1, not {list(self.lags)}")
        if not self.sigmas or not all(sigma > 0 for sigma in self.sigmas):
            raise InputError(f"sigmas must be above 0, not {list(self.sigmas)}")
        if not self.rolled >= 1:
            raise InputError(f"rolled must be at least 1, not {self.rolled}")


class IdeaTask(Task, Protocol):
    def measure(self, text: Tensor, skip: int) -> Measured: ...


def run_trial(trial: Trial, seeds: Sequence[int], config: TrainingConfig, corpus: Corpus, out: Path) -> Report:
    """Train every arm for each seed, where that is not done yet, and measure. Raises OnesweepError."""
    corpus.require(config.architecture.context_bytes + 1)
    report = Report([], [])
    for seed in seeds:
        seeded = replace(config, seed=seed)
        if trial.idea == "lagged":
            _try_lagged(trial, seeded, corpus, out, report)
        else:
            _try_planned(trial, seeded, corpus, out, report)
    return report


def _try_lagged(trial: Trial, config: TrainingConfig, corpus: Corpus, out: Path, report: Report) -> None:
    source = _model_in(trial.checkpoint, trial.features)
    deep, context = load_ar(source), config.architecture.context_bytes
    _check_context(source, deep.architecture.context_bytes, context)
    lags: tuple[int | None, ...] = (None, *trial.lags)
    measured = {}
    for lag in lags:
        name = ALONE if lag is None else f"lagged-{trial.features}-{lag}"

        def make(model: GuidedLocal, lag: int | None = lag, name: str = name) -> IdeaTask:
            return LaggedTask(name, model, deep, lag, corpus, config)

        frozen = {} if lag is None else {"features": read_manifest(source).digest(), "lag": lag}
        dim = NO_GUIDE if lag is None else deep.architecture.width
        task = _trained(trial, make, dim, config, corpus, out, name, frozen)
        measured[name] = task.measure(*_validation(trial, config, corpus))
    _tell(measured, config.seed, report)


def _try_planned(trial: Trial, config: TrainingConfig, corpus: Corpus, out: Path, report: Report) -> None:
    source = _model_in(trial.checkpoint, "chain")
    partition, blocks = read_manifest(source).partition, load_chain(source)
    assert partition is not None
    planner = Planner(blocks, partition, trial.steps_per_block)
    _check_context(source, blocks[0].architecture.context_bytes, config.architecture.context_bytes + 1)
    judge = load_ar(_model_in(trial.checkpoint, "ar"))
    _check_plans(trial, planner, min(config.architecture.context_bytes, judge.architecture.context_bytes))
    measured, models = {}, {}
    for name, sigmas in ((ALONE, ()), (f"planned-{trial.rolled:g}", trial.sigmas)):

        def make(model: GuidedLocal, sigmas: tuple[float, ...] = sigmas, name: str = name) -> IdeaTask:
            return PlannedTask(name, model, planner, sigmas, trial.chunk, trial.rolled, corpus, config)

        settings = {"sigmas": sigmas, "chunk": trial.chunk, "rolled": trial.rolled, "steps": trial.steps_per_block}
        frozen = {"chain": read_manifest(source).digest(), **settings} if sigmas else {}
        dim = blocks[0].architecture.code_dim if sigmas else NO_GUIDE
        task = _trained(trial, make, dim, config, corpus, out, name, frozen)
        measured[name] = task.measure(*_validation(trial, config, corpus))
        models[name] = task.module
    _tell(measured, config.seed, report)
    _write(trial, models, planner, judge, config, corpus, report)


def _trained(
    trial: Trial,
    make: Callable[[GuidedLocal], IdeaTask],
    dim: int,
    config: TrainingConfig,
    corpus: Corpus,
    out: Path,
    name: str,
    frozen: dict[str, Any],
) -> IdeaTask:
    """A task whose model is trained. Its state stays, so that the next call only measures."""
    torch.manual_seed(config.seed)
    stage = ArStage(replace(config.architecture, parts=1, context="own"), 0)
    start = _local_start(trial, stage) if trial.from_local else ""
    task = make(GuidedLocal(stage, dim))
    identity = {"config": asdict(config), "data": corpus.digest(), "start": start, "dim": dim, **frozen}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    Run(task, config, out / f"{name}-{config.seed}", digest).train()
    task.module.eval()
    return task


def _local_start(trial: Trial, stage: ArStage) -> str:
    """Fill `stage` from the bundle's local model; the digest of that."""
    source = _model_in(trial.checkpoint, "local")
    weights = load_ar(source).stages[0].state_dict()
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in stage.state_dict().items()}:
        raise ConfigError(f"{source} has other sizes than [architecture] says; change those, or start from nothing")
    stage.load_state_dict(weights)
    return read_manifest(source).digest()


def _validation(trial: Trial, config: TrainingConfig, corpus: Corpus) -> tuple[Tensor, int]:
    """Windows side by side, the first quarter of each only read."""
    context = config.architecture.context_bytes
    windows = min(trial.windows, len(corpus.valid) // (context + 1))
    return corpus.valid_batch(max(windows, 1), context + 1), max(context // 4, 1)


def _tell(measured: dict[str, Measured], seed: int, report: Report) -> None:
    without = next(iter(measured[ALONE].values()))
    for arm, by_told in measured.items():
        for told, nats in by_told.items():
            report.told.append(Told(arm, told, seed, mean_bits(nats), *gain_bits(without, nats)))


def _write(
    trial: Trial,
    models: dict[str, Any],
    planner: Planner,
    judge: ArModel,
    config: TrainingConfig,
    corpus: Corpus,
    report: Report,
) -> None:
    length = trial.prompt_bytes + trial.written_bytes
    human = corpus.valid_batch(min(trial.prompts, max(len(corpus.valid) // length, 1)), length)
    prompts = human[:, : trial.prompt_bytes]
    planned = next(name for name in models if name != ALONE)
    beside = [("no plan", None), *((f"sigma {sigma:g}", sigma) for sigma in trial.sigmas)]
    texts = {
        "human": human,
        "chain alone": write_alone(planner, prompts, trial.written_bytes, trial.chunk, config.seed),
        ALONE: Writer(models[ALONE], planner, trial.chunk).write(prompts, trial.written_bytes, None, config.seed),
    }
    writer = Writer(models[planned], planner, trial.chunk)
    for told, sigma in beside:
        texts[f"{planned}, {told}"] = writer.write(prompts, trial.written_bytes, sigma, config.seed)
    report.written.extend(_judged(kind, config.seed, judge, text, trial.prompt_bytes) for kind, text in texts.items())


def _judged(kind: str, seed: int, judge: ArModel, text: Tensor, prompt_bytes: int) -> Written:
    nats, continuations = judge_nats(judge, text, prompt_bytes), text[:, prompt_bytes:]
    error = bits(float(nats.std()) / len(nats) ** 0.5) if len(nats) > 1 else float("nan")
    sample = bytes(continuations[0].tolist()).decode(errors="replace")
    entropies = entropy_bits(continuations, 1), entropy_bits(continuations, GRAM)
    return Written(kind, seed, mean_bits(nats), error, *entropies, sample)


def _model_in(directory: Path, name: str) -> Path:
    found: Path | None = getattr(find_bundle(directory), name)
    if found is None:
        raise CheckpointError(f"{directory} has no {name}/; give a bundle that has, with --checkpoint")
    return found


def _check_context(source: Path, has: int, needs: int) -> None:
    if has < needs:
        raise ConfigError(f"{source} reads {has} bytes, but this needs {needs}; give a smaller context_bytes")


def _check_plans(trial: Trial, planner: Planner, context: int) -> None:
    low, high = planner.partition.sigma_min, planner.partition.sigma_max
    if not all(low <= sigma <= high for sigma in trial.sigmas):
        raise InputError(f"the chain's noise goes from {high:g} down to {low:g}: choose sigmas in between")
    if trial.prompt_bytes + trial.written_bytes > context:
        raise InputError(
            f"{trial.prompt_bytes} bytes of prompt and {trial.written_bytes} written do not fit into a context of "
            f"{context} bytes; give smaller --prompt-bytes or --written-bytes"
        )
