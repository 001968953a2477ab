"""Fillings: all different, with the odds of the model, and weights that make a few stand for all."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from onesweep.serving.modes.drafters.base import LocalSequence
from onesweep.serving.modes.drafters.neural import NeuralModel
from onesweep.serving.modes.infill import OF_BYTES, InfillCandidates, InfillDrafter, choose_by_share, thinned
from onesweep.stages.checkpoint.checkpoint import load_ar

TEXT, AFTER = b"The sea was calm. The ", b" sea was"
TEMPERATURE = 2.0


@pytest.fixture(scope="module")
def local(bundles: Path) -> NeuralModel:
    return NeuralModel(bundles / "own" / "local")


def write(
    local: NeuralModel,
    length: int,
    drafts: int,
    following: bytes = AFTER,
    count: int | None = None,
    seed: int = 3,
    number: int = 0,
    temperature: float = TEMPERATURE,
) -> InfillCandidates:
    filler = InfillDrafter(LocalSequence(local, 400, temperature, seed), OF_BYTES.peek)
    return asyncio.run(filler.write(TEXT, length, following, drafts, count or drafts, number))


@torch.inference_mode()
def nats_of(directory: Path, texts: list[bytes]) -> np.ndarray:
    """ln of the probability of each continuation of TEXT: (texts,)."""
    tokens = torch.tensor([list(TEXT + text) for text in texts])
    logits = load_ar(directory)(tokens[:, :-1])[:, len(TEXT) - 1 :].double() / TEMPERATURE
    return logits.log_softmax(dim=-1).gather(2, tokens[:, len(TEXT) :, None])[..., 0].sum(dim=1).numpy()


# What the drafter writes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-40])
def test_near_temperature_zero_one_is_sure_and_nothing_is_warned_of(local: NeuralModel, temperature: float) -> None:
    drafted = write(local, 2, 4, temperature=temperature)
    assert np.isfinite(drafted.chances).all()
    assert drafted.chances.max() == 0


@pytest.mark.parametrize("following", [b"", AFTER])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 40), (2, 300), (12, 9)])
def test_fillings_have_the_odds_of_the_model(
    bundles: Path, local: NeuralModel, length: int, count: int, following: bytes
) -> None:
    drafted = write(local, length, count, following)
    assert len(set(drafted.texts)) == len(drafted.texts) == count
    assert {len(text) for text in drafted.texts} == {length}
    expected = nats_of(bundles / "own" / "local", [text + following for text in drafted.texts])
    assert drafted.nats == pytest.approx(expected, abs=1e-3)
    assert drafted.compute_ms > 0


def test_all_there_are(local: NeuralModel) -> None:
    drafted = write(local, 1, 256)
    assert set(drafted.texts) == {bytes([byte]) for byte in range(256)}
    assert (drafted.chances == 0).all()
    assert set(write(local, 1, 300).texts) == set(drafted.texts)
    assert write(local, 1, 100).chances.min() < -0.01


def test_the_same_numbers_give_the_same_fillings(local: NeuralModel) -> None:
    drafted = write(local, 5, 20)
    assert write(local, 5, 20).texts == drafted.texts
    assert write(local, 5, 20, b"").texts == drafted.texts, "what follows is only looked at"
    assert write(local, 5, 20, seed=4).texts != drafted.texts
    assert write(local, 5, 20, number=1).texts != drafted.texts


# Weights


def test_a_few_fillings_stand_for_all(bundles: Path, local: NeuralModel) -> None:
    """Sums over all fillings, weighed by the chance to be here, come out without bias: all steps together."""
    everything = [bytes([byte]) for byte in range(256)]
    p = np.exp(nats_of(bundles / "own" / "ar", everything))
    q = np.exp(nats_of(bundles / "own" / "local", everything))
    drafts = [write(local, 1, 60, count=8, seed=seed) for seed in range(300)]
    for of, name in ((p, "another model's"), (q, "the drafter's own")):
        estimates = []
        for kept in drafts:
            assert len(kept.texts) == 8
            numbers = [text[0] for text in kept.texts]
            weights = of[numbers] / np.exp(kept.chances)
            estimates.append([weights.sum(), weights[np.array(numbers) % 2 == 0].sum()])
        means, errors = np.mean(estimates, axis=0), np.std(estimates, axis=0) / np.sqrt(len(estimates))
        exact = np.array([of.sum(), of[::2].sum()])
        assert (np.abs(means - exact) < 4 * errors + 1e-6).all(), name


@given(st.lists(st.floats(-800, 0), min_size=1, max_size=30), st.integers(1, 35), st.floats(1e-9, 1.0))
@example([0.0] * 21 + [-710.0, -746.0] + [0.0] * 3, 25, 1.0)
def test_thinning_keeps_enough_and_none_twice(log_weights: list[float], count: int, u: float) -> None:
    weights = np.array(log_weights)
    chosen, kept = thinned(weights, count, u)
    assert len(chosen) == len(kept) <= min(count, len(weights))
    assert (np.diff(chosen) > 0).all()
    assert (kept <= 1e-9).all()
    if count >= len(weights):
        assert (kept == 0).all()
        assert len(chosen) == len(weights)
    else:
        assert len(chosen) >= min(count, int((weights > weights.max() - 600).sum())) - 1


def test_each_is_kept_with_the_chance_that_is_booked() -> None:
    log_weights = np.log(np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02]))
    seen, booked = np.zeros(7), np.zeros(7)
    for u in (np.arange(2000) + 0.5) / 2000:
        chosen, kept = thinned(log_weights, 3, u)
        seen[chosen] += 1 / 2000
        booked[chosen] = np.exp(kept)
    assert seen == pytest.approx([1, 0.8, 0.4, 0.4, 0.2, 0.12, 0.08], abs=2e-3)
    assert booked == pytest.approx([1, 0.8, 0.4, 0.4, 0.2, 0.12, 0.08])


def test_a_byte_has_the_odds_that_it_has_in_the_scorers_own_texts(bundles: Path, local: NeuralModel) -> None:
    """All 256 are scored here, so nothing is left to the drafter: the shares are Bayes' rule."""
    drafted = write(local, 1, 256)
    inside = nats_of(bundles / "own" / "ar", [bytes([byte]) + AFTER for byte in range(256)])
    expected = np.exp(inside - inside.max()) / np.exp(inside - inside.max()).sum()
    order = [text[0] for text in drafted.texts]
    assert drafted.shares(inside[order]) == pytest.approx(expected[order], rel=1e-6)


def test_what_cannot_be_is_left_out() -> None:
    assert thinned(np.array([0.0, -1e30, -1.0]), 2, 1.0)[0].tolist() == [0, 2]
    assert thinned(np.array([0.0, -1e30, -1e30]), 2, 0.5)[0].tolist() == [0]


def test_shares() -> None:
    drafted = InfillCandidates([b"a", b"b"], np.zeros(2), np.log([1.0, 0.25]))
    shares = drafted.shares(np.log([0.25, 0.25]) - 2000)
    assert shares == pytest.approx([0.2, 0.8])
    assert [choose_by_share(shares, u) for u in (1e-9, 0.19, 0.21, 1.0)] == [0, 0, 1, 1]
    assert drafted.shares(np.array([-1e30, -1e30])).sum() == pytest.approx(1), "impossible, all of them"
