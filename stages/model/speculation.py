"""Guesses of what a model will write: a chain of tokens, or a tree of them."""

from collections.abc import Sequence

MAX_DRAFT_TREE = 64  # guesses of a tree


# A tree is read depth first, position by position. With a mask over all rows the order in which a kernel adds would
# depend on the tree, and a near tie could fall otherwise than in `ar`. Here the cache holds, when a draft token is
# computed, exactly what stands before it on its branch, so the result is the same to the last bit
# (tests/stages/host/test_draft_trees.py).
class DraftTree:
    """Guesses depth first: each is followed by what may come after it, as far as anything is guessed there.

    `depths`: how many guesses are before each on its own branch. A chain has depths 0, 1, 2 ...
    """

    def __init__(self, tokens: Sequence[int], depths: Sequence[int]) -> None:
        """The depths must be `in_order`."""
        self.tokens, self.depths = tokens, depths
        self._children = dict[tuple[int, int], int]()
        branch = list[int]()
        for at, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            del branch[depth:]
            branch.append(self._children.setdefault((branch[-1] if branch else -1, token), at))

    def after(self, at: int, token: int) -> int:
        """The guess that `token` follows guess `at`, which is -1 for what was known; -1 where nobody guessed it."""
        return self._children.get((at, token), -1)


def are_depths(depths: Sequence[int]) -> bool:
    """True if these can be depths of a tree, each draft token but the first ones after another one."""
    before = -1
    for depth in depths:
        if not 0 <= depth <= before + 1:
            return False
        before = depth
    return True


def tree_positions(tokens: int, depths: Sequence[int]) -> tuple[int, int]:
    """Positions that so many new tokens take, the last of them a tree, whose branches take the same ones; and those of
    them that are kept: its first branch's."""
    before = tokens - len(depths)
    return before + max(depths) + 1, before + first_branch(depths)


def first_branch(depths: Sequence[int]) -> int:
    """Length of the first branch, which hosts remember."""
    return next((at for at, depth in enumerate(depths) if depth != at), len(depths))
