"""What comes in place of a refused guess: guesses and draws together have the scorer's odds, exactly."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onesweep.serving.modes.verified import read_verdict, residual_sample
from onesweep.stages.model import speculation as verdicts
from onesweep.stages.model.speculation import MAX_DRAW_SET, Verification, verify_drafts
from onesweep.stages.model.vocabulary import BYTES, Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import StatusError
from tests.stages.statistics import chi_square

TRIALS, POSITION = 2000, 7
LAWS = {
    "apart": ([0.5, 0.3, 0.2, 0.0], [0.2, 0.3, 0.1, 0.4]),
    "never drafted": ([0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]),
    "nothing in common": ([0.0, 0.0, 0.7, 0.3], [0.4, 0.6, 0.0, 0.0]),
    "near": ([0.3, 0.3, 0.2, 0.2], [0.31, 0.29, 0.2, 0.2]),
    "equal": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
}


def spread(odds: list[float], size: int) -> NDArray[np.float64]:
    """Odds of a vocabulary of `size` symbols: each of the given ones shared out over several."""
    each = size // len(odds)
    return np.repeat(np.array(odds) / each, each)


def settled(p: NDArray[np.float64], q: NDArray[np.float64], seed: int, guess: int) -> tuple[int, int]:
    """The symbol that comes of one place, and how many sets of draws were asked for."""
    logits = torch.from_numpy(np.log(np.maximum(p, 1e-300)))[None].float()
    odds = q[[guess]].astype(np.float32)
    verdict = verify_drafts(logits, [guess], odds, 1.0, seed, POSITION)
    if verdict.accepted:
        return guess, 0
    number, symbol = 1, residual_sample(verdict, q, seed, POSITION, 1)
    while symbol is None:
        number += 1
        symbol = residual_sample(
            verify_drafts(logits, [], odds[:0], 1.0, seed, POSITION, number), q, seed, POSITION, number
        )
    assert number <= MAX_DRAW_SET
    return symbol, number


@pytest.mark.parametrize("law", LAWS)
def test_every_place_has_the_odds_of_the_scorer(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    """Sets so small that they often have nothing that is kept."""
    monkeypatch.setattr(verdicts, "DRAW_SET_SIZES", (2, 3))
    p, q = (spread(odds, 12) for odds in LAWS[law])
    rng, counts, asked = (
        np.random.default_rng(0),
        np.zeros(12, dtype=np.int64),
        np.zeros(MAX_DRAW_SET + 1, dtype=np.int64),
    )
    for seed in range(TRIALS):
        symbol, sets = settled(p, q, seed, int(rng.choice(12, p=q)))
        counts[symbol] += 1
        asked[sets] += 1
    assert chi_square(counts, p * TRIALS) > 1e-3
    refused, tv = asked[1:].sum() / TRIALS, np.maximum(p - q, 0).sum()
    assert refused == pytest.approx(tv, abs=4 * (tv * (1 - tv) / TRIALS) ** 0.5 + 1e-9)
    expected = tv * (1 - tv) ** 2  # of places, where a first set has nothing that is kept
    assert asked[2:].sum() / TRIALS == pytest.approx(expected, abs=4 * (expected / TRIALS) ** 0.5 + 1e-9)


def test_odds_that_differ_in_rounding_only_come_to_an_end() -> None:
    p = np.full(300, 1 / 300)
    verdict = Verification(0, np.arange(64), p[:64])
    assert residual_sample(verdict, p, 0, POSITION, 1) is None
    assert residual_sample(Verification(0, np.arange(300), p), p, 0, POSITION, MAX_DRAW_SET) in range(300)


def told(accepted: int = 0, odds: bytes = b"", symbols: bytes = b"") -> stage_pb2.Event:
    return stage_pb2.Event(verification=stage_pb2.Verification(accepted=accepted, odds=odds, symbols=symbols))


def test_verdicts_are_read() -> None:
    tokens, half = Alphabet(300), np.full(64, 0.5, "<f4").tobytes()
    assert read_verdict(told(4), 4, 1, tokens).accepted == 4
    some = read_verdict(told(2, half, tokens.encode(range(64))), 4, 1, tokens)
    assert (some.accepted, some.symbols.tolist(), set(some.odds)) == (2, list(range(64)), {0.5})
    whole = read_verdict(told(0, np.full(256, 1 / 256, "<f4").tobytes()), 0, 2, BYTES)
    assert whole.symbols.tolist() == list(range(256))


HALVES, LETTERS = np.full(64, 0.5, "<f4"), bytes(range(64))


@pytest.mark.parametrize(
    "event",
    [
        stage_pb2.Event(text=b"a"),
        told(4),
        told(3, HALVES.tobytes(), LETTERS),
        told(2),
        told(2, HALVES.tobytes()),
        told(2, HALVES.tobytes(), LETTERS[1:]),
        told(2, HALVES[1:].tobytes(), LETTERS),
        told(2, HALVES.tobytes()[1:], LETTERS),
        *[told(2, np.full(64, odd, "<f4").tobytes(), LETTERS) for odd in (0.0, -1.0, 1.5, np.nan, np.inf)],
    ],
)
def test_what_is_no_verdict_is_refused(event: stage_pb2.Event) -> None:
    with pytest.raises(StatusError):
        read_verdict(event, 3, 1, BYTES)


@pytest.mark.parametrize("odds", [np.zeros(256, "<f4"), np.full(256, np.nan, "<f4"), np.full(255, 0.5, "<f4")])
def test_what_are_no_odds_of_all_symbols_is_refused(odds: NDArray[np.float32]) -> None:
    with pytest.raises(StatusError):
        read_verdict(told(0, odds.tobytes()), 0, 2, BYTES)
