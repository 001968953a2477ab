"""A run of `onesweep bench quality`: prompts, texts of every arm from a real ring, and the panel over them.

With `--check`, human text must win against texts that are made to please single figures.
"""

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from onesweep.loadtest.quality.commands import QualitySettings
from onesweep.loadtest.quality.generation import (
    INFILL,
    QualityArm,
    at_temperatures,
    check_served,
    generate_all,
    parse_arms,
    router_facts,
)
from onesweep.loadtest.quality.judge import MIN_TRAIN_BYTES, NgramModel, check_judge, default_judge, open_judge
from onesweep.loadtest.quality.measures import TrainingText
from onesweep.loadtest.quality.panel import (
    AT_AR_ENTROPY,
    AT_HUMAN_ENTROPY,
    GAP_SHARE,
    HUMAN,
    Comparison,
    JudgedText,
    QualityPanel,
    QualityRow,
    Resampled,
    TextFigures,
    bits_at,
    verdict,
)
from onesweep.loadtest.quality.prompts import Passage, PromptSet, cut_prompts, held_out_documents, training_documents
from onesweep.loadtest.report.record import origin, settings_record
from onesweep.loadtest.report.table import open_meter
from onesweep.loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from onesweep.serving.client.client import Result
from onesweep.serving.modes import MODES
from onesweep.serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError

LOCAL, AR = "local", "ar"
SUFFIX_BYTES = 64  # true text behind a gap, judged with it
SAMPLES = 6  # prompts whose texts are shown: the first ones, as they come


@dataclass(frozen=True)
class QualityResult:
    """Rows of a run or a check, a sentence on what they were measured with, and the record for a JSON file."""

    rows: list[QualityRow]
    sentence: str
    record: dict[str, Any]


def result_of(
    kind: str, settings: QualitySettings, judged: JudgedText, rows: list[QualityRow], **more: object
) -> QualityResult:
    """:param kind: `run` or `check`."""
    training, words = None, "no training text"
    if judged.training is not None:
        raw = judged.training.raw
        what = "training text" if judged.known_training else "the text between the prompts"
        training = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "what": what}
        words = f"n-gram model and words from {len(raw):,} bytes of {judged.source}"
    sentence = (
        f"{settings.count} prompts of {settings.prompt_bytes} bytes, {settings.max_bytes} bytes each; "
        f"{len(judged.prompts.reference)} other passages as the human reference; judge {judged.judge.name}; {words}"
    )
    prompts = {
        "path": str(settings.prompts),
        "sha256": judged.prompts.digest(),
        "count": len(judged.prompts.asked),
        "reference_count": len(judged.prompts.reference),
        "prompt_bytes": settings.prompt_bytes,
        "bytes": settings.max_bytes,
    }
    record = {
        "quality": kind,
        **origin(seed=settings.seed),
        "settings": settings_record(settings),
        "judge": judged.judge.name,
        "prompts": prompts,
        "training": training,
        "rows": [row.to_record() for row in rows],
        **more,
    }
    return QualityResult(rows, sentence, record)


def check_settings(settings: QualitySettings) -> tuple[QualityArm, ...] | None:
    """The arms, if they are named. Raises OnesweepError for all that can be refused before a host is started."""
    check_judge(settings.judge or default_judge())
    if settings.access is not None and settings.weights is not None:
        raise InputError("--router names a deployment that is there, as it is: leave out --weights")
    arms = None if settings.modes is None else parse_arms(settings.modes, tuple(MODES))
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


def run_quality(settings: QualitySettings) -> QualityResult:
    """Raises OnesweepError."""
    arms = check_settings(settings)
    infills = arms is not None and any(arm.mode == INFILL for arm in arms)
    prompts = cut(settings, SUFFIX_BYTES if infills else 0)
    with open_testbed(target_settings(settings)) as target:
        facts = router_facts(target.access)
        if arms is None:
            every = tuple(QualityArm(mode) for mode in facts.modes if mode not in (INFILL, "auto"))
            arms = at_temperatures(every, settings.temperatures)
        check_served(arms, facts, settings.prompt_bytes + settings.max_bytes)
        with open_meter("generating", len(arms) * len(prompts.asked)) as progress:
            results = generate_all(target.access, arms, prompts.asked, settings, facts, progress)
    judged = judge_text(settings, prompts)
    sets = (len(arms) + 1) * (2 if infills else 1)
    with open_meter("judging", sets * len(prompts.asked)) as progress:
        rows = measure_rows(QualityPanel(judged, settings.seed, progress), prompts.asked, results)
    return result_of(
        "run",
        settings,
        judged,
        rows,
        # what was started here is measured by its files, which a router that is found does not show
        weights=_bundle_digests(settings) or facts.digests,
        second_judge=judged.ngram.name if judged.ngram else None,
        samples=samples_of(prompts, results, SAMPLES),
    )


def measure_rows(
    panel: QualityPanel, passages: Sequence[Passage], results: dict[QualityArm, list[Result]]
) -> list[QualityRow]:
    """A row for each arm, then `human`."""
    truth = [passage.continuation for passage in passages]
    texts = {arm: [result.output for result in taken] for arm, taken in results.items()}
    measured = {arm: panel.measure(passages, outputs) for arm, outputs in texts.items()}
    human = panel.measure(passages, truth)
    put_matched(measured, human, panel.seed)
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
    return [*rows, _bare_row(HUMAN, human)]


def put_matched(measured: Mapping[QualityArm, TextFigures], human: TextFigures, seed: int) -> None:
    """Judge bits of each arm at the 4-gram entropy of human text and of `ar` at the row's temperature, and how much of
    the way from `local` to `ar` these are.

    Between the arm's temperatures around that entropy, with bootstrap intervals over prompts.
    """
    drawn, wanted = {arm: figures.resampled(seed) for arm, figures in measured.items()}, human.resampled(seed).entropy

    def warming(arm: QualityArm) -> list[Resampled]:
        """The arm at all its temperatures."""
        alike = [other for other in drawn if replace(other, temperature=None) == replace(arm, temperature=None)]
        return [drawn[other] for other in sorted(alike, key=temperature_of)]

    references = {temperature_of(arm): arm for arm in drawn if is_plain(arm, AR)}
    for arm, figures in measured.items():
        figures.put_draws(AT_HUMAN_ENTROPY, bits_at(warming(arm), wanted))
        reference = references.get(temperature_of(arm), arm)
        if reference == arm:
            continue
        bits, floor = (bits_at(warming(each), drawn[reference].entropy) for each in (arm, QualityArm(LOCAL)))
        figures.put_draws(AT_AR_ENTROPY, bits)
        if isinstance(bits, str) or isinstance(floor, str):
            figures.reasons[GAP_SHARE] = bits if isinstance(bits, str) else f"mode `local`: {floor}"
        else:
            figures.put_draws(GAP_SHARE, (floor - bits) / (floor - drawn[reference].bits))


def temperature_of(arm: QualityArm) -> float:
    """The temperature of the arm's requests."""
    return DEFAULT_TEMPERATURE if arm.temperature is None else arm.temperature


def is_plain(arm: QualityArm, mode: str) -> bool:
    """True for a mode with its default settings, at any temperature."""
    return replace(arm, temperature=None) == QualityArm(mode)


def _row(arm: QualityArm, results: Sequence[Result], figures: TextFigures) -> QualityRow:
    denoises = arm.mode in ("sweep", "chunked")
    return QualityRow(
        arm.mode,
        temperature=temperature_of(arm),
        spec=arm.label,
        chunk=_most(results, "chunk") or arm.chunk,
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


def _local_beside(arm: QualityArm | None, measured: dict[QualityArm, TextFigures]) -> TextFigures | None:
    """Figures of `local` at the same temperature; at its only one where there is no such row."""
    own = {other.temperature: figures for other, figures in measured.items() if is_plain(other, LOCAL)}
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


def target_settings(settings: QualitySettings) -> TestbedSettings:
    return TestbedSettings(access=settings.access, checkpoint=settings.weights)


def _bundle_digests(settings: QualitySettings) -> dict[str, str]:
    """Manifest digests of the weights that were started here."""
    if settings.access is not None:
        return {}
    found = asdict(find_bundle(target_settings(settings).bundle))
    return {name: read_manifest(path).digest() for name, path in found.items() if path is not None}


def samples_of(prompts: PromptSet, results: dict[QualityArm, list[Result]], count: int) -> list[dict[str, Any]]:
    """The first texts, as they came."""
    return [
        {
            "prompt": passage.prompt.decode(),
            "suffix": passage.suffix.decode(),
            HUMAN: passage.continuation.decode(),
            "texts": {arm.label: taken[i].text for arm, taken in results.items()},
        }
        for i, passage in enumerate(prompts.asked[:count])
    ]


# The panel held against itself: texts that please single figures must lose to human text.

PHRASE_WORDS = 4  # short enough that a judge knows the next word for sure, as a model does that got stuck


def shuffled_words(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its words, cut at blanks, in another order."""
    words = passage.continuation.split(b" ")
    return b" ".join(words[i] for i in numbers.permutation(len(words)))


def shuffled_bytes(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its characters in another order."""
    text = passage.continuation.decode()
    return "".join(text[i] for i in numbers.permutation(len(text))).encode()


def repeated_phrase(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The first words of the true continuation, again and again."""
    phrase = b" ".join(passage.continuation.split()[:PHRASE_WORDS]) + b" "
    return _repeated(phrase, len(passage.continuation))


CHEATS: dict[str, Callable[[Passage, np.random.Generator], bytes]] = {
    "shuffled words": shuffled_words,
    "shuffled bytes": shuffled_bytes,
    "repeated phrase": repeated_phrase,
    "copied prompt": lambda passage, numbers: _repeated(passage.prompt, len(passage.continuation)),
}


def cheat_texts(name: str, passages: Sequence[Passage], seed: int) -> list[bytes]:
    """One text for each passage, of the length of its true continuation."""
    numbers = np.random.default_rng(seed)
    return [CHEATS[name](passage, numbers) for passage in passages]


def _repeated(text: bytes, length: int) -> bytes:
    return bytes(islice(cycle(text), length))


REFERENCE = "reference"  # human text that is nobody's: both sides are held against it


@dataclass(frozen=True)
class CheckResult(QualityResult):
    """Rows of the cheats, of one half of the human text and of the other, and how the first half did."""

    verdicts: dict[str, Comparison]  # of human text against each cheat

    @property
    def holds(self) -> bool:
        return all(one.wins for one in self.verdicts.values())

    def sentences(self) -> list[str]:
        return [_sentence(name, one) for name, one in self.verdicts.items()]


def run_check(settings: QualitySettings) -> CheckResult:
    """Human continuations, and cheats made from them, against other human text. Raises OnesweepError."""
    check_judge(settings.judge or default_judge())
    prompts = cut(settings)
    asked, others = prompts.asked, prompts.reference
    if len(others) < settings.count:
        raise InputError(
            f"the check needs text for {2 * settings.count} passages, half of them for comparison; there is room for "
            f"{settings.count + len(others)}: give more text, or a smaller --count"
        )
    judged = judge_text(settings, prompts)
    with open_meter("judging", (len(CHEATS) + 2) * settings.count) as progress:
        panel = QualityPanel(judged, settings.seed, progress)
        reference = _bare_row(REFERENCE, panel.measure(others, panel.reference))
        human = _bare_row(HUMAN, panel.measure(asked, [passage.continuation for passage in asked]))
        cheats = {
            name: _bare_row(name, panel.measure(asked, cheat_texts(name, asked, settings.seed))) for name in CHEATS
        }
    verdicts = {name: verdict(human, cheat, reference) for name, cheat in cheats.items()}
    shown = {name: asdict(one) | {"human_wins": one.wins} for name, one in verdicts.items()}
    holds, rows = all(one.wins for one in verdicts.values()), [*cheats.values(), human, reference]
    return CheckResult(
        **vars(result_of("check", settings, judged, rows, holds=holds, verdicts=shown)), verdicts=verdicts
    )


def _bare_row(name: str, figures: TextFigures) -> QualityRow:
    """A row of texts that no request wrote."""
    return QualityRow(name, n=len(figures.sizes), figures=figures.values, reasons=figures.reasons)


def _sentence(name: str, one: Comparison) -> str:
    losses = f", farther in {', '.join(one.farther)}" if one.farther else ""
    return (
        f"{'holds' if one.wins else 'FAILS'}: human text against {name}: "
        f"nearer to other human text in {len(one.nearer)} of {len(one.nearer) + len(one.farther)} figures{losses}"
    )
