"""A run of `onesweep quality`: prompts, texts of every arm from a real ring, and the panel over them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from loadtest.quality.generation import (
    INFILL,
    QualityArm,
    RouterFacts,
    at_temperatures,
    check_served,
    generate_all,
    parse_arms,
    router_facts,
)
from loadtest.quality.judge import MIN_TRAIN_BYTES, Judge, NgramModel, Progress, check_judge, default_judge, open_judge
from loadtest.quality.measures import TrainingText
from loadtest.quality.panel import HUMAN, QualityPanel, QualityRow, TextFigures, at_human_entropy
from loadtest.quality.prompts import Passage, PromptSet, cut_prompts, held_out_documents, training_documents
from loadtest.quality.settings import QualitySettings
from loadtest.report.record import commit, this_machine
from loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from serving.client.client import Result
from serving.modes import MODES
from serving.modes.base import DEFAULT_CHUNK, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError

LOCAL = "local"
SUFFIX_BYTES = 64
SAMPLES = 6  # prompts whose texts are shown: the first ones, as they come

Meter = Callable[[str, int], AbstractContextManager[Progress]]  # opens a progress bar with a name and a number of texts


@dataclass(frozen=True)
class JudgedText:
    """The prompts of a run, and what their continuations are judged by."""

    prompts: PromptSet
    judge: Judge
    ngram: NgramModel | None
    training: TrainingText | None
    known_training: bool

    def panel(self, seed: int, progress: Progress) -> QualityPanel:
        return QualityPanel(
            self.prompts.reference, self.judge, self.ngram, self.training, seed, progress, self.known_training
        )

    def sentence(self, settings: QualitySettings) -> str:
        what = "no training text"
        if self.training is not None:
            source = "training text" if self.known_training else "text between the prompts, for want of training text"
            what = f"n-gram model and words from {len(self.training.raw):,} bytes of {source}"
        return (
            f"{settings.count} prompts of {settings.prompt_bytes} bytes, {settings.max_bytes} bytes each; "
            f"{len(self.prompts.reference)} other passages as the human reference; judge {self.judge.name}; {what}"
        )

    def record(self, settings: QualitySettings) -> dict[str, Any]:
        """The origin of the figures: text, judges, settings."""
        training = None
        if self.training is not None:
            raw = self.training.raw
            what = "training text" if self.known_training else "the text between the prompts"
            training = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "what": what}
        return {
            "settings": settings.to_record(),
            "judge": self.judge.name,
            "prompts": {
                "path": str(settings.prompts),
                "sha256": self.prompts.digest(),
                "count": len(self.prompts.asked),
                "reference_count": len(self.prompts.reference),
                "prompt_bytes": settings.prompt_bytes,
                "bytes": settings.max_bytes,
            },
            "training": training,
            "seed": settings.seed,
        }


@dataclass(frozen=True)
class QualityResult:
    """Rows of all arms and of human text, and the first texts as they came."""

    settings: QualitySettings
    judged: JudgedText
    weights: dict[str, str]
    rows: list[QualityRow]
    samples: list[dict[str, Any]]
    command: str

    def record(self) -> dict[str, Any]:
        return {
            **head("run", self.command),
            **self.judged.record(self.settings),
            "weights": self.weights,
            "second_judge": self.judged.ngram.name if self.judged.ngram else None,
            "rows": [row.to_record() for row in self.rows],
            "samples": self.samples,
        }


def head(kind: str, command: str) -> dict[str, Any]:
    return {"quality": kind, "command": command, "commit": commit(), "machine": asdict(this_machine())}


def check_settings(settings: QualitySettings) -> tuple[QualityArm, ...] | None:
    """The arms, if they are named. Raises OnesweepError for all that can be refused before a host is started."""
    check_judge(settings.judge or default_judge())
    if settings.access is not None and settings.weights is not None:
        raise InputError("--router names a deployment that is there, as it is: leave out --weights")
    arms = None if settings.modes is None else parse_arms(settings.modes, MODES)
    check_testbed(target_settings(settings))
    return None if arms is None else at_temperatures(arms, settings.temperatures)


def cut(settings: QualitySettings, suffix_bytes: int = 0) -> PromptSet:
    """Raises InputError."""
    s, documents = settings, held_out_documents(settings.prompts)
    return cut_prompts(documents, s.count, s.prompt_bytes, s.max_bytes, s.seed, suffix_bytes)


def judge_text(settings: QualitySettings, prompts: PromptSet) -> JudgedText:
    """Fits and loads the judges: some ten seconds each. Raises OnesweepError."""
    documents = training_documents(settings.prompts, settings.train)
    raw = b"\n".join(document.raw for document in documents) or prompts.rest
    ngram = NgramModel(raw) if len(raw) >= MIN_TRAIN_BYTES else None
    training = TrainingText(raw) if ngram else None
    return JudgedText(prompts, open_judge(settings.judge or default_judge(), ngram), ngram, training, bool(documents))


def run_quality(settings: QualitySettings, command: str, meter: Meter) -> QualityResult:
    """Raises OnesweepError."""
    arms = check_settings(settings)
    infills = arms is not None and any(arm.mode == INFILL for arm in arms)
    prompts = cut(settings, SUFFIX_BYTES if infills else 0)
    with open_testbed(target_settings(settings)) as target:
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
    judged = judge_text(settings, prompts)
    sets = len(arms) * (2 if infills else 1) + 2
    with meter("judging", sets * len(prompts.asked)) as progress:
        rows = measure_rows(judged.panel(settings.seed, progress), prompts.asked, results)
    weights = _bundle_digests(settings) or facts.digests
    return QualityResult(settings, judged, weights, rows, _samples(prompts, results), command)


def measure_rows(
    panel: QualityPanel, passages: Sequence[Passage], results: dict[QualityArm, list[Result]]
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


def _row(arm: QualityArm, results: Sequence[Result], figures: TextFigures) -> QualityRow:
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


def _local_beside(arm: QualityArm | None, measured: dict[QualityArm, TextFigures]) -> TextFigures | None:
    """Figures of `local` at the same temperature; at its only one where there is no such row."""
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


def target_settings(settings: QualitySettings) -> TestbedSettings:
    return TestbedSettings(access=settings.access, checkpoint=settings.weights)


def _bundle_digests(settings: QualitySettings) -> dict[str, str]:
    """Manifest digests of the weights that were started here."""
    if settings.access is not None:
        return {}
    found = asdict(find_bundle(target_settings(settings).bundle))
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
