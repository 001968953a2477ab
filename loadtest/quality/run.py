"""A run of the ruler: prompts, texts of every arm from a real ring, and the panel over them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.load.access import Access
from loadtest.load.target import TargetSettings, check_target, open_target
from loadtest.machine import commit, this_machine
from loadtest.quality.arm import INFILL, QualityArm, at_temperatures, parse_arms
from loadtest.quality.generation import RouterFacts, check_served, generate_all, router_facts
from loadtest.quality.judge import Judge, Progress, check_judge, default_judge, open_judge
from loadtest.quality.matched import at_human_entropy
from loadtest.quality.ngram import MIN_TRAIN_BYTES, NgramModel
from loadtest.quality.novelty import TrainingText
from loadtest.quality.panel import Figures, Panel
from loadtest.quality.prompts import Passage, PromptSet, cut_prompts
from loadtest.quality.row import HUMAN, QualityRow
from loadtest.quality.text import held_out_documents, training_documents
from serving.client import Result
from serving.modes import MODES
from serving.modes.base import DEFAULT_CHUNK, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from stages.bundle import find_bundle
from stages.errors import InputError
from stages.manifest import read_manifest

LOCAL = "local"
SUFFIX_BYTES = 64
SAMPLES = 6
"""Prompts whose texts are shown: the first ones, as they come."""

Meter = Callable[[str, int], AbstractContextManager[Progress]]
"""Opens a progress bar with a name and a number of texts."""


@dataclass(frozen=True)
class QualitySettings:
    """What `onesweep quality` is told."""

    prompts: Path
    modes: str | None = None
    """None: all that the router serves, without `infill`, whose texts answer another question, and `auto`."""
    count: int = 100
    max_bytes: int = 256
    prompt_bytes: int = 64
    judge: str | None = None
    """None: the best that is installed."""
    train: Path | None = None
    seed: int = 0
    weights: Path | None = None
    access: Access | None = None
    temperatures: tuple[float, ...] = ()
    in_flight: int = 8


@dataclass(frozen=True)
class Ground:
    """What texts are measured on: prompts, training text, judges."""

    prompts: PromptSet
    judge: Judge
    ngram: NgramModel | None
    training: TrainingText | None
    known_training: bool

    def panel(self, seed: int, progress: Progress) -> Panel:
        return Panel(self.prompts.reference, self.judge, self.ngram, self.training, seed, progress, self.known_training)


@dataclass(frozen=True)
class QualityResult:
    """What was measured, for a table, a page or a file."""

    settings: QualitySettings
    ground: Ground
    weights: dict[str, str]
    rows: list[QualityRow]
    samples: list[dict[str, Any]]
    command: str

    def record(self) -> dict[str, Any]:
        s, prompts = self.settings, self.ground.prompts
        return {
            "quality": "run",
            "command": self.command,
            "commit": commit(),
            "machine": asdict(this_machine()),
            "settings": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(s).items()},
            "weights": self.weights,
            "judge": self.ground.judge.name,
            "second_judge": self.ground.ngram.name if self.ground.ngram else None,
            "prompts": {
                "path": str(s.prompts),
                "sha256": prompts.digest(),
                "count": len(prompts.asked),
                "reference_count": len(prompts.reference),
                "prompt_bytes": s.prompt_bytes,
                "bytes": s.max_bytes,
            },
            "training": training_record(self.ground),
            "seed": s.seed,
            "rows": [row.to_record() for row in self.rows],
            "samples": self.samples,
        }


def training_record(ground: Ground) -> dict[str, Any] | None:
    if ground.training is None:
        return None
    raw = ground.training.raw
    return {
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "what": "training text" if ground.known_training else "the text between the prompts",
    }


def check_settings(settings: QualitySettings) -> tuple[QualityArm, ...] | None:
    """Everything that can be refused before a file is read or a host started; the arms, if they are named.

    Raises OnesweepError.
    """
    check_numbers(settings)
    if settings.access is not None and settings.weights is not None:
        raise InputError("--router names a deployment that is there, as it is: leave out --weights")
    arms = None if settings.modes is None else parse_arms(settings.modes, MODES)
    check_target(_target(settings))
    return None if arms is None else at_temperatures(arms, settings.temperatures)


def check_numbers(settings: QualitySettings) -> None:
    """Raises InputError for a number out of range, or a judge that is not there."""
    for flag, value in (
        ("--count", settings.count),
        ("--bytes", settings.max_bytes),
        ("--prompt-bytes", settings.prompt_bytes),
        ("--in-flight", settings.in_flight),
    ):
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    if not 0 <= settings.seed < 1 << 63:
        raise InputError(f"--seed must be 0 to {(1 << 63) - 1}, not {settings.seed}")
    check_judge(settings.judge or default_judge())


def cut(settings: QualitySettings, suffix_bytes: int = 0) -> PromptSet:
    """Raises InputError."""
    documents = held_out_documents(settings.prompts)
    s = settings
    return cut_prompts(documents, s.count, s.prompt_bytes, s.max_bytes, s.seed, suffix_bytes)


def lay_ground(settings: QualitySettings, prompts: PromptSet) -> Ground:
    """Fits and loads the judges: some ten seconds each. Raises OnesweepError."""
    documents = training_documents(settings.prompts, settings.train)
    raw = b"\n".join(document.raw for document in documents) or prompts.rest
    ngram = NgramModel(raw) if len(raw) >= MIN_TRAIN_BYTES else None
    training = TrainingText(raw) if ngram else None
    return Ground(prompts, open_judge(settings.judge or default_judge(), ngram), ngram, training, bool(documents))


def run_quality(settings: QualitySettings, command: str, meter: Meter) -> QualityResult:
    """Raises OnesweepError."""
    arms = check_settings(settings)
    infills = arms is not None and any(arm.mode == INFILL for arm in arms)
    prompts = cut(settings, SUFFIX_BYTES if infills else 0)
    with open_target(_target(settings)) as target:
        facts = router_facts(target.access)
        arms = at_temperatures(_all_arms(facts), settings.temperatures) if arms is None else arms
        check_served(arms, facts, settings.prompt_bytes + settings.max_bytes)
        with meter("generating", len(arms) * len(prompts.asked)) as progress:
            results = generate_all(
                target.access,
                arms,
                prompts.asked,
                settings.max_bytes,
                settings.seed,
                min(settings.in_flight, facts.request_limit),
                progress,
            )
    ground = lay_ground(settings, prompts)
    sets = len(arms) * (2 if infills else 1) + 2
    with meter("judging", sets * len(prompts.asked)) as progress:
        rows = measure_rows(ground.panel(settings.seed, progress), prompts.asked, results)
    weights = _bundle_digests(settings) or facts.digests
    return QualityResult(settings, ground, weights, rows, _samples(prompts, results), command)


def measure_rows(
    panel: Panel, passages: Sequence[Passage], results: dict[QualityArm, list[Result]]
) -> list[QualityRow]:
    """A row for each arm, then `human`."""
    truth = [passage.continuation for passage in passages]
    texts = {arm: [result.output for result in taken] for arm, taken in results.items()}
    measured = {arm: panel.measure(passages, outputs) for arm, outputs in texts.items()}
    human = panel.measure(passages, truth)
    rows = []
    for arm, figures in measured.items():
        panel.put_differences(figures, "judge_minus_human", human)
        panel.put_differences(figures, "judge_minus_local", _local_beside(arm, measured))
        if all(passage.suffix for passage in passages):
            panel.put_infill(figures, passages, texts[arm])
        rows.append(_row(arm, results[arm], figures))
    if all(passage.suffix for passage in passages):
        panel.put_infill(human, passages, truth)
    panel.put_differences(human, "judge_minus_local", _local_beside(None, measured))
    last = QualityRow(HUMAN, n=len(passages), figures=human.values, reasons=human.reasons)
    return at_human_entropy([*rows, last], last)


def _row(arm: QualityArm, results: Sequence[Result], figures: Figures) -> QualityRow:
    denoises = arm.mode in ("sweep", "chunked")
    return replace(
        _settings_row(arm),
        chunk=_most(results, "chunk") or arm.chunk or (DEFAULT_CHUNK if arm.mode == "chunked" else None),
        candidates=_most(results, "candidates") or arm.candidates,
        scorer=next((s for r in results if (s := getattr(r, "scorer", None))), arm.scorer),
        steps=arm.steps or (DEFAULT_STEPS if denoises else None),
        sweeps=statistics.fmean(result.sweeps for result in results),
        n=len(results),
        seconds=statistics.median(result.latency_ms for result in results) / 1000,
        host_seconds=statistics.fmean(result.host_seconds for result in results),
        compute_seconds=statistics.fmean(result.compute_ms for result in results) / 1000,
        wire_bytes=statistics.fmean(result.wire_bytes_total for result in results),
        acceptance=_acceptance(results),
        effective_samples=_mean_known(results, "effective_samples"),
        divergence_bits=_mean_known(results, "divergence_bits"),
        figures=figures.values,
        reasons=figures.reasons,
    )


def _settings_row(arm: QualityArm) -> QualityRow:
    temperature = DEFAULT_TEMPERATURE if arm.temperature is None else arm.temperature
    return QualityRow(arm.mode, temperature=temperature, spec=arm.label)


def _local_beside(arm: QualityArm | None, measured: dict[QualityArm, Figures]) -> Figures | None:
    """What `local` wrote at the same temperature; at its only one where there is no such row."""
    own = {other.temperature: figures for other, figures in measured.items() if other.mode == LOCAL}
    only = next(iter(own.values())) if len(own) == 1 else None
    return only if arm is None else own.get(arm.temperature, only)


def _acceptance(results: Sequence[Result]) -> float | None:
    reached = sum(result.reached for result in results)
    return sum(result.accepted for result in results) / reached if reached else None


def _most(results: Sequence[Result], name: str) -> int | None:
    return max(getattr(result, name, None) or 0 for result in results) or None


def _mean_known(results: Sequence[Result], name: str) -> float | None:
    values = [getattr(result, name, None) for result in results]
    known = [float(value) for value in values if value]
    return statistics.fmean(known) if known else None


def _all_arms(facts: RouterFacts) -> tuple[QualityArm, ...]:
    return tuple(QualityArm(mode) for mode in facts.modes if mode not in (INFILL, "auto"))


def _target(settings: QualitySettings) -> TargetSettings:
    return TargetSettings(access=settings.access, checkpoint=settings.weights)


def _bundle_digests(settings: QualitySettings) -> dict[str, str]:
    """Manifest digests of the weights that were started here."""
    if settings.access is not None:
        return {}
    found = asdict(find_bundle(_target(settings).bundle))
    return {name: read_manifest(path).digest() for name, path in found.items() if path is not None}


def _samples(prompts: PromptSet, results: dict[QualityArm, list[Result]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": passage.prompt.decode(),
            HUMAN: passage.continuation.decode(),
            "texts": {arm.label: taken[i].text for arm, taken in results.items()},
        }
        for i, passage in enumerate(prompts.asked[:SAMPLES])
    ]
