"""Gaps of several lengths, filled by modes that see what follows and by modes that do not."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onesweep.loadtest.quality.generation import INFILL, QualityArm, check_served, generate_all, router_facts
from onesweep.loadtest.quality.judge import Progress
from onesweep.loadtest.quality.panel import HUMAN, Figure, JudgedText
from onesweep.loadtest.quality.prompts import Passage, PromptSet
from onesweep.loadtest.quality.run import check_settings, cut, judge_text, samples_of, target_settings
from onesweep.loadtest.quality.settings import InfillSettings
from onesweep.loadtest.report.record import origin, settings_record
from onesweep.loadtest.report.table import Estimate, difference_of_ratios, flat, open_meter, ratio_of_sums
from onesweep.loadtest.workload.testbed import open_testbed
from onesweep.serving.client.client import Result
from onesweep.stages.errors import InputError

SUFFIX_BYTES = 32  # judged with the gap, and given to modes that take a suffix
DEFAULT_ARMS = (INFILL, "ar", "local")
LEFT_ONLY = "ar"  # the others are compared with it, prompt by prompt: it sees the text before the gap alone
SAMPLES = 4  # of each length

FIGURES = {
    "exact_match": Figure("exact", 3, "share of gaps filled with the very bytes that stood there"),
    "span_bits": Figure("span bits", 3, "judge bits for a byte of the filling, given the text before it"),
    "joined_bits": Figure(
        "joined bits", 3, f"judge bits for a byte of the filling and the {SUFFIX_BYTES} bytes after it"
    ),
    "after_bits": Figure(
        "after bits", 3, f"judge bits for a byte of the {SUFFIX_BYTES} bytes after it, given what was filled in"
    ),
    "joined_ngram_bits": Figure("n-gram joined", 3, "as joined bits, of an n-gram model fitted to the training text"),
    "joined_minus_ar": Figure("joined - ar", 3, f"joined bits less those of mode `{LEFT_ONLY}`, gap by gap"),
    "between_minus_ar": Figure(
        "between - ar",
        2,
        "judge bits for a byte of the filling, given the text on both sides, less those of mode "
        f"`{LEFT_ONLY}`: what follows is the same for both, so these are the joined bits over the filling's bytes "
        "alone",
    ),
}


@dataclass(frozen=True)
class InfillRow:
    """Figures of one way to fill gaps of one length."""

    mode: str  # its spec; `human` for the true text
    length: int
    n: int
    sweeps: float | None = None
    seconds: float | None = None
    effective_samples: float | None = None
    figures: dict[str, Estimate] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        record = {key: value for key, value in asdict(self).items() if key != "figures"}
        return {**record, **flat(self.figures, FIGURES)}


@dataclass(frozen=True)
class _Filled:
    """Fillings of one arm: texts and their bits under the judge, alone and with what follows, gap by gap."""

    texts: Sequence[bytes]
    joined: list[bytes]
    bits: list[float]
    joined_bits: list[float]

    @property
    def sizes(self) -> list[int]:
        return list(map(len, self.texts))

    @property
    def wholes(self) -> list[int]:
        return list(map(len, self.joined))


def run_infill(settings: InfillSettings) -> tuple[list[InfillRow], dict[str, Any]]:
    """Rows of all lengths, and the record for a JSON file.

    Raises OnesweepError; for a mistake, before a host is started.
    """
    lengths = list(dict.fromkeys(settings.lengths))
    for length in lengths:
        if length < 1:
            raise InputError(f"--lengths must be at least 1, not {length}")
    settings = replace(settings, max_bytes=max(lengths))
    arms = check_settings(settings)
    prompts = {length: cut(replace(settings, max_bytes=length), SUFFIX_BYTES) for length in lengths}
    results: dict[int, dict[QualityArm, list[Result]]] = {}
    with open_testbed(target_settings(settings)) as target:
        facts = router_facts(target.access)
        chosen = arms or tuple(QualityArm(mode) for mode in DEFAULT_ARMS if mode in facts.modes)
        check_served(chosen, facts, settings.prompt_bytes + max(lengths) + SUFFIX_BYTES)
        with open_meter("filling", len(lengths) * len(chosen) * settings.count) as progress:
            for length in lengths:
                asked, of_length = prompts[length].asked, replace(settings, max_bytes=length)
                results[length] = generate_all(target.access, chosen, asked, of_length, facts, progress)
    judged = judge_text(settings, prompts[lengths[0]])
    rows, samples = [], []
    with open_meter("judging", 2 * len(lengths) * (len(chosen) + 1) * settings.count) as progress:
        for length in lengths:
            rows += _rows(judged, prompts[length], length, results[length], settings.seed, progress)
            samples += [{"length": length, **one} for one in samples_of(prompts[length], results[length], SAMPLES)]
    return rows, {
        "quality": "infill",
        **origin(),
        "settings": settings_record(settings, suffix_bytes=SUFFIX_BYTES),
        "weights": facts.digests,
        "judge": judged.judge.name,
        "rows": [row.to_record() for row in rows],
        "samples": samples,
    }


def _rows(
    judged_by: JudgedText,
    prompts: PromptSet,
    length: int,
    results: dict[QualityArm, list[Result]],
    seed: int,
    progress: Progress,
) -> list[InfillRow]:
    asked = prompts.asked
    truth = [passage.continuation for passage in asked]
    texts = {arm.label: [result.output for result in taken] for arm, taken in results.items()} | {HUMAN: truth}
    filled = {label: _judge(judged_by, asked, outputs, progress) for label, outputs in texts.items()}
    figures = {label: _figures(judged_by, asked, one, seed) for label, one in filled.items()}
    if left := filled.get(LEFT_ONLY):
        for label, one in filled.items():
            if label != LEFT_ONLY:
                joined = (one.joined_bits, one.wholes), (left.joined_bits, left.wholes)
                figures[label]["joined_minus_ar"] = difference_of_ratios(*joined, seed)
                between = (one.joined_bits, one.sizes), (left.joined_bits, left.sizes)
                figures[label]["between_minus_ar"] = difference_of_ratios(*between, seed)
    rows = [
        InfillRow(
            arm.label,
            length,
            len(taken),
            statistics.fmean(result.sweeps for result in taken),
            statistics.median(result.latency_ms for result in taken) / 1000,
            statistics.fmean(result.effective_samples for result in taken) or None,
            figures[arm.label],
        )
        for arm, taken in results.items()
    ]
    return [*rows, InfillRow(HUMAN, length, len(truth), figures=figures[HUMAN])]


def _judge(judged_by: JudgedText, passages: Sequence[Passage], texts: Sequence[bytes], progress: Progress) -> _Filled:
    given = [passage.prompt for passage in passages]
    joined = [text + passage.suffix for passage, text in zip(passages, texts, strict=True)]
    bits, joined_bits = (judged_by.judge.judge(given, each, progress).bits for each in (texts, joined))
    return _Filled(texts, joined, bits, joined_bits)


def _figures(judged_by: JudgedText, passages: Sequence[Passage], filled: _Filled, seed: int) -> dict[str, Estimate]:
    same = [float(text == passage.continuation) for passage, text in zip(passages, filled.texts, strict=True)]
    after = [joined - alone for joined, alone in zip(filled.joined_bits, filled.bits, strict=True)]
    found = {
        "exact_match": ratio_of_sums(same, [1.0] * len(same), seed),
        "span_bits": ratio_of_sums(filled.bits, filled.sizes, seed),
        "joined_bits": ratio_of_sums(filled.joined_bits, filled.wholes, seed),
        "after_bits": ratio_of_sums(after, [len(passage.suffix) for passage in passages], seed),
    }
    if judged_by.ngram:
        bits = judged_by.ngram.bits([passage.prompt for passage in passages], filled.joined)
        found["joined_ngram_bits"] = ratio_of_sums(bits, filled.wholes, seed)
    return {name: estimate for name, estimate in found.items() if estimate is not None}
