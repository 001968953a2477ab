"""Drafts on the last host: what a lookup finds, the tree that a model grows, what is drafted ahead."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stages.backends.whole_model import ModelText, WholeModel
from stages.host import drafter as drafters
from stages.host.drafter import (
    MATCHED_BYTES,
    MATCHED_TOKENS,
    Allowed,
    Drafter,
    DraftState,
    Tokens,
    TreeGrower,
    prompt_lookup,
)
from stages.host.work.checks import SamplingPlan
from stages.model.draft_tree import Draft, DraftLength, DraftPlan, Growth, SweepTime, chosen
from stages.model.randomness import gumbels
from stages.model.scoring import PLAIN
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

SAMPLING = SamplingPlan(7, 0.8, PLAIN, None, None)


def brute_force(text: list[int], count: int, least: int, most: int) -> list[int]:
    """Tokens after the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            return text[ends[-1] : ends[-1] + count]
    return []


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 32), st.booleans())
@example([0] * 60, 32, True)
@example([0], 4, False)
def test_a_lookup_finds_what_followed_the_longest_match(text: list[int], count: int, are_bytes: bool) -> None:
    found = prompt_lookup(np.array(text), BYTES if are_bytes else Vocabulary(300), count)
    assert list(found) == brute_force(text, count, *(MATCHED_BYTES if are_bytes else MATCHED_TOKENS))


TREE = Draft(
    (1, 2, 3, 2, 5, 4, 4), (0, 1, 2, 1, 2, 0, 1), (0.5, 0.5, 0.2, 0.1, 0.9, 0.3, 0.3), levels=3, compute_ms=7.0
)


@pytest.mark.parametrize(("written", "kept"), [([], 0), ([1], 1), ([1, 2, 3, 9], 3), ([1, 3], 1), ([4, 4], 0)])
def test_a_draft_keeps_its_accepted_tokens(written: list[int], kept: int) -> None:
    assert (TREE.first, TREE.kept(written), Draft().kept(written)) == (3, kept, 0)


TEXT = b"the sea was calm and the "
KNOWN = np.frombuffer(TEXT, np.uint8).astype(np.int64)


@pytest.fixture(scope="module")
def model(bundles: Path) -> WholeModel:
    return WholeModel(bundles / "own" / "local")


@pytest.fixture(scope="module")
def near(model: WholeModel) -> Drafter:
    return Drafter(BYTES, model)


# The tree


@pytest.mark.parametrize("branches", [1, 3])
def test_draft_tokens_follow_a_grammar(model: WholeModel, branches: int) -> None:
    """A word, then two vowels, then nothing."""
    word, vowels = b"ship ", np.isin(np.arange(256), list(b"aeiou"))

    def allowed(draft: Sequence[int]) -> Allowed | None:
        at = len(draft)
        assert bytes(draft[: len(word)]) == word[:at]
        assert set(draft[len(word) :]) <= set(b"aeiou"), "nothing is asked of what cannot follow"
        return np.arange(256) == word[at] if at < len(word) else vowels if at < len(word) + 2 else None

    grower = TreeGrower(model.open(100), DraftLength(SweepTime()), SAMPLING, allowed)
    growth = grower.grow(TEXT, DraftPlan(20, 40, branches))
    sent = [at for at in range(len(growth.tokens)) if growth.chances[at]]
    assert {len(growth.branch(at)) for at in sent} == set(range(1, len(word) + 3))
    for at in sent:
        text = bytes(growth.branch(at))
        assert text[: len(word)] == word[: len(text)]
        assert set(text[len(word) :]) <= set(b"aeiou")
        assert (growth.chances[at] == 1.0) == (len(text) <= len(word)), "what must follow is sure"


def path(growth: Growth, at: int) -> list[int]:
    """A draft token after those before it on its branch."""
    return [] if at < 0 else [*path(growth, growth.above[at]), at]


@pytest.mark.parametrize(("branches", "temperature"), [(1, 0.8), (3, 0.8), (3, 0.0)])
def test_draft_tokens_have_the_largest_sums(model: WholeModel, branches: int, temperature: float) -> None:
    """As a drafter has them that reads each branch alone."""
    grower = TreeGrower(model.open(100), DraftLength(SweepTime()), replace(SAMPLING, temperature=temperature))
    growth = grower.grow(TEXT, DraftPlan(5, 12, branches))
    for at, (token, above) in enumerate(zip(growth.tokens, growth.above, strict=True)):
        known = TEXT + bytes(growth.branch(above))
        sums = model.open(100).logits_after(known)[0].double().numpy()
        if temperature:
            sums = sums / temperature + gumbels(7, len(known), 1, 256)[0]
        probs = np.exp(sums - sums.max()) / np.exp(sums - sums.max()).sum()
        assert growth.probs[at] == pytest.approx(probs[token], rel=1e-3)
        assert token in np.argsort(-sums)[:branches]
        expected = np.prod([min(growth.probs[each], 0.99) for each in path(growth, at)])
        assert growth.chances[at] == pytest.approx(expected, rel=1e-6)


def test_the_draft_is_as_long_as_pays(model: WholeModel) -> None:
    """A longer sweep is worth more draft tokens; at least one is sent."""
    counts = []
    for trip_ms in (0.001, 50.0, 5000.0):
        worth, plan = DraftLength(SweepTime()), DraftPlan(20, branches=3)
        for count in (1, 9) * 200:
            worth.sweeps.learn(count, trip_ms + count)
        counts.append(len(chosen(TreeGrower(model.open(100), worth, SAMPLING).grow(TEXT, plan), plan, worth)))
    assert 1 <= counts[0] <= counts[1] <= counts[2]
    assert counts[0] < counts[2] <= 64


# Drafting ahead


def drafted(near: Drafter, state: DraftState, known: Tokens, most: int = 4, branches: int = 1) -> Draft:
    """After a verdict, by which `known` is the text."""
    return near.draft(state, known, 60, stage_pb2.Drafting(most=most, branches=branches), SAMPLING)


@pytest.mark.parametrize(("branches", "steps", "left"), [(1, 0, 4), (1, 1, 4), (1, 3, 2), (1, 9, 0), (3, 9, 0)])
def test_a_draft_made_ahead_is_sent_after_the_expected_verdict(
    near: Drafter, monkeypatch: pytest.MonkeyPatch, branches: int, steps: int, left: int
) -> None:
    """As many tokens are drafted while the request waits as were not before; they are those without running ahead."""
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    state = near.begin(100)
    draft = drafted(near, state, KNOWN, branches=branches)
    text = np.append(KNOWN, draft.tokens[: draft.first])
    own, *after = drafted(near, near.begin(100), text, 5).tokens
    assert [state.ahead.step() for _ in range(steps)] == ([True] * 5 + [False] * 4)[:steps]
    reads = list[bytes]()
    with monkeypatch.context() as watched:
        read = ModelText._read_from

        def watch(text: ModelText, kept: int, known: bytes, at_once: bool) -> torch.Tensor:
            reads.append(known[kept:])
            return read(text, kept, known, at_once)

        watched.setattr(ModelText, "_read_from", watch)
        again = drafted(near, state, np.append(text, own))
    assert list(again.tokens) == after
    assert (again.levels, again.compute_ms > 0, len(reads) > 0) == (left, left > 0, left > 0)


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_a_draft_made_ahead_is_discarded_after_another_verdict(
    near: Drafter, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    state = near.begin(100)
    text = np.append(KNOWN, drafted(near, state, KNOWN).tokens)
    before = state.ahead
    assert before is not None
    for _ in range(steps):
        before.step()
    text[-1] ^= 1
    assert drafted(near, state, text).tokens == drafted(near, near.begin(100), text).tokens
    assert state.ahead is not before


@pytest.mark.parametrize(("right", "room", "is_ahead"), [(0, 50, False), (8, 50, True), (8, 6, True), (8, 5, False)])
def test_no_draft_is_made_ahead_if_drafts_fail_or_the_text_ends(
    near: Drafter, monkeypatch: pytest.MonkeyPatch, right: int, room: int, is_ahead: bool
) -> None:
    """All but the last token of the text is read."""
    monkeypatch.setattr(near, "free", DraftLength(near.sweeps))
    for _ in range(300):
        near.free.learn(8, right, 0.1, 8, 8.0)
    state = near.begin(len(KNOWN) + room)
    assert len(drafted(near, state, KNOWN).tokens) == 4
    assert (state.ahead is not None) == is_ahead
