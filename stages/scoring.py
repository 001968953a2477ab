"""What a model says about bytes that it is given: scores of candidates, and verdicts on guesses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stages.randomness import Purpose, uniforms

MAX_CANDIDATES = 256
"""Continuations in a step."""
MAX_SCORED_ROWS = 4096
"""Bytes of all candidates of a step together: what a message, and a host's memory for one hop, have room for."""
BRANCH_ROWS = 256
"""Candidates are evaluated in pieces of about so many rows, so that they hold up nobody."""
IMPOSSIBLE_NATS = -1e30
"""What stands for ln 0: finite in float32, as are sums of it."""


@dataclass(frozen=True)
class Verdict:
    """How far guesses were accepted."""

    accepted: int
    probabilities: NDArray[np.float64]
    """Of the byte after the accepted ones: (256,)"""


def log_probabilities(logits: Tensor, temperature: float) -> NDArray[np.float64]:
    """ln of what each byte's probability is at `temperature`; at 0 it is 0 for the argmax. (rows, 256), as `logits`.

    Nothing is below IMPOSSIBLE_NATS.
    """
    scores = logits.detach().double().cpu().numpy()
    if temperature <= 0:
        nats = np.full_like(scores, IMPOSSIBLE_NATS)
        np.put_along_axis(nats, scores.argmax(axis=1)[:, None], 0.0, axis=1)
        return nats
    with np.errstate(over="ignore"):  # relative to the best, as in sample_bytes
        scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return np.maximum(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)), IMPOSSIBLE_NATS)


def branch_pieces(source: Tensor) -> list[Tensor]:
    """`source` (branches, positions, ...) cut into pieces of whole branches; none for no positions.

    Pieces are cut by the branches' length alone, never by their company.
    """
    return list(source.split(max(1, BRANCH_ROWS // source.shape[1]))) if source.numel() else []


def candidate_nats(candidates: Tensor, logits: list[Tensor], temperature: float) -> NDArray[np.float32]:
    """ln p of every byte of `candidates` (branches, length): (branches, length).

    logits: pieces of (rows, 256): one row for what follows the last known byte, then one for each byte of each
    candidate that has another after it.
    """
    branches, length = candidates.shape
    nats = np.concatenate([log_probabilities(piece, temperature).astype(np.float32) for piece in logits])
    wanted = candidates.numpy()
    first, others = nats[0, wanted[:, 0]], nats[np.arange(1, len(nats)), wanted[:, 1:].flatten()]
    return np.column_stack([first, others.reshape(branches, length - 1)])


def judge(
    logits: Tensor, guesses: bytes, odds: NDArray[np.float32], temperature: float, seed: int, position: int
) -> Verdict:
    """Accept guess x with probability min(1, p(x)/q(x)), up to the first that is refused (arXiv 2211.17192).

    logits: (guesses + 1, 256), from the row that says what guess 0 should be, at `position`.
    odds: q(x) of each guess.
    """
    p = np.exp(log_probabilities(logits, temperature))
    draws = uniforms(seed, Purpose.ACCEPT, position, len(guesses), 1)[:, 0]
    # u q <= p and not u <= p / q: nothing overflows
    refused = (i for i, x in enumerate(guesses) if draws[i] * float(odds[i]) > p[i, x])
    accepted = next(refused, len(guesses))
    return Verdict(accepted, p[accepted])
