"""Rows: their record, matched entropy, verdicts, tables."""

from __future__ import annotations

import json

import pytest

from onesweep.loadtest.quality.panel import (
    AT_HUMAN_ENTROPY,
    FIGURES,
    GRAMS,
    HUMAN,
    JUDGED,
    QualityRow,
    at_human_entropy,
    verdict,
)
from onesweep.loadtest.quality.report import interval_table, quality_table, reasons
from onesweep.loadtest.report.table import Estimate


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
        "distinct_2, auc, mauve, unseen_words, copied_spans, ngram_bits_per_byte, gram_entropy, steps, n, seconds, "
        "host_seconds, effective_samples"
    )
    assert set(promised.split(", ")) <= set(record)
    assert (record["judge_bits_per_byte_low"], record["judge_bits_per_byte_high"]) == (1.9, 2.1)
    assert record["mauve"] is None
    assert QualityRow.from_record(record) == one


def test_bits_at_human_entropy_lie_between_the_temperatures_around_it() -> None:
    human = row(HUMAN, **{GRAMS: 12.0, JUDGED: 1.5})
    rows = [
        row("sweep", 0.6, **{GRAMS: 10.0, JUDGED: 2.0}),
        row("sweep", 1.0, **{GRAMS: 14.0, JUDGED: 4.0}),
        row("sweep", 0.8, **{GRAMS: 11.0, JUDGED: 2.4}),
        row("ar", 0.6, **{GRAMS: 10.0, JUDGED: 2.0}),
        row("ar", 0.8, **{GRAMS: 11.0, JUDGED: 2.0}),
        row("local", 0.8, **{GRAMS: 12.0, JUDGED: 2.0}),
        human,
    ]
    found = at_human_entropy(rows, human)
    assert [r.figure(AT_HUMAN_ENTROPY) for r in found[:3]] == [pytest.approx(2.4 + 1.6 / 3)] * 3
    assert [r.figure(AT_HUMAN_ENTROPY) for r in found[3:]] == [None] * 4
    assert "no two temperatures have the human 4-gram entropy" in found[3].reasons[AT_HUMAN_ENTROPY]
    assert "one temperature only" in found[5].reasons[AT_HUMAN_ENTROPY]
    assert found[-1] == human


def test_a_verdict_counts_figures_by_their_distance_from_human_text() -> None:
    reference = row("reference", judge_bits_per_byte=1.5, distinct_2=0.98, byte_entropy=4.5, auc=0.8)
    good = row("good", judge_bits_per_byte=1.7, distinct_2=0.97, byte_entropy=4.5, auc=0.55, mauve=0.9)
    cheat = row("cheat", judge_bits_per_byte=0.2, distinct_2=0.1, byte_entropy=4.5, auc=0.4)
    one = verdict(good, cheat, reference)
    assert one.nearer == ("judge_bits_per_byte", "distinct_2", "auc")
    assert one.farther == ()
    assert one.wins
    assert not verdict(cheat, good, reference).wins
    assert not verdict(good, good, reference).wins


def test_tables_show_every_row_and_why_figures_are_missing() -> None:
    rows = [
        QualityRow("sweep", spec="sweep", figures={JUDGED: Estimate(2.0, 1.9, 2.1)}, reasons={"mauve": "too few"}),
        QualityRow(HUMAN, reasons={"mauve": "too few", "auc": "none"}),
    ]
    assert "2.000 [1.900, 2.100]" in interval_table(rows)
    assert quality_table(rows).splitlines()[-1].startswith("human")
    assert reasons(rows) == ["no mauve: too few", "no auc of human: none"]
    assert {"judge_bits_per_byte", "exact_match"} <= set(FIGURES)
