"""Drafters on the last host: what a lookup finds, and what a draft says of itself."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.host.drafter import MATCHED_BYTES, MATCHED_TOKENS, LookupDrafter
from stages.host.work.base import SamplingPlan
from stages.model.draft_tree import Draft, DraftPlan
from stages.model.scoring import PLAIN
from stages.model.vocabulary import BYTES, Vocabulary

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
