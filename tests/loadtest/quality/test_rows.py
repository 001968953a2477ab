"""Rows: their record, matched entropy, verdicts, tables."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onesweep.loadtest.quality.generation import QualityArm, parse_arm
from onesweep.loadtest.quality.panel import (
    AT_AR_ENTROPY,
    AT_HUMAN_ENTROPY,
    FIGURES,
    GAP_SHARE,
    HUMAN,
    JUDGED,
    QualityRow,
    TextFigures,
    verdict,
)
from onesweep.loadtest.quality.report import interval_table, quality_table, reasons
from onesweep.loadtest.quality.run import put_matched
from onesweep.loadtest.report.table import Estimate
from onesweep.serving.modes import MODES


def row(mode: str, temperature: float | None = None, **figures: float) -> QualityRow:
    spec = mode if temperature is None else f"{mode}:temperature={temperature}"
    return QualityRow(
        mode, temperature=temperature, spec=spec, figures={name: Estimate(value) for name, value in figures.items()}
    )


def test_a_record_has_the_keys_that_are_promised_and_comes_back() -> None:
    one = QualityRow(
        "resample", "ar", 32, 64, 0.8, n=3, figures={JUDGED: Estimate(2.0, 1.9, 2.1), "auc": Estimate(0.6)}
    )
    record = json.loads(json.dumps(one.to_record()))
    promised = (
        "mode, scorer, chunk, candidates, temperature, sweeps, judge_bits_per_byte, byte_entropy, word_entropy, "
        "distinct_2, auc, unseen_words, copied_spans, ngram_bits_per_byte, gram_entropy, steps, n, seconds, "
        "host_seconds, effective_samples"
    )
    assert set(promised.split(", ")) <= set(record)
    assert (record["judge_bits_per_byte_low"], record["judge_bits_per_byte_high"]) == (1.9, 2.1)
    assert record["copied_spans"] is None
    assert QualityRow.from_record(record) == one


def texts(bits: float, entropy: float, noise: NDArray[np.float64] | float = 0.0) -> TextFigures:
    """Figures of sixty texts with so many judge bits a byte and so much 4-gram entropy."""
    each = 256 * (bits + noise * np.ones(60))
    return TextFigures(bits=each.tolist(), sizes=[256] * 60, surprisals=[253 * entropy] * 60, grams=[253] * 60)


def arm(spec: str) -> QualityArm:
    return parse_arm(spec, tuple(MODES))


def measured(noise: NDArray[np.float64] | float = 0.0) -> dict[QualityArm, TextFigures]:
    figures = {
        "ar:temperature=0.8": (2.2, 11.6),
        "local:temperature=0.9": (2.6, 11.8),
        "local:temperature=0.8": (2.4, 11.4),
        "resample:temperature=0.8": (2.15, 11.3),
        "resample:temperature=0.9": (2.35, 11.7),
        "local:candidates=16:temperature=0.8": (2.1, 11.0),
        "local:candidates=16:temperature=0.9": (2.2, 11.2),
        "sweep": (4.2, 13.0),
    }
    return {arm(spec): texts(*values, noise) for spec, values in figures.items()}


def test_the_share_of_the_gap_is_read_where_all_texts_have_the_entropy_of_ar() -> None:
    rows = measured()
    put_matched(rows, texts(1.5, 11.5), seed=0)
    one, control = rows[arm("resample:temperature=0.8")], rows[arm("local:candidates=16:temperature=0.8")]
    # at 11.6 bits: local 2.5, resample 2.3, ar 2.2
    assert one.values[AT_AR_ENTROPY].value == pytest.approx(2.3)
    assert one.values[GAP_SHARE].value == pytest.approx(2 / 3)
    assert one.values[AT_HUMAN_ENTROPY].value == pytest.approx(2.25)
    assert (one.values[GAP_SHARE].low, one.values[GAP_SHARE].high) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert rows[arm("local:temperature=0.8")].values[GAP_SHARE].value == pytest.approx(0)
    # a colder text has fewer bits than `ar`, and that is worth nothing where it cannot be compared
    assert control.reasons[GAP_SHARE] == "no two temperatures have the 4-gram entropy 11.60 between them"
    assert "one temperature only" in rows[arm("sweep")].reasons[GAP_SHARE]
    # `ar` wrote nothing at this temperature
    assert GAP_SHARE not in rows[arm("resample:temperature=0.9")].values
    assert GAP_SHARE not in rows[arm("ar:temperature=0.8")].values


def test_what_makes_a_prompt_hard_for_all_arms_is_no_part_of_the_interval() -> None:
    noise = np.random.default_rng(1).normal(size=60)
    rows = measured(noise)
    put_matched(rows, texts(1.5, 11.5, noise), seed=0)
    values: Any = rows[arm("resample:temperature=0.8")].values
    share, bits = values[GAP_SHARE], values[AT_AR_ENTROPY]
    assert (share.low, share.high) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert bits.low + 0.1 < bits.value < bits.high - 0.1


def test_interval_of_a_share_holds_the_truth_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(2), 0
    for _ in range(100):
        rows = {
            each: texts(figures.bits[0] / 256, figures.surprisals[0] / 253, random.normal(scale=0.3, size=60))
            for each, figures in measured().items()
        }
        put_matched(rows, texts(1.5, 11.5), seed=0)
        share: Any = rows[arm("resample:temperature=0.8")].values[GAP_SHARE]
        held += share.low <= 2 / 3 <= share.high
    assert 88 <= held <= 100


def test_a_verdict_counts_figures_by_their_distance_from_human_text() -> None:
    reference = row("reference", judge_bits_per_byte=1.5, distinct_2=0.98, byte_entropy=4.5, auc=0.8)
    good = row("good", judge_bits_per_byte=1.7, distinct_2=0.97, byte_entropy=4.5, auc=0.55, word_entropy=9.0)
    cheat = row("cheat", judge_bits_per_byte=0.2, distinct_2=0.1, byte_entropy=4.5, auc=0.4)
    one = verdict(good, cheat, reference)
    assert one.nearer == ("judge_bits_per_byte", "distinct_2", "auc")
    assert one.farther == ()
    assert one.wins
    assert not verdict(cheat, good, reference).wins
    assert not verdict(good, good, reference).wins


def test_tables_show_every_row_and_why_figures_are_missing() -> None:
    rows = [
        QualityRow(
            "sweep", spec="sweep", figures={JUDGED: Estimate(2.0, 1.9, 2.1)}, reasons={"unseen_words": "no text"}
        ),
        QualityRow(HUMAN, reasons={"unseen_words": "no text", "auc": "none"}),
    ]
    assert "2.000 [1.900, 2.100]" in interval_table(rows)
    assert quality_table(rows).splitlines()[-1].startswith("human")
    assert reasons(rows) == ["no unseen_words: no text", "no auc of human: none"]
    assert {"judge_bits_per_byte", "exact_match"} <= set(FIGURES)
