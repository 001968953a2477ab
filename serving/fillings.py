"""What may stand between a text and what follows it: drawn by the local model, and thinned by what follows.

All fillings are different: they are drawn without replacement by stochastic beam search (Kool et al. 2019, arXiv
1903.06059). A few of them are kept, the surer the likelier they are with what follows (Fearnhead and Clifford 2003).
Each remembers how likely it was to be drawn and kept: weighed by p / that chance, the few stand for all that there are
(Horvitz and Thompson 1952).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from serving.branches import Grown
from serving.candidates import Floats, draw
from serving.local import LocalSequence
from stages.architecture import VOCABULARY
from stages.randomness import Purpose, uniforms
from stages.scoring import log_probabilities

PEEK = 4
"""Bytes of what follows after which most fillings are given up."""
SPARE = 4
"""How many times as many as are wanted go on from there."""


@dataclass(frozen=True)
class Fillings:
    """Bytes that may stand in a gap, all of one length, no two the same."""

    texts: list[bytes]
    nats: Floats
    """ln q of each with what follows it: (fillings,)."""
    chances: Floats
    """ln of the probability that it is among these: (fillings,)."""
    compute_ms: float = 0.0

    def shares(self, nats: Floats) -> Floats:
        """The probability with which each is to be chosen. nats: ln p of each with what follows it: (fillings,)."""
        log_weights = nats - self.chances
        weights = np.exp(log_weights - log_weights.max())
        return np.asarray(weights / weights.sum())


def choose(shares: Floats, u: float) -> int:
    """One filling, drawn by its share."""
    return int(draw(shares[None], np.array([u]))[0])


def thinned(log_weights: Floats, count: int, u: float) -> tuple[NDArray[np.int64], Floats]:
    """At most `count` of those with these weights: the heavier, the surer. Indices, and ln of the chance to be kept.

    Those that weigh least are kept with a chance in proportion to their weight, the others surely. u: in (0, 1].
    """
    if count >= len(log_weights):
        return np.arange(len(log_weights)), np.zeros(len(log_weights))
    kept = _kept_chances(np.exp(log_weights - log_weights.max()), count)
    chosen = np.unique(np.minimum(np.searchsorted(kept.cumsum(), np.arange(count) + u), len(kept) - 1))
    chosen = chosen[kept[chosen] > 0]
    return chosen, np.log(kept[chosen])


def _kept_chances(weights: Floats, count: int) -> Floats:
    """min(1, c w) for every weight w, with c so that they add up to `count`, or all that are above 0 are sure."""
    ordered = np.sort(weights)[::-1]
    rest = ordered[::-1].cumsum()[::-1]  # of each: its weight and all smaller ones
    sure = next(i for i in range(count) if ordered[i] * (count - i) <= rest[i])
    if not rest[sure]:
        return (weights > 0).astype(np.float64)
    with np.errstate(over="ignore"):  # where the rest is next to nothing
        return np.minimum(1.0, weights / rest[sure] * (count - sure))


class Filler:
    """Writes fillings after a sequence's text, a byte of all of them at a time. Other requests get turns between."""

    def __init__(self, sequence: LocalSequence) -> None:
        self.sequence = sequence

    async def write(
        self, text: bytes, length: int, following: bytes, drafts: int, count: int, number: int = 0
    ) -> Fillings:
        """At most `count` fillings of `length` bytes between `text` and `following`, from `drafts` different ones.

        :param number: of the round. Another round draws other numbers.
        """
        beam = _Beam(self.sequence, text, length + len(following), drafts, number)
        u = uniforms(self.sequence.seed, Purpose.CHOICE, len(text), 1, 3)[0, 1:]
        turns: list[Callable[[], None]] = [beam.open, *[beam.grow] * length, beam.close]
        turns += [partial(beam.follow, byte) for byte in following[:PEEK]]
        if len(following) > PEEK:
            turns.append(partial(beam.thin, SPARE * count, u[0]))
            turns += [partial(beam.follow, byte) for byte in following[PEEK:]]
        turns.append(partial(beam.thin, count, u[1]))
        loop, compute = asyncio.get_running_loop(), self.sequence.model.compute
        for turn in turns:
            await loop.run_in_executor(compute, turn)
        return Fillings([row.tobytes() for row in beam.written], beam.nats, beam.chances, beam.compute_ms)


class _Beam:
    """The likeliest continuations so far, each with its ln q plus a Gumbel number that orders them."""

    def __init__(self, sequence: LocalSequence, text: bytes, room: int, count: int, number: int) -> None:
        self.sequence, self.text, self.room, self.number = sequence, text, room, number
        self.width = count + 1  # the first one that is left out tells the chances of the others
        self.written = np.empty((1, 0), dtype=np.uint8)
        self.nats, self.chances, self.keys = np.zeros(1), np.zeros(1), np.zeros(1)
        self.compute_ms = 0.0
        self._complete = True

    @torch.inference_mode()
    def open(self) -> None:
        """Read the text."""
        begin, sequence = time.perf_counter(), self.sequence
        self._logits = sequence.logits_after(self.text)
        self._grown = [Grown(stage, caches, self.room, 1) for stage, caches in zip(*sequence.parts, strict=True)]
        self._fresh = True
        self.compute_ms += (time.perf_counter() - begin) * 1000

    @torch.inference_mode()
    def grow(self) -> None:
        """One more byte."""
        begin = time.perf_counter()
        self._read()
        nats = self.nats[:, None] + log_probabilities(self._logits, self.sequence.temperature)
        noise = self._gumbels(nats.size + 1)
        if not self.written.shape[1]:
            self.keys = noise[:1]
        keys = _below(nats + noise[1:].reshape(nats.shape), self.keys).flatten()
        self._complete &= len(keys) <= self.width
        best = np.argpartition(-keys, self.width)[: self.width] if len(keys) > self.width else np.arange(len(keys))
        best = best[np.argsort(-keys[best], kind="stable")]
        parents, chosen = best // VOCABULARY, (best % VOCABULARY).astype(np.uint8)
        self.written = np.column_stack([self.written[parents], chosen])
        self.nats, self.keys = nats.flatten()[best], keys[best]
        self._bytes, self._fresh = chosen, False
        self._select(parents)
        self.compute_ms += (time.perf_counter() - begin) * 1000

    @torch.inference_mode()
    def close(self) -> None:
        """Leave out the last one."""
        if self._complete:
            self.chances = np.zeros(len(self.keys))
            return
        # that the key of one with this ln q is above that of the last
        with np.errstate(over="ignore"):  # beside one that cannot be, as there are near temperature 0: it is sure
            self.chances = np.log(-np.expm1(-np.exp(self.nats - self.keys[-1])))
        self._keep(np.arange(len(self.keys) - 1))

    @torch.inference_mode()
    def follow(self, byte: int) -> None:
        """Read on: a byte that follows all of them."""
        begin = time.perf_counter()
        self._read()
        self.nats = self.nats + log_probabilities(self._logits, self.sequence.temperature)[:, byte]
        self._bytes = np.full(len(self.nats), byte, dtype=np.uint8)
        self.compute_ms += (time.perf_counter() - begin) * 1000

    @torch.inference_mode()
    def thin(self, count: int, u: float) -> None:
        """Keep at most `count`: the likelier with what was read so far, the surer."""
        chosen, kept = thinned(self.nats - self.chances, count, u)
        if len(chosen) < len(self.nats):
            self._keep(chosen)
            self.chances = self.chances + kept

    def _keep(self, chosen: NDArray[np.int64]) -> None:
        self.written, self.nats, self.keys = self.written[chosen], self.nats[chosen], self.keys[chosen]
        self.chances, self._bytes = self.chances[chosen], self._bytes[chosen]
        self._select(chosen)

    def _read(self) -> None:
        """Read the last byte of each."""
        if self._fresh:
            return
        x = torch.from_numpy(self._bytes.astype(np.int64))
        for part in self._grown:
            x = part.read(x)
        self._logits = self._grown[-1].stage.next_byte(x)

    def _select(self, parents: NDArray[np.int64]) -> None:
        for part in self._grown:
            part.select(torch.from_numpy(parents))

    def _gumbels(self, count: int) -> Floats:
        """Standard Gumbel numbers of this byte's position: (count,)."""
        position = len(self.text) + self.written.shape[1]
        most = self.width * VOCABULARY + 1  # as many at each position, so that none are drawn twice
        u = uniforms(self.sequence.seed, Purpose.CANDIDATE, position, 1, most, self.number)[0, :count]
        return np.asarray(-np.log(-np.log(u * (1 - 2.0**-53))))


def _below(keys: Floats, tops: Floats) -> Floats:
    """Gumbel numbers shifted so that the largest of each row is that row's top. keys: (rows, n); tops: (rows,).

    Kool et al. 2019, appendix B.3: as if they had been drawn so.
    """
    largest = keys.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        v = tops[:, None] - keys + np.log1p(-np.exp(keys - largest))
    return tops[:, None] - np.maximum(v, 0) - np.log1p(np.exp(-np.abs(v)))
