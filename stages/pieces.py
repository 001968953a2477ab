"""A long step in pieces: while a host reads the next piece, the host after it is at work on this one.

All hops of a step have its number, and all but the last of them say that more follows. They are cut where a host cuts
what it reads at once, so the text is that of the step in one hop, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.alphabet import Alphabet
from stages.sweep import PIECE_POSITIONS, piece_lengths
from stages.v1 import stage_pb2

MAX_PIECES = 16
"""Hops that a step may come in."""
LEAST_ROOM = 1024
"""New symbols that a hop always may bring, however short the context: guesses and chosen candidates stay together."""
PIECE_FIELDS = frozenset(
    ("number", "stage", "start", "clean", "hidden", "remaining", "sampling", "codec", "reads", "more", "at_once")
)
"""What a hop may have that more of its step follows."""


def room_for(positions: int) -> int:
    """New symbols that a hop may bring to a model with a context of `positions`; `hops_of` needs no more."""
    return max(-(-positions // MAX_PIECES) + 2 * PIECE_POSITIONS, LEAST_ROOM)


def lengths_of(step: stage_pb2.Step, count: int) -> list[int]:
    """Symbols of each piece in which a host reads the `count` new ones of `step`, one piece after the other."""
    rest = count - sum(step.reads)
    # guesses after a prompt are a piece of their own: the prompt is then read as without them; and a tree is one piece
    apart = (step.start == 0 and not step.reads) or (step.depths and rest > PIECE_POSITIONS)
    return piece_lengths(count, [*step.reads, *([rest - step.draft] if apart else [])])


def hops_of(hop: stage_pb2.Hop, alphabet: Alphabet, most: int = MAX_PIECES) -> list[stage_pb2.Hop]:
    """`hop` as it travels: itself, or where it brings a long step the pieces of that.

    :param alphabet: of the symbols that it brings.
    :param most: pieces.
    """
    if hop.WhichOneof("work") == "sweep":
        return [hop]
    step = hop.step
    count = alphabet.count(step.clean)
    groups = _groups(lengths_of(step, count), count - step.draft, -(-count // most))
    if len(groups) == 1:
        return [hop]
    hops, at = list[stage_pb2.Hop](), 0
    for group in groups:
        piece, end = stage_pb2.Hop(), at + sum(group)
        piece.CopyFrom(hop)
        if group is not groups[-1]:
            piece.step.CopyFrom(
                stage_pb2.Step(
                    number=step.number, codec=step.codec, remaining=1, more=True, at_once=bool(step.candidates)
                )
            )
        piece.step.start, piece.step.clean = step.start + at, alphabet.cut(step.clean, at, end)
        piece.step.reads[:] = _reads(group)
        hops.append(piece)
        at = end
    return hops


def _groups(lengths: Sequence[int], known: int, least: int) -> list[list[int]]:
    """Neighbouring lengths for one hop each: of all but the last at least `least` symbols, and in the last at least one
    of the first `known` symbols, for guesses come after one."""
    groups, at = [list[int]()], 0
    for length in lengths:
        groups[-1].append(length)
        at += length
        if at < known and sum(groups[-1]) >= least:
            groups.append([])
    return groups


def _reads(lengths: list[int]) -> list[int]:
    """The shortest beginning of `lengths` that the others follow from."""
    count = sum(lengths)
    return next(lengths[:end] for end in range(len(lengths)) if piece_lengths(count, lengths[:end]) == lengths)
