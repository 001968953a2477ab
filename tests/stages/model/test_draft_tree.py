"""Trees of guesses: grown by a drafter, each with the guesses before it, the likeliest of all."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.modes.drafters.local_model import LocalModel, LocalSequence
from stages.model.draft_tree import Allowed, DraftLength, DraftPlan, Growth, SweepTime, TreeGrower, chosen
from stages.model.randomness import gumbels
from stages.model.speculation import are_depths

KNOWN = b"the sea was calm and the "


@pytest.fixture(scope="module")
def model(bundles: Path) -> LocalModel:
    return LocalModel(bundles / "own" / "local")


def grown(model: LocalModel, plan: DraftPlan, temperature: float = 0.8) -> tuple[Growth, DraftLength]:
    worth = DraftLength(SweepTime())
    sequence = LocalSequence(model, 100, temperature, 7)
    return TreeGrower(sequence.text, model.vocabulary, worth, temperature, 7).grow(KNOWN, plan), worth


@pytest.mark.parametrize("branches", [1, 3])
def test_guesses_follow_a_grammar(model: LocalModel, branches: int) -> None:
    """A word, then two vowels, then nothing."""
    word, vowels = b"ship ", np.isin(np.arange(256), list(b"aeiou"))

    def allowed(guesses: Sequence[int]) -> Allowed | None:
        at = len(guesses)
        assert bytes(guesses[: len(word)]) == word[:at]
        assert set(guesses[len(word) :]) <= set(b"aeiou"), "nothing is asked of what cannot follow"
        return np.arange(256) == word[at] if at < len(word) else vowels if at < len(word) + 2 else None

    worth, sequence = DraftLength(SweepTime()), LocalSequence(model, 100, 0.8, 7)
    grower = TreeGrower(sequence.text, model.vocabulary, worth, 0.8, 7, allowed=allowed)
    growth = grower.grow(KNOWN, DraftPlan(20, 40, branches))
    sent = [at for at in range(len(growth.tokens)) if growth.chances[at]]
    assert {len(growth.branch(at)) for at in sent} == set(range(1, len(word) + 3))
    for at in sent:
        text = bytes(growth.branch(at))
        assert text[: len(word)] == word[: len(text)]
        assert set(text[len(word) :]) <= set(b"aeiou")
        assert (growth.chances[at] == 1.0) == (len(text) <= len(word)), "what must follow is sure"


def branch(growth: Growth, at: int) -> list[int]:
    found = list[int]()
    while at >= 0:
        found.insert(0, at)
        at = growth.above[at]
    return found


@pytest.mark.parametrize(("branches", "temperature"), [(1, 0.8), (3, 0.8), (3, 0.0)])
def test_guesses_are_the_largest_sums_of_their_place(model: LocalModel, branches: int, temperature: float) -> None:
    """As a drafter has them that reads each branch alone."""
    growth, _ = grown(model, DraftPlan(5, 12, branches), temperature)
    for at in range(len(growth.tokens)):
        path = branch(growth, at)
        known = KNOWN + bytes(growth.tokens[each] for each in path[:-1])
        sums = model.open(100).logits_after(known)[0].double().numpy()
        if temperature:
            sums = sums / temperature + gumbels(7, len(known), 1, 256)[0]
        probs = np.exp(sums - sums.max()) / np.exp(sums - sums.max()).sum()
        assert growth.probs[at] == pytest.approx(probs[growth.tokens[at]], rel=1e-3)
        assert growth.tokens[at] in np.argsort(-sums)[:branches]
        expected = np.prod([min(growth.probs[each], 0.99) for each in path])
        assert growth.chances[at] == pytest.approx(expected, rel=1e-6)


growths = st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 1)), min_size=1, max_size=20)


@settings(max_examples=60)
@given(growths, st.integers(1, 25))
def test_the_likeliest_guesses_are_a_tree_in_order(nodes: list[tuple[int, float]], count: int) -> None:
    growth = Growth()
    for at, (above, probs) in enumerate(nodes):
        growth.above.append(min(above, at) - 1)
        before = growth.chances[growth.above[at]] if growth.above[at] >= 0 else 1.0
        growth.tokens.append(at)
        growth.chances.append(before * probs)
    sent = growth.likeliest(count)
    assert len(set(sent)) == len(sent) == min(count, len(nodes))
    assert are_depths([growth.depth(at) for at in sent])
    assert sum(growth.chances[at] for at in sent) == pytest.approx(sum(sorted(growth.chances, reverse=True)[:count]))
    roots = [growth.chances[at] for at in sent if growth.above[at] < 0]
    assert roots == sorted(roots, reverse=True), "the likeliest branch is the first"


def test_as_many_as_pay(model: LocalModel) -> None:
    """A longer sweep is worth more guesses, whoever drafts; and one guess is sent at least."""
    counts = []
    for trip_ms in (0.001, 50.0, 5000.0):
        worth = DraftLength(SweepTime())
        for count in (1, 9) * 200:
            worth.sweeps.learn(count, trip_ms + count)
        plan = DraftPlan(20, branches=3)
        text = LocalSequence(model, 100, 0.8, 7).text
        growth = TreeGrower(text, model.vocabulary, worth, 0.8, 7).grow(KNOWN, plan)
        counts.append(len(chosen(growth, plan, worth)))
    assert 1 <= counts[0] <= counts[1] <= counts[2]
    assert counts[0] < counts[2] <= 64
