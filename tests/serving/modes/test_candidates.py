"""Candidates: what the drafter writes, what it says about it, how they are weighed, and how many are taken."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.modes.candidates import Candidates, ImportanceWeights, draw, read_scores, weigh, write_candidates
from serving.modes.drafters.local_model import LocalModel, LocalSequence
from stages.checkpoint.checkpoint import load_ar
from stages.wire.status import StatusError

TEXT = b"The sea was calm. The sea was "


@pytest.fixture(scope="module")
def local(bundles: Path) -> LocalModel:
    return LocalModel(bundles / "scored" / "local")


def write(local: LocalModel, text: bytes, length: int, count: int, number: int = 0, seed: int = 3) -> Candidates:
    return asyncio.run(write_candidates(LocalSequence(local, 400, 0.8, seed), text, length, count, number))


# What the drafter writes


@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 9), (17, 1), (20, 12)])
def test_candidates_have_the_probs_of_the_model(bundles: Path, local: LocalModel, length: int, count: int) -> None:
    drafted = write(local, TEXT, length, count)
    tokens = torch.tensor([list(TEXT + text) for text in drafted.texts])
    with torch.inference_mode():
        logits = load_ar(bundles / "scored" / "local")(tokens[:, :-1])[:, len(TEXT) - 1 :]
    nats = (logits.double() / 0.8).log_softmax(dim=-1).gather(2, tokens[:, len(TEXT) :, None])[..., 0]
    assert drafted.nats == pytest.approx(nats.numpy(), abs=1e-3)


# How they are weighed


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20).filter(any), st.floats(1e-9, 1))
def test_what_is_drawn_is_possible(probs: list[float], u: float) -> None:
    (index,) = draw(np.array([probs]), np.array([u]))
    assert probs[index] > 0


def test_draws_have_the_probs() -> None:
    probs = np.array([0.5, 0.0, 1.5])
    u = (np.arange(1000) + 1) / 1000
    drawn = draw(np.tile(probs, (1000, 1)), u)
    assert np.bincount(drawn, minlength=3).tolist() == [250, 0, 750]


def test_a_weight_is_p_over_q() -> None:
    drafted = Candidates([b"ab", b"cd"], np.log([[0.5, 0.5], [0.25, 0.5]]))
    weights = weigh(drafted, np.log([0.125, 0.25]))
    assert weights.shares == pytest.approx([0.2, 0.8])
    assert weights.effective == pytest.approx(1 / (0.04 + 0.64))
    assert weights.divergence_bits == pytest.approx(0.0), "a bit for one candidate, a bit less for the other"


def test_scores_that_are_none_are_refused() -> None:
    assert read_scores(np.zeros(2, "<f8").tobytes(), 2).shape == (2,)
    with pytest.raises(StatusError, match="scores of 2 candidates came back as 20 bytes"):
        read_scores(bytes(20), 2)
    with pytest.raises(StatusError, match="not numbers"):
        read_scores(np.full(2, math.nan, "<f8").tobytes(), 2)


@pytest.mark.parametrize("count", [2, 5, 16])
def test_the_bound_holds_for_what_is_drawn(count: int) -> None:
    """Of six texts: the law of the draw is nearer to p than the bound, and the weights estimate the bound."""
    rng = np.random.default_rng(count)
    q, p = rng.dirichlet(np.ones(6)), rng.dirichlet(np.full(6, 0.8))
    law, bounds, trials = np.zeros(6), [], 4_000
    for chosen in rng.choice(6, (trials, count), p=q):
        shares = (p / q)[chosen] / (p / q)[chosen].sum()
        np.add.at(law, chosen, shares / trials)
        bounds.append(ImportanceWeights(shares, 0.0).distance_bound)
    w = p / q
    exact = (p * np.maximum(w - 1, 0) / (w + count - 1)).sum()
    assert np.abs(law - p).sum() / 2 <= exact + 0.01, "the bound that the weights estimate is one"
    assert 0.5 * np.abs(law - p).sum() / 2 < np.mean(bounds)
