"""`infill`: what stands between a text and what follows it, written so that the one leads to the other.

The drafter proposes many fillings and looks at the suffix's head after each: that costs no sweep. A few that it finds
likely go to the hosts, which score each together with that head in one sweep, and one is drawn by weight: with many
fillings, as the scorer itself would write at this temperature where its text continues with that head. A long filling
is written in pieces: all but the last without a look at the suffix, as in `resample`.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from onesweep.serving.modes import SCORERS
from onesweep.serving.modes.base import MOST_BYTES_A_TOKEN, Generation
from onesweep.serving.modes.candidates import ROUND, Floats, draw
from onesweep.serving.modes.drafters.base import LocalSequence
from onesweep.serving.modes.drafters.passes import rows_at_once
from onesweep.serving.modes.scored import ScoredMode, score
from onesweep.serving.router.accounting import Account
from onesweep.serving.router.session import Session
from onesweep.stages.model.randomness import Purpose, gumbels_of, uniforms
from onesweep.stages.model.scoring import log_probabilities
from onesweep.stages.model.vocabulary import BYTES
from onesweep.stages.wire.status import invalid

# What may stand between a text and what follows it: drawn by the local model, and thinned by what follows.
#
# All fillings are different: they are drawn without replacement by stochastic beam search (Kool et al. 2019, arXiv
# 1903.06059). A few of them are kept, the surer the likelier they are with what follows (Fearnhead and Clifford
# 2003).
# Each remembers how likely it was to be drawn and kept: weighed by p / that chance, the few stand for all that there
# are
# (Horvitz and Thompson 1952).


# How many times as many as are wanted go on from there.
SPARE = 4


@dataclass(frozen=True)
class InfillCandidates:
    """Symbols that may stand in a gap, all of one length, no two the same."""

    texts: list[bytes]
    # ln q of each with what follows it: (fillings,).
    nats: Floats
    # ln of the probability that it is among these: (fillings,).
    chances: Floats
    compute_ms: float = 0.0

    def shares(self, nats: Floats) -> Floats:
        """The probability with which each is to be chosen. nats: ln p of each with what follows it: (fillings,)."""
        log_weights = nats - self.chances
        weights = np.exp(log_weights - log_weights.max())
        return np.asarray(weights / weights.sum())


def choose_by_share(shares: Floats, u: float) -> int:
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


class InfillDrafter:
    """Writes fillings after a sequence's text, a symbol of all of them at a time. Other requests get turns between."""

    def __init__(self, sequence: LocalSequence, peek: int) -> None:
        """:param peek: symbols of what follows after which most fillings are given up."""
        self.sequence, self.peek = sequence, peek

    async def write(
        self, text: bytes, length: int, following: bytes, drafts: int, count: int, number: int = 0
    ) -> InfillCandidates:
        """At most `count` fillings of `length` symbols between `text` and `following`, from `drafts` different ones.

        :param number: of the round. Another round draws other numbers.
        """
        alphabet = self.sequence.model.alphabet
        after = alphabet.symbols(following)
        beam = _Beam(self.sequence, text, length + len(after), drafts, number)
        u = uniforms(self.sequence.seed, Purpose.CHOICE, alphabet.count(text), 1, 3)[0, 1:]
        turns: list[Callable[[], None]] = [beam.open, *[beam.grow] * length, beam.close]
        turns += [partial(beam.follow, symbol) for symbol in after[: self.peek]]
        if len(after) > self.peek:
            # the same bits to the second digit, for less than half of the reading
            turns.append(partial(beam.thin, SPARE * count, u[0]))
            turns += [partial(beam.follow, symbol) for symbol in after[self.peek :]]
        turns.append(partial(beam.thin, count, u[1]))
        loop, compute = asyncio.get_running_loop(), self.sequence.model.compute
        for turn in turns:
            await loop.run_in_executor(compute, turn)
        return InfillCandidates(
            [alphabet.encode(row) for row in beam.written], beam.nats, beam.chances, beam.compute_ms
        )


class _Beam:
    """The likeliest continuations so far, each with its ln q plus a Gumbel number that orders them."""

    def __init__(self, sequence: LocalSequence, text: bytes, room: int, count: int, number: int) -> None:
        self.sequence, self.text, self.room, self.number = sequence, text, room, number
        self.width = count + 1  # the first one that is left out tells the chances of the others
        self.rows = min(rows_at_once(sequence.model.alphabet.size), self.width)
        self.written = np.empty((1, 0), dtype=np.int64)
        self.nats, self.chances, self.keys = np.zeros(1), np.zeros(1), np.zeros(1)
        self.compute_ms = 0.0
        self._complete = True

    @torch.inference_mode()
    def open(self) -> None:
        """Read the text."""
        begin, text = time.perf_counter(), self.sequence.text
        self._logits = text.logits_after(self.text)
        self._forks, self._fresh = text.fork(1, self.room), True
        # the first symbol has one parent: what the second one's children would draw by is free
        self.keys = self._gumbels(1, 1)[:, 0]
        self.compute_ms += (time.perf_counter() - begin) * 1000

    @torch.inference_mode()
    def grow(self) -> None:
        """One more symbol."""
        begin, size = time.perf_counter(), self._logits.shape[1]
        self._read()
        best = _Best(self.width)
        self._complete &= len(self.keys) * size <= self.width
        for piece, at in enumerate(range(0, len(self.keys), self.rows)):
            if self.keys[at] < best.least:  # no child is above its parent, and parents come in order
                break
            part = slice(at, at + self.rows)
            nats = self.nats[part, None] + log_probabilities(self._logits[part], self.sequence.temperature)
            best.add(_below(nats + self._gumbels(piece, len(nats)), self.keys[part]), nats, at * size)
        order = np.argsort(-best.keys, kind="stable")
        self.keys, self.nats, (parents, chosen) = best.keys[order], best.nats[order], divmod(best.places[order], size)
        self.written = np.column_stack([self.written[parents], chosen])
        self._symbols, self._fresh = chosen, False
        self._forks.select(parents)
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
    def follow(self, symbol: int) -> None:
        """Read on: a symbol that follows all of them."""
        begin = time.perf_counter()
        self._read()
        parts = (log_probabilities(part, self.sequence.temperature) for part in self._logits.split(self.rows))
        self.nats = self.nats + np.concatenate([nats[:, symbol] for nats in parts])
        self._symbols = np.full(len(self.nats), symbol)
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
        self.chances, self._symbols = self.chances[chosen], self._symbols[chosen]
        self._forks.select(chosen)

    def _read(self) -> None:
        """Read the last symbol of each."""
        if not self._fresh:
            self._logits = self._forks.read(self._symbols)

    def _gumbels(self, piece: int, rows: int) -> Floats:
        """Standard Gumbel numbers of this symbol's position for the children of some parents: (rows, vocabulary).

        :param piece: which of the parents: each piece draws from a stream of its own.
        """
        alphabet = self.sequence.model.alphabet
        position, step = alphabet.count(self.text) + self.written.shape[1], self.number * ROUND + piece
        u = uniforms(self.sequence.seed, Purpose.CANDIDATE, position, 1, self.rows * alphabet.size, step)[0]
        return gumbels_of(u[: rows * alphabet.size].reshape(rows, -1))


class _Best:
    """The entries with the largest keys so far: their keys, ln q, and places in the order of all."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys, self.nats, self.places = np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)

    @property
    def least(self) -> float:
        """The bound that a key must exceed to be one of them."""
        return float(self.keys.min()) if len(self.keys) == self.count else -math.inf

    def add(self, keys: Floats, nats: Floats, place: int) -> None:
        """Look at these (any shape), of which the first has this place."""
        self.keys = np.concatenate([self.keys, keys.flatten()])
        self.nats = np.concatenate([self.nats, nats.flatten()])
        self.places = np.concatenate([self.places, np.arange(place, place + keys.size)])
        if len(self.keys) > self.count:
            kept = np.argpartition(-self.keys, self.count)[: self.count]
            self.keys, self.nats, self.places = self.keys[kept], self.nats[kept], self.places[kept]


def _below(keys: Floats, tops: Floats) -> Floats:
    """Gumbel numbers shifted so that the largest of each row is that row's top. keys: (rows, n); tops: (rows,).

    Kool et al. 2019, appendix B.3: as if they had been drawn so.
    """
    largest = keys.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        v = tops[:, None] - keys + np.log1p(-np.exp(keys - largest))
    return tops[:, None] - np.maximum(v, 0) - np.log1p(np.exp(-np.abs(v)))


@dataclass(frozen=True)
class InfillSizes:
    """Sizes of a piece and of the part of the suffix that is looked at."""

    chunk: int
    candidates: int
    # Fillings that the drafter proposes for each piece: it alone reads them all.
    drafts: int
    # Symbols of the suffix that are scored after each candidate.
    ahead: int
    # Of these, after so many the drafter gives up most fillings.
    peek: int


# Bits a byte of a filling of eight bytes with what follows it (docs/research/mode-settings.md): 1.99, 1.93, 1.90 with
# 64, 128, 256 drafts, and 1.93, 1.90, 1.90 with a look at 4, 8, 16 bytes of the suffix.
OF_BYTES = InfillSizes(chunk=32, candidates=16, drafts=256, ahead=16, peek=4)
# As much text, at about four bytes a token. A draft costs a look at the odds of the whole vocabulary at every symbol,
# so there are fewer.
OF_TOKENS = InfillSizes(chunk=8, candidates=16, drafts=64, ahead=4, peek=1)


class InfillMode(ScoredMode):
    """One sweep for each piece, and one piece where the gap is no longer than a chunk."""

    name = "infill"
    fills = True

    def check(self, request: Generation) -> None:
        if not request.suffix:
            raise invalid("mode infill writes what stands before a given suffix: give one (--suffix), or use resample")
        if request.temperature == 0:
            raise invalid(
                "mode infill chooses among random candidates, and at temperature 0 all are the same: "
                "give a temperature above 0"
            )
        super().check(request)
        sizes = self._sizes(request)
        length, ahead = min(sizes.chunk, self.length(request)), self.margin(request)
        self.check_candidates(request, sizes.candidates, length, ahead)
        if sizes.drafts + 1 > (fit := self.most_candidates(request, length + ahead)):
            raise invalid(
                f"the drafter has no memory for {sizes.drafts + 1} drafts of {length} {self.tokenizer.noun}, of which "
                f"{fit} fit: give fewer candidates or a smaller chunk"
            )

    def length(self, request: Generation) -> int:
        if request.max_bytes is None or self.tokenizer.alphabet == BYTES:
            return request.max_symbols
        return min(request.max_symbols, max(request.max_bytes // MOST_BYTES_A_TOKEN, 1))

    def margin(self, request: Generation) -> int:
        return self.tokenizer.alphabet.count(self._head(request))

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        account.scorer = name = self.scorer(request)
        (_, model), sizes, alphabet = self.drafter(request), self._sizes(request), self.tokenizer.alphabet
        whole = self.length(request)
        reach = alphabet.count(request.prompt) + whole
        filler = InfillDrafter(LocalSequence(model, reach, request.temperature, request.seed), sizes.peek)
        *_, last = pieces = list(_pieces(whole, sizes.chunk))
        text, read = request.prompt, 0
        # candidates are not remembered, so the hosts need to cache nothing of the last piece
        with Session(self.ring, SCORERS[name], reach - last, request.due_at, account) as session:
            for number, length in enumerate(pieces):
                head = self._head(request) if number == len(pieces) - 1 else b""
                drafts = sizes.drafts if head else sizes.candidates
                drafted = await filler.write(text, length, head, drafts, sizes.candidates, number)
                candidates = [each + head for each in drafted.texts]
                step = self.step(request, number, read, alphabet.cut(text, read), candidates)
                event, nats = await score(session, step)
                shares = drafted.shares(nats)
                account.add_sweep(event)
                account.add_choice(length, shares, drafted.compute_ms)
                known = alphabet.count(text)
                u = uniforms(request.seed, Purpose.CHOICE, known, 1, 1)[0, 0]
                piece = drafted.texts[choose_by_share(shares, u)]
                account.add_text(piece)
                if number == len(pieces) - 1:
                    await session.finish()
                yield piece
                text, read = text + piece, known

    def _head(self, request: Generation) -> bytes:
        """The part of the suffix that is looked at."""
        return self.tokenizer.alphabet.cut(request.suffix, 0, self._sizes(request).ahead)

    def _sizes(self, request: Generation) -> InfillSizes:
        """Sizes from the request, else the defaults."""
        usual = OF_BYTES if self.tokenizer.alphabet == BYTES else OF_TOKENS
        count = request.candidates or usual.candidates
        usual = replace(usual, chunk=request.chunk or usual.chunk)
        room = self.most_candidates(request, min(usual.chunk, self.length(request)) + usual.ahead) - 1
        return replace(usual, candidates=count, drafts=max(min(usual.drafts, room), count))


def _pieces(length: int, chunk: int) -> Iterator[int]:
    """Lengths of the pieces: the first one may be shorter than the others."""
    chunk = min(chunk, length)
    count = -(-length // chunk)
    yield length - (count - 1) * chunk
    yield from [chunk] * (count - 1)
