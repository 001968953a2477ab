"""Candidates: what the drafter writes, what it says about it, how they are weighed, and how many are taken."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onesweep.serving.modes.base import Generation
from onesweep.serving.modes.candidates import Branches, Candidates, ImportanceWeights, draw, read_scores, weigh
from onesweep.serving.modes.drafters.base import LocalSequence, odds_of
from onesweep.serving.modes.drafters.drafting import MAX_RUN, RunLength
from onesweep.serving.modes.drafters.neural import NeuralModel
from onesweep.serving.modes.local import LocalMode
from onesweep.serving.modes.resample import OF_BYTES, OF_TOKENS, ChunkSchedule, ResampleSizes, sizes_of
from onesweep.serving.modes.tokenizer import NO_TOKENIZERS
from onesweep.serving.router.accounting import Account
from onesweep.stages.backends.packed import FEW_POSITIONS
from onesweep.stages.checkpoint.checkpoint import load_ar
from onesweep.stages.model.scoring import MAX_LOGITS, MAX_SCORED_NUMBERS, MAX_SCORED_ROWS
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.wire.status import StatusError
from tests.stages.statistics import chi_square

TEXT = b"The sea was calm. The sea was "


@pytest.fixture(scope="module")
def local(bundles: Path) -> NeuralModel:
    return NeuralModel(bundles / "scored" / "local")


def write(local: NeuralModel, text: bytes, length: int, count: int, number: int = 0, seed: int = 3) -> Candidates:
    branches = Branches(LocalSequence(local, 400, 0.8, seed))
    return asyncio.run(branches.write(text, length, count, number))


# What the drafter writes


def test_local_with_candidates_writes_the_likeliest_of_them(local: NeuralModel) -> None:
    request = Generation(prompt=TEXT, max_symbols=12, deadline_unix_ms=2**42, temperature=0.8, seed=3, candidates=8)
    account = Account()

    async def text() -> bytes:
        return b"".join([piece async for piece in LocalMode(local, NO_TOKENIZERS).generate(request, account)])

    drafted = write(local, TEXT, 12, 8)
    assert asyncio.run(text()) == drafted.texts[int(drafted.nats.sum(axis=1).argmax())]
    assert (account.candidates, account.sweeps, account.output_tokens) == (8, 0, 12)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 9), (17, 1), (20, 12)])
def test_candidates_have_the_odds_of_the_model(bundles: Path, local: NeuralModel, length: int, count: int) -> None:
    drafted = write(local, TEXT, length, count)
    tokens = torch.tensor([list(TEXT + text) for text in drafted.texts])
    with torch.inference_mode():
        logits = load_ar(bundles / "scored" / "local")(tokens[:, :-1])[:, len(TEXT) - 1 :]
    nats = (logits.double() / 0.8).log_softmax(dim=-1).gather(2, tokens[:, len(TEXT) :, None])[..., 0]
    assert drafted.nats == pytest.approx(nats.numpy(), abs=1e-3)


def test_a_candidate_does_not_depend_on_how_many_there_are(local: NeuralModel) -> None:
    many, few = write(local, TEXT, 12, 8), write(local, TEXT, 12, 3)
    assert many.texts[:3] == few.texts
    assert len(set(many.texts)) == 8
    assert write(local, TEXT, 12, 3, number=1).texts != few.texts, "another round draws anew"
    assert write(local, TEXT, 12, 3, seed=4).texts != few.texts


def test_a_sequence_serves_round_after_round(local: NeuralModel) -> None:
    branches, text = Branches(LocalSequence(local, 400, 0.8, 3)), TEXT
    for number in range(4):
        drafted = asyncio.run(branches.write(text, 9, 4, number))
        assert drafted.texts == write(local, text, 9, 4, number).texts
        text += drafted.texts[1]


def test_guesses_come_with_their_odds(local: NeuralModel) -> None:
    sequence = LocalSequence(local, 400, 0.8, 3)
    guesses = asyncio.run(sequence.guess(TEXT, 10))
    assert guesses.text == asyncio.run(sequence.after(TEXT, 10))[0]
    for place, (symbol, odds) in enumerate(zip(guesses.text, guesses.odds, strict=True)):
        assert guesses.odds_at(place).sum() == pytest.approx(1)
        assert guesses.odds_at(place)[symbol] == pytest.approx(float(odds))
    assert len(asyncio.run(sequence.guess(TEXT, 0)).odds) == 0


def test_odds_at_any_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert odds_of(logits, 0.0).tolist() == [[0, 1, 0]]
    assert odds_of(logits, 1e-300).tolist() == [[0, 1, 0]]
    assert odds_of(logits, 2.0) == pytest.approx((logits / 2).softmax(dim=-1).numpy(), abs=1e-6)


# How they are weighed


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20).filter(any), st.floats(1e-9, 1))
def test_what_is_drawn_is_possible(odds: list[float], u: float) -> None:
    (index,) = draw(np.array([odds]), np.array([u]))
    assert odds[index] > 0


def test_draws_have_the_odds() -> None:
    odds = np.array([0.5, 0.0, 1.5])
    u = (np.arange(1000) + 1) / 1000
    drawn = draw(np.tile(odds, (1000, 1)), u)
    assert np.bincount(drawn, minlength=3).tolist() == [250, 0, 750]


def test_a_weight_is_p_over_q() -> None:
    drafted = Candidates([b"ab", b"cd"], np.log([[0.5, 0.5], [0.25, 0.5]]))
    weights = weigh(drafted, np.log([[0.5, 0.25], [0.5, 0.5]]))
    assert weights.shares == pytest.approx([0.2, 0.8])
    assert weights.effective == pytest.approx(1 / (0.04 + 0.64))
    assert weights.divergence_bits == pytest.approx(0.0), "a bit for one candidate, a bit less for the other"


def test_impossible_candidates() -> None:
    drafted = Candidates([b"a", b"b"], np.log([[0.5], [0.5]]))
    assert weigh(drafted, np.array([[-1e30], [-1.0]])).shares.tolist() == [0, 1]
    assert weigh(drafted, np.full((2, 1), -np.inf)).shares.tolist() == [0.5, 0.5]


def test_scores_that_are_none_are_refused() -> None:
    assert read_scores(np.zeros(6, "<f4").tobytes(), 2, 3).shape == (2, 3)
    with pytest.raises(StatusError, match="2 candidates of 3 symbols came back as 20 bytes"):
        read_scores(bytes(20), 2, 3)
    with pytest.raises(StatusError, match="not numbers"):
        read_scores(np.full(6, math.nan, "<f4").tobytes(), 2, 3)


def test_many_candidates_have_the_scorers_law(bundles: Path, local: NeuralModel) -> None:
    """Of one byte: how often it is one that the scorer likes better than the drafter does."""
    known, samples = torch.tensor([list(TEXT)]), 150
    p, q = (odds_of(load_ar(bundles / "scored" / name)(known).detach()[0, -1:], 0.8)[0] for name in ("scorer", "local"))
    liked, nats = p > q, np.log(p)
    counts = np.zeros(2, dtype=np.int64)
    for seed in range(samples):
        drafted = write(local, TEXT, 1, 256, seed=seed)
        weights = weigh(drafted, nats[[list(text) for text in drafted.texts]])
        counts[int(liked[drafted.texts[weights.choose(seed, len(TEXT))][0]])] += 1
    law, other = (np.array([1 - odds[liked].sum(), odds[liked].sum()]) * samples for odds in (p, q))
    assert chi_square(counts, law) > 1e-3
    assert chi_square(counts, other) < 1e-6, "the test can tell the drafter's"


# How many


@given(
    st.sampled_from([OF_BYTES, OF_TOKENS]),
    st.integers(1, 400),
    st.one_of(st.none(), st.integers(1, 400)),
    st.one_of(st.none(), st.integers(1, 256)),
    st.lists(st.floats(0.0, 1.0), max_size=12),
)
def test_what_was_given_stays_and_trips_never_get_more(
    sizes: ResampleSizes, symbols: int, chunk: int | None, candidates: int | None, effective: list[float]
) -> None:
    pace = ChunkSchedule(symbols, chunk, candidates, sizes)
    first = pace.chunk
    for share in effective:
        count = 1 + round(share * (pace.candidates - 1))
        pace.learn(ImportanceWeights(np.full(count, 1 / count), 0.0))
        assert pace.chunk >= first
        assert pace.chunk == first or (chunk is None and pace.chunk <= sizes.most_chunk)
        assert pace.candidates == candidates or (candidates is None and pace.candidates <= sizes.most_candidates)
        assert (chunk and candidates) or pace.chunk * pace.candidates <= MAX_SCORED_ROWS
    if chunk is not None:
        assert first == min(chunk, symbols)


def test_from_the_defaults() -> None:
    first, few, most, many = OF_BYTES.chunk, OF_BYTES.candidates, OF_BYTES.most_chunk, OF_BYTES.most_candidates

    def after(*effective: int) -> tuple[int, int]:
        pace = ChunkSchedule(1000, None, None)
        for count in effective:
            pace.learn(ImportanceWeights(np.full(count, 1 / count), 0.0))
        return pace.chunk, pace.candidates

    assert after() == after(1) == after(30) == (first, few), "one sweep says little"
    assert after(4, 4, 1, 4) == (first, few)
    assert after(1, 1) == (first, 2 * few)
    assert after(1, 1, 1, 1) == (first, many)
    assert after(20, 10) == (first * 3 // 2, few)
    assert after(*8 * [20]) == (most, few)
    assert after(20, 20, 1, 1) == (first, few), "a shorter chunk before more candidates"


def test_tokens_take_a_tenth_of_the_trips_and_bounded_memory() -> None:
    assert -(-128 // OF_TOKENS.chunk) <= 128 / 10
    assert sizes_of(Alphabet(49_152), 576) == OF_TOKENS
    large = sizes_of(Alphabet(4_000_000), 576)
    assert 1 <= large.candidates <= large.most_candidates
    assert large.most_candidates * 4_000_000 <= MAX_LOGITS


def test_a_wide_scorer_takes_fewer_candidates() -> None:
    pace = ChunkSchedule(1000, None, None, sizes_of(Alphabet(49_152), 1 << 15))
    for _ in range(12):
        assert pace.chunk * pace.candidates << 15 <= MAX_SCORED_NUMBERS
        pace.learn(ImportanceWeights(np.full(pace.candidates, 1 / pace.candidates), 0.0))
    assert pace.chunk > OF_TOKENS.chunk


# Guesses to verify


@given(st.lists(st.tuples(st.integers(0, MAX_RUN), st.integers(0, MAX_RUN)), max_size=60))
def test_a_run_is_neither_empty_nor_endless(booked: list[tuple[int, int]]) -> None:
    length = RunLength()
    for drafted, accepted in booked:
        length.learn(drafted, min(accepted, drafted))
    assert 1 <= length.best() <= MAX_RUN


def test_a_run_is_all_but_sure_to_end_in_a_refusal() -> None:
    def after(accepted: int) -> int:
        length = RunLength()
        for _ in range(400):
            length.learn(MAX_RUN, accepted)
        return length.best()

    assert after(1) < after(4) < after(10)
    assert after(MAX_RUN) == MAX_RUN
    assert MAX_RUN < FEW_POSITIONS, "hosts then read a run, and the byte before it, as if byte by byte"
    acceptance = 6 / 7
    assert acceptance ** after(6) <= 0.01 < acceptance ** (after(6) - 1)
