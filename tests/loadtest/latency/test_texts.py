"""What texts are worth: closed forms, and arms that are held against each other."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.latency.rows import NO_TEXTS, row_of, wan_table
from onesweep.loadtest.latency.texts import ReadText, TextReader, jackknife, mean_of_ratio, text_figures
from onesweep.loadtest.workload.arms import Arm, Length, ModeChoice
from onesweep.loadtest.workload.pipeline import Surprise

NATS = {b"aa": 2.0, b"bbbb": 12.0, b"cc": 3.0, b"dd": 5.0}
EXPECTED = 1.5
"""Of each symbol."""


class Pretence:
    """Knows what it is asked for by heart."""

    def texts(self, arm: Arm, samples: list[Sample]) -> dict[int, ReadText]:
        raw = {s.number: bytes.fromhex(s.account["output_hex"]) for s in samples if s.account}
        return {
            number: ReadText(tuple(text), Surprise(NATS[text], EXPECTED * len(text))) for number, text in raw.items()
        }


@pytest.fixture
def taken(sample: Callable[..., Sample]) -> Callable[..., list[Sample]]:
    """Samples with these texts, numbered; None failed."""

    def make(*texts: bytes | None) -> list[Sample]:
        made = [
            sample(error="lost") if text is None else sample(output_hex=text.hex(), output_tokens=len(text))
            for text in texts
        ]
        return [replace(each, number=number) for number, each in enumerate(made)]

    return make


def arm(mode: str, temperature: float | None = None, **settings: Any) -> Arm:
    return Arm(ModeChoice(mode, **settings), Length(8), temperature=temperature)


def figures(taken: dict[Arm, list[Sample]]) -> dict[Arm, dict[str, Any]]:
    return text_figures(taken, Pretence())  # type: ignore[arg-type]


def test_the_loss_is_that_of_all_tokens_together(taken: Callable[..., list[Sample]]) -> None:
    found = figures({arm("ar"): taken(b"aa", b"bbbb", None)})[arm("ar")]
    assert found.keys() == NO_TEXTS.keys()
    assert (found["texts"], found["respelled"], found["nats_per_token"]) == (2, 0, 14 / 6)
    assert found["excess_nats"] == pytest.approx(14 / 6 - EXPECTED)
    assert found["excess_error"] == pytest.approx(found["nats_error"])
    assert found["token_entropy"] == pytest.approx(-math.log2(1 / 3) / 3 - 2 * math.log2(2 / 3) / 3)
    assert found["gram_entropy"] == 0.0  # one run of four


def test_texts_that_were_written_in_other_tokens_are_counted(sample: Callable[..., Sample]) -> None:
    texts = [sample(output_hex=b"aa".hex(), output_tokens=count, stopped=count == 3) for count in (2, 3, 4)]
    numbered = [replace(text, number=number) for number, text in enumerate(texts)]
    assert figures({arm("ar"): numbered})[arm("ar")]["respelled"] == 1


def test_no_text_has_no_figures(taken: Callable[..., list[Sample]]) -> None:
    assert figures({arm("ar"): taken(None)})[arm("ar")] == NO_TEXTS


def test_who_promises_the_texts_of_ar_is_held_to_it(taken: Callable[..., list[Sample]]) -> None:
    both = {"ar": taken(b"aa", b"cc", b"dd"), "ar-speculative": taken(b"aa", None, b"cc"), "verified": taken(b"aa")}
    warm = figures({arm(mode): samples for mode, samples in both.items()})
    assert (warm[arm("ar-speculative")]["same_as_ar"], warm[arm("ar-speculative")]["compared"]) == (1, 2)
    assert warm[arm("verified")]["compared"] is None  # another text of the same distribution
    assert (
        figures({arm("ar"): both["ar"], arm("ar-speculative"): taken(None)})[arm("ar-speculative")]["compared"] is None
    )
    cold = figures({arm(mode, 0.0): samples for mode, samples in both.items()})
    assert cold[arm("verified", 0.0)]["compared"] == 1


def test_a_codec_is_held_against_its_own(taken: Callable[..., list[Sample]]) -> None:
    guessing = arm("ar-speculative", codec="int8")
    found = figures({arm("ar"): taken(b"aa"), arm("ar", codec="int8"): taken(b"cc"), guessing: taken(b"cc")})
    assert found[guessing]["same_as_ar"] == 1


def test_the_gap_from_drafter_to_model(taken: Callable[..., list[Sample]]) -> None:
    arms = {arm("local"): taken(b"dd", b"dd"), arm("ar"): taken(b"aa", b"aa"), arm("resample"): taken(b"cc", b"cc")}
    found = figures(arms)
    assert found[arm("resample")]["gap_closed"] == pytest.approx((2.5 - 1.5) / (2.5 - 1.0))
    assert found[arm("resample")]["gap_error"] == pytest.approx(0.0)
    assert found[arm("ar")]["gap_closed"] is None
    ngram = arm("resample", drafter="ngram")
    assert figures({**arms, ngram: arms[arm("resample")]})[ngram]["gap_closed"] is None
    arms.pop(arm("local"))
    assert figures(arms)[arm("resample")]["gap_closed"] is None


def test_spreads_of_known_samples() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 50)
    error = values.std(ddof=1) / math.sqrt(50)
    assert mean_of_ratio(values.tolist(), [1.0] * 50) == pytest.approx((values.mean(), error))
    assert jackknife(lambda kept: float(values[kept].mean()), 50) == pytest.approx((values.mean(), error))
    assert mean_of_ratio([2.0], [4.0]) == (0.5, None)
    assert jackknife(lambda kept: 1.0, 1) == (1.0, None)


def test_a_reader_reads_each_text_once(bundle: Path, taken: Callable[..., list[Sample]]) -> None:
    reader, asked = TextReader(bundle / "ar"), list[int]()
    plain = reader.pipeline.surprise
    reader.pipeline.surprise = lambda before, text: (asked.append(len(text)), plain(before, text))[1]  # type: ignore[method-assign, func-returns-value]
    found = text_figures({arm("ar"): taken(b"aa", b"bbbb"), arm("ar-speculative"): taken(b"aa", b"bbbb")}, reader)
    assert asked == [2, 4]
    assert found[arm("ar")]["nats_per_token"] == found[arm("ar-speculative")]["nats_per_token"] > 0


def test_the_table_shows_them(taken: Callable[..., list[Sample]]) -> None:
    samples = taken(b"aa", b"aa")
    row = row_of("wan", arm("ar"), samples) | figures({arm("ar"): samples})[arm("ar")]
    assert "1.00 ± 0.00  -0.50 ± 0.00" in wan_table([row])
    assert row["tokens_per_s"] == pytest.approx(20.0)  # two of 100 ms
