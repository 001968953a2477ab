"""Drafters on the last host: what a lookup finds, and what a draft says of itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stages.backends.whole_model import ModelText, WholeModel
from stages.host import drafter as drafters
from stages.host.drafter import MATCHED_BYTES, MATCHED_TOKENS, LookupDrafter, ModelDrafter, ModelDraftState, Tokens
from stages.host.work.checks import SamplingPlan
from stages.model.draft_tree import Draft, DraftLength, DraftPlan
from stages.model.scoring import PLAIN
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

SAMPLING = SamplingPlan(7, 0.8, PLAIN, None, None)


def brute_force(text: list[int], count: int, least: int, most: int) -> list[int]:
    """What followed the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            return text[ends[-1] : ends[-1] + count]
    return []


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 32), st.booleans())
@example([0] * 60, 32, True)
@example([0], 4, False)
def test_a_lookup_finds_what_followed_the_longest_match(text: list[int], count: int, are_bytes: bool) -> None:
    drafter = LookupDrafter(BYTES if are_bytes else Vocabulary(300))
    plan = DraftPlan(count, count)
    found = drafter.guesses(drafter.begin(99, 0), np.array(text), plan, SAMPLING, None)
    assert list(found.tokens) == brute_force(text, count, *(MATCHED_BYTES if are_bytes else MATCHED_TOKENS))
    assert found.depths == tuple(range(len(found.tokens)))


TREE = Draft(
    (1, 2, 3, 2, 5, 4, 4), (0, 1, 2, 1, 2, 0, 1), (0.5, 0.5, 0.2, 0.1, 0.9, 0.3, 0.3), levels=3, compute_ms=7.0
)


@pytest.mark.parametrize(("written", "kept"), [([], 0), ([1], 1), ([1, 2, 3, 9], 3), ([1, 3], 1), ([4, 4], 0)])
def test_a_draft_knows_what_stands(written: list[int], kept: int) -> None:
    assert (TREE.first, TREE.kept(written), Draft().kept(written)) == (3, kept, 0)


KNOWN = np.frombuffer(b"the sea was calm and the ", np.uint8).astype(np.int64)


@pytest.fixture(scope="module")
def near(bundles: Path) -> ModelDrafter:
    return ModelDrafter(WholeModel(bundles / "own" / "local"))


def drafted(near: ModelDrafter, state: ModelDraftState, known: Tokens, most: int = 4, branches: int = 1) -> Draft:
    """After a verdict, by which `known` is the text."""
    near.read(state, 0, torch.empty(0), known)
    return near.draft(state, known, 60, stage_pb2.Drafting(most=most, branches=branches), SAMPLING)


@pytest.mark.parametrize(("branches", "steps", "left"), [(1, 0, 4), (1, 1, 4), (1, 3, 2), (1, 9, 0), (3, 9, 0)])
def test_what_was_drafted_ahead_is_sent_where_the_verdict_is_as_expected(
    near: ModelDrafter, monkeypatch: pytest.MonkeyPatch, branches: int, steps: int, left: int
) -> None:
    """As many tokens are drafted while the request waits as were not before; they are those without running ahead."""
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    state = near.begin(100, 0)
    draft = drafted(near, state, KNOWN, branches=branches)
    text = np.append(KNOWN, draft.tokens[: draft.first])
    own, *after = drafted(near, near.begin(100, 0), text, 5).tokens
    assert state.ahead is not None
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
def test_what_was_drafted_ahead_is_thrown_away_where_the_verdict_is_another(
    near: ModelDrafter, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    state = near.begin(100, 0)
    text = np.append(KNOWN, drafted(near, state, KNOWN).tokens)
    before = state.ahead
    assert before is not None
    for _ in range(steps):
        before.step()
    text[-1] ^= 1
    assert drafted(near, state, text).tokens == drafted(near, near.begin(100, 0), text).tokens
    assert state.ahead is not before


@pytest.mark.parametrize(("right", "room", "is_ahead"), [(0, 50, False), (8, 50, True), (8, 6, True), (8, 5, False)])
def test_nothing_is_drafted_ahead_where_a_draft_seldom_stands_or_the_text_ends(
    near: ModelDrafter, monkeypatch: pytest.MonkeyPatch, right: int, room: int, is_ahead: bool
) -> None:
    """Of the text, all but the last token is read."""
    monkeypatch.setattr(near, "free", DraftLength(near.sweeps))
    for _ in range(300):
        near.free.learn(8, right, 0.1, 8, 8.0)
    state = near.begin(len(KNOWN) + room, 0)
    assert len(drafted(near, state, KNOWN).tokens) == 4
    assert (state.ahead is not None) == is_ahead
