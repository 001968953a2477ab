"""The best length of a draft, and its likeliest tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.limits import MAX_DRAFT
from stages.model.draft_tree import DraftLength, Growth, SweepTime, are_depths

rounds = st.lists(
    st.tuples(st.integers(0, MAX_DRAFT), st.integers(0, MAX_DRAFT), st.floats(0, 50), st.floats(0.1, 500)), max_size=30
)


def fitted(booked: list[tuple[int, int, float, float]]) -> DraftLength:
    worth = DraftLength(SweepTime())
    for drafted, accepted, draft_ms, trip_ms in booked:
        worth.sweeps.learn(drafted, trip_ms)
        right = min(accepted, drafted)
        worth.learn(drafted, right, float(right), drafted, draft_ms)
    return worth


@given(rounds)
def test_the_best_draft_length_gives_the_most_tokens_per_time(
    booked: list[tuple[int, int, float, float]],
) -> None:
    worth = fitted(booked)
    assert 0 <= worth.acceptance <= 1
    a = min(worth.acceptance, 0.99)

    def tokens_per_ms(count: int) -> float:
        return sum(a**i for i in range(count + 1)) / (worth.sweeps.ms(count) + count * worth.level_ms)

    best = worth.length()
    assert 1 <= best <= MAX_DRAFT
    assert tokens_per_ms(best) == pytest.approx(max(map(tokens_per_ms, range(1, MAX_DRAFT + 1))))


def test_drafts_grow_with_acceptance_and_the_time_of_a_sweep() -> None:
    def after(accepted: int, draft_ms: float, trip_ms: float) -> int:
        return fitted([(8, accepted, 8 * draft_ms, trip_ms)] * 300).length()

    assert after(8, 1.0, 2000.0) == MAX_DRAFT
    assert after(0, 8.0, 10.0) == 1
    assert after(4, 8.0, 10.0) < after(4, 8.0, 200.0) < after(7, 8.0, 200.0)


def test_only_reached_draft_tokens_count_toward_acceptance() -> None:
    """Nothing is known behind the first rejected token."""
    booked = [(10, 3, 1.0, 10.0)] * 1000
    assert fitted(booked).acceptance == pytest.approx(3 / 4)
    assert fitted(booked + [(3, 3, 1.0, 10.0)] * 1000).acceptance == pytest.approx(1.0)
    assert fitted([*booked, (0, 0, 0.0, 10.0)]).acceptance == fitted(booked).acceptance


def test_the_time_of_a_draft_token_is_estimated_from_all_sweeps() -> None:
    sweeps = SweepTime()
    for i in range(400):
        count = (1, 4, 16, 9)[i % 4]
        sweeps.learn(count, 300 + 5 * count)
    assert sweeps.token_ms == pytest.approx(5, rel=0.1)
    assert sweeps.ms(0) == pytest.approx(300, rel=0.1)
    assert sweeps.ms(32) == pytest.approx(460, rel=0.1)


def test_another_level_is_drafted_while_it_is_worth_its_time() -> None:
    worth = fitted([(8, 6, 8 * 10.0, 200.0)] * 300)
    assert worth.another_level([0.9, 0.8], 0.8, 20.0)
    assert not worth.another_level([0.9, 0.05], 0.05, 20.0)
    dear = fitted([(8, 6, 8 * 200.0, 200.0)] * 300)
    assert not dear.another_level([0.9, 0.6], 0.6, 400.0)


@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_the_noise_of_a_drafter_is_estimated_from_accepted_tokens(scale: float) -> None:
    """The model's sums differ from the drafter's by Gumbel noise of a scale; accepted tokens reveal the scale."""
    rng, worth, scales = np.random.default_rng(0), DraftLength(SweepTime()), list[float]()
    for _ in range(400):
        sums = rng.gumbel(size=(8, 20))
        odds = np.exp((sums - sums.max(axis=1, keepdims=True)) / worth.noise)
        stands = (sums + scale * rng.gumbel(size=sums.shape)).argmax(axis=1) == sums.argmax(axis=1)
        accepted = int(stands.cumprod().sum())
        worth.learn(8, accepted, float((1 / odds.sum(axis=1))[: accepted + 1].sum()), 8, 8.0)
        scales.append(worth.noise)
    assert scale / 3 < scales[30] < scale * 3
    assert np.mean(scales[200:]) == pytest.approx(scale, rel=0.25)


growths = st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 1)), min_size=1, max_size=20)


@settings(max_examples=60)
@given(growths, st.integers(1, 25))
def test_the_likeliest_draft_tokens_form_a_tree_in_order(nodes: list[tuple[int, float]], count: int) -> None:
    growth = Growth()
    for at, (above, probs) in enumerate(nodes):
        growth.above.append(min(above, at) - 1)
        before = growth.chances[growth.above[at]] if growth.above[at] >= 0 else 1.0
        growth.tokens.append(at)
        growth.chances.append(before * probs)
    sent = growth.most_likely(count)
    assert len(set(sent)) == len(sent) == min(count, len(nodes))
    assert are_depths([growth.depth(at) for at in sent])
    assert sum(growth.chances[at] for at in sent) == pytest.approx(sum(sorted(growth.chances, reverse=True)[:count]))
    roots = [growth.chances[at] for at in sent if growth.above[at] < 0]
    assert roots == sorted(roots, reverse=True), "the likeliest branch is the first"
