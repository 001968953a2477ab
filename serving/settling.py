"""What comes in place of a refused guess, from a verdict's draws (stages/verdict.py)."""

from __future__ import annotations

import grpc
import numpy as np

from serving.candidates import Floats, draw
from stages.alphabet import Alphabet
from stages.errors import CodecError
from stages.randomness import Purpose, uniforms
from stages.refusal import Refusal
from stages.v1 import stage_pb2
from stages.verdict import Verdict, set_size


def read_verdict(event: stage_pb2.Event, count: int, number: int, alphabet: Alphabet) -> Verdict:
    """The verdict on `count` guesses with the set of that number, where one does not stand. Raises Refusal."""
    told = event.verdict
    if event.WhichOneof("outcome") != "verdict" or told.accepted > count:
        raise _nonsense(f"the verdict on {count} guesses came back as something else")
    size = 0 if count and told.accepted == count else set_size(number, alphabet.size)
    whole = size == alphabet.size
    try:
        symbols = np.arange(size) if whole else alphabet.decode(told.symbols).numpy()
    except CodecError as error:
        raise _nonsense(f"a verdict came back with nonsense: {error}") from None
    if len(symbols) != size or len(told.odds) != 4 * size or (whole and told.symbols):
        raise _nonsense(f"a verdict that should tell the odds of {size} symbols came back with {len(told.odds)} bytes")
    odds = np.frombuffer(told.odds, dtype="<f4").astype(np.float64)
    least = 0.0 if whole else np.finfo(np.float64).tiny  # what was drawn is possible
    if not ((odds >= least) & (odds <= 1)).all() or (whole and not odds.any()):
        raise _nonsense("the scorer's odds are no probabilities: look at the hosts' weights")
    return Verdict(told.accepted, symbols, odds)


def kept(verdict: Verdict, q: Floats, seed: int, position: int, number: int) -> int | None:
    """The symbol at a place whose guess was refused: a draw from the part of p that exceeds q; None: ask for the next
    set. q: the drafter's odds of all symbols there, (vocabulary,)."""
    symbols, p = verdict.symbols, verdict.odds
    if len(symbols) == len(q):
        rest = np.maximum(p - q, 0.0)
        u = uniforms(seed, Purpose.RESIDUAL, position, 1, 1)[:, 0]
        return int(draw((rest if rest.any() else p)[None], u)[0])  # none: p and q are equal but for rounding
    u = uniforms(seed, Purpose.KEEP, position, 1, len(symbols), number)[0]
    fits = np.flatnonzero(u <= 1 - q[symbols] / p)
    return int(symbols[fits[0]]) if len(fits) else None


def _nonsense(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INTERNAL, message)
