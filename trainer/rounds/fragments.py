"""A part in pieces that are exchanged in turn, so that a link is never asked for all at once (arXiv 2501.18512)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.errors import ConfigError
from trainer.rounds.tensors import Shapes


def cut(like: Shapes, pieces: int) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of each piece, in the order of the part, about equally many numbers in each.

    Raises ConfigError for more pieces than tensors.
    """
    if pieces > len(like):
        raise ConfigError(f"{pieces} fragments of {len(like)} tensors: a fragment has at least one; give fewer")
    total, before, found = sum(math.prod(shape) for shape in like.values()), 0, [list[str]() for _ in range(pieces)]
    index, names = 0, list(like)
    for position, name in enumerate(names):
        left = len(names) - position
        if found[index] and (before * pieces >= (index + 1) * total or left <= pieces - 1 - index):
            index += 1
        found[index].append(name)
        before += math.prod(like[name])
    return tuple(tuple(names) for names in found)


def boundaries(steps: int, pieces: int) -> Sequence[int]:
    """After how many steps of a round each piece is exchanged; the last at its end."""
    return [steps * (piece + 1) // pieces for piece in range(pieces)]


def fragment_name(part: str, piece: int, pieces: int) -> str:
    """What the ledger calls a piece: a part of its own."""
    return part if pieces == 1 else f"{part}.f{piece}"
