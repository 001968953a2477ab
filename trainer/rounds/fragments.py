"""A part in pieces that are exchanged in turn, so that a link is never asked for all at once (arXiv 2501.18512)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.errors import ConfigError
from trainer.rounds.tensors import Shapes, Tensors


@dataclass(frozen=True)
class Cutting:
    """The fragments of every part. A ledger knows nothing but fragments: each has rounds and versions of its own."""

    parts: Mapping[str, tuple[str, ...]]
    """Names of the fragments of each part, in turn; a part in one piece is its own fragment."""
    like: Mapping[str, Shapes]
    """Shapes of the tensors of each fragment."""

    @classmethod
    def of(cls, parts: Mapping[str, Shapes], pieces: int) -> Cutting:
        """Raises ConfigError for more pieces than tensors."""
        names, like = dict[str, tuple[str, ...]](), dict[str, Shapes]()
        for part, shapes in parts.items():
            names[part] = tuple(fragment_name(part, piece, pieces) for piece in range(pieces))
            for fragment, keys in zip(names[part], cut(shapes, pieces), strict=True):
                like[fragment] = {key: shapes[key] for key in keys}
        return cls(names, like)

    @cached_property
    def part_of(self) -> Mapping[str, str]:
        return {fragment: part for part, fragments in self.parts.items() for fragment in fragments}

    def pieces(self, parts: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Weights of parts, by fragment."""
        return {
            fragment: {key: weights[key] for key in self.like[fragment]}
            for part, weights in parts.items()
            for fragment in self.parts[part]
        }

    def whole(self, part: str, weights: Callable[[str], Tensors]) -> Tensors:
        """A part of what `weights` says of its fragments."""
        return {key: tensor for fragment in self.parts[part] for key, tensor in weights(fragment).items()}


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
