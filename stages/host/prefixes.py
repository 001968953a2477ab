"""Prefix cache: KV caches of the beginnings of texts, kept for later texts that begin alike, within a byte budget.

It consists of pieces of ATTEND_POSITIONS (stages/model/prefill.py). Each piece's key is a digest of all tokens up to
its end and of the hosts before this one. A piece was computed from what they sent, so only a path through the same
hosts finds it, and a faulty host's numbers do not outlive it. Texts that begin alike share their first pieces; a longer
text adds only the new pieces.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stages.device import Tensor
from stages.model.prefill import ATTEND_POSITIONS, prefix_digests
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import not_found

if TYPE_CHECKING:
    from stages.model.layers import LayerCache

MAX_LISTED = 4096  # pieces in the list that routers get: 32 KB, at most once a second and only after a change
LISTED_BYTES = 8  # of a key: a router that mistakes one piece for another is refused, and prefills again
VOUCHER_BYTES, KEY_BYTES = 16, 32
MAX_FAULTY = 256  # instances of faulty hosts that a host remembers


def voucher(key: bytes, session: str, space: bytes, before: Sequence[str]) -> bytes:
    """A router's voucher for one host, which no other host can forge: covers the session, its space in the prefix
    cache, and the instances of the hosts before it on the path.

    :param key: shared only by the host and the router."""
    text = "\0".join([session, space.hex(), *before]).encode()
    return hashlib.blake2b(text, key=key, digest_size=VOUCHER_BYTES).digest()


def is_vouched(hop: stage_pb2.Hop, key: bytes) -> bool:
    """True if the router vouches for the `memory` of a hop at its place on the path. `key`: the router's, or none."""
    memory, at = hop.memory, hop.place
    given = memory.vouchers[at * VOUCHER_BYTES : (at + 1) * VOUCHER_BYTES]
    expected = voucher(key, hop.session, memory.space, memory.hosts[:at]) if key else b""
    return len(memory.hosts) >= at and bool(key) and hmac.compare_digest(given, expected)


def path_digest(before: Sequence[str]) -> bytes:
    """Digest of the instances of the hosts before one on a path; empty for the first."""
    return hashlib.sha256("\0".join(before).encode()).digest() if before else b""


def piece_key(digest: bytes, path: bytes) -> bytes:
    """Key of a piece on a host. digest: of the text. path: of `path_digest`."""
    return hashlib.sha256(path + digest).digest() if path else digest


@dataclass
class Beginning:
    """Beginning of a session's text, as far as it attended in whole groups, as in a longer text."""

    root: bytes  # of `prefix_root`
    before: tuple[str, ...] = ()  # instances of the hosts before this one
    digests: list[bytes] = field(default_factory=list)  # one for each piece
    recalled: list[KeptPiece] = field(default_factory=list)  # cached pieces that the session still lacks

    @cached_property
    def path(self) -> bytes:
        """Digest of the hosts before this one."""
        return path_digest(self.before)

    def read(self, start: int, lengths: Sequence[int], text: bytes, vocabulary: Vocabulary) -> None:
        """Book reads of these lengths from `start`. text: their first tokens, which attended at once."""
        del self.digests[start // ATTEND_POSITIONS :]
        if start != len(self.digests) * ATTEND_POSITIONS:
            return
        # a read that ends off the grid ends a group there: only groups before it are whole
        odd = next((i for i, length in enumerate(lengths) if length % ATTEND_POSITIONS), len(lengths))
        whole = vocabulary.cut(text, 0, sum(lengths[: odd + 1]))
        self.digests += prefix_digests(self.digests[-1] if self.digests else self.root, whole, vocabulary)

    def recall(self, caches: Sequence[LayerCache], tokens: NDArray[np.int64]) -> None:
        """Copy recalled pieces into a session's caches, all layers of all parts in order, and into its tokens."""
        for at, piece in enumerate(self.recalled):
            tokens[at * ATTEND_POSITIONS : (at + 1) * ATTEND_POSITIONS] = piece.tokens
            for numbers, kept in zip(_numbers(caches, at), piece.numbers, strict=True):
                numbers.copy_(kept)
        self.recalled = []


def _numbers(caches: Sequence[LayerCache], at: int) -> list[Tensor]:
    """Keys and values of piece `at` of a sequence: views (kv_heads, ATTEND_POSITIONS, head_dim) of its caches."""
    begin = at * ATTEND_POSITIONS
    return [x[0, :, begin : begin + ATTEND_POSITIONS] for cache in caches for x in (cache.keys, cache.values)]


@dataclass(frozen=True, eq=False)
class KeptPiece:
    """Keys and values of one piece."""

    root: bytes
    last: bytes  # digest of the piece before; the root for the first
    before: tuple[str, ...]  # instances of the hosts that it passed before this one
    numbers: Tensor  # (2 x layers, kv_heads, ATTEND_POSITIONS, head_dim)
    tokens: NDArray[np.int64]  # (ATTEND_POSITIONS,): penalties count all tokens of a text


class PrefixStore:
    """All kept pieces of a host, the least recently used first. Not thread-safe: it lives on the event loop."""

    def __init__(self, budget_bytes: int) -> None:
        """:param budget_bytes: separate from live sessions' budget, so it never refuses a session; 0 keeps nothing."""
        self.budget_bytes = budget_bytes
        self.bytes = self.hits = self.positions = 0
        # Begins at a random number, so that a restarted host is not mistaken for the one before. Messages carry it,
        # and have the same size whatever it is.
        self.version = (1 << 61) + secrets.randbits(61)
        self._pieces: OrderedDict[bytes, KeptPiece] = OrderedDict()  # by `piece_key`
        self._faulty = OrderedDict[str, None]()  # instances of hosts

    def find(self, digest: bytes, beginning: Beginning, positions: int) -> None:
        """Give `beginning` the prefix that ends in `digest`. Raises StatusError (NOT_FOUND) where it is gone."""
        digests, pieces, at = list[bytes](), list[KeptPiece](), digest
        while (piece := self._pieces.get(piece_key(at, beginning.path))) is not None and piece.root == beginning.root:
            digests.append(at)
            pieces.append(piece)
            at = piece.last
        if at != beginning.root or len(digests) * ATTEND_POSITIONS != positions:
            raise not_found(f"the first {positions} tokens are no longer in this host's memory; send the whole text")
        beginning.digests, beginning.recalled = digests[::-1], pieces[::-1]
        self._touch([piece_key(each, beginning.path) for each in beginning.digests])
        self.hits += 1
        self.positions += positions

    def keep(self, beginning: Beginning, at: int, caches: Sequence[LayerCache], tokens: NDArray[np.int64]) -> None:
        """Copy piece `at` of a text; the least recently used pieces of other texts make room for it."""
        chain = [piece_key(digest, beginning.path) for digest in beginning.digests[: at + 1]]
        self._touch(chain)
        if chain[at] in self._pieces or (at and chain[at - 1] not in self._pieces):
            return
        if not self._faulty.keys().isdisjoint(beginning.before):
            return
        import torch

        source = _numbers(caches, at)  # kept on its device, so recalling it needs no transfer
        text = tokens[at * ATTEND_POSITIONS : (at + 1) * ATTEND_POSITIONS].copy()
        need = text.nbytes + sum(numbers.numel() * numbers.element_size() for numbers in source)
        while self.bytes + need > self.budget_bytes:
            oldest = next(iter(self._pieces), None)
            if oldest is None or oldest in chain:
                return
            self._drop(oldest)
        try:
            numbers = torch.stack(source)
        except torch.OutOfMemoryError:  # of a device: sessions need the memory more
            return
        last = beginning.digests[at - 1] if at else beginning.root
        self._pieces[chain[at]] = KeptPiece(beginning.root, last, beginning.before, numbers, text)
        self.bytes += need
        self.version += 1
        self._touch(chain)

    def forget(self, faulty: Collection[str]) -> None:
        """Drop pieces that passed a faulty host, and never keep such again. faulty: instances of hosts."""
        fresh = [each for each in faulty if each not in self._faulty]
        for instance in fresh:
            self._faulty[instance] = None
            if len(self._faulty) > MAX_FAULTY:
                self._faulty.popitem(last=False)
        if fresh:
            for key in [key for key, piece in self._pieces.items() if not self._faulty.keys().isdisjoint(piece.before)]:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        gone = self._pieces.pop(key)
        self.bytes -= gone.numbers.nbytes + gone.tokens.nbytes
        self.version += 1

    def _touch(self, chain: Sequence[bytes]) -> None:
        """Book a use, the first piece of a text last, so that a text is evicted from its end."""
        for key in reversed(chain):
            if key in self._pieces:
                self._pieces.move_to_end(key)

    def listing(self, known: int) -> stage_pb2.PrefixList:
        """The list for a router that already has version `known`."""
        prefix_list = stage_pb2.PrefixList(version=self.version)
        if known != self.version:
            latest = list(reversed(self._pieces))[:MAX_LISTED]
            prefix_list.digests = b"".join(key[:LISTED_BYTES] for key in latest)
        return prefix_list
