"""Prefix memory: KV caches of the beginnings of texts, kept for later texts that begin alike, within a byte budget.

It is made of pieces of ATTEND_POSITIONS (stages/model/prefill.py), each under a digest of all tokens up to its end.
Texts that begin alike share their first pieces, and a longer text adds only the pieces that are new.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.model.layers import LayerCache
from stages.model.prefill import ATTEND_POSITIONS, prefix_digests
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import StatusError

MOST_LISTED = 4096  # pieces that a host tells routers of: 32 KB, once a second at most and only after a change
LISTED_BYTES = 8  # of a digest: a router that takes one for another is refused, and reads anew


@dataclass
class Beginning:
    """Beginning of a session's text, as far as it attended in whole groups, as that of a longer text would."""

    root: bytes  # of `prefix_root`
    digests: list[bytes] = field(default_factory=list)  # one for each piece
    recalled: list[KeptPiece] = field(default_factory=list)  # pieces from memory that the session still lacks

    def read(self, start: int, lengths: Sequence[int], text: bytes, vocabulary: Vocabulary) -> None:
        """Book reads of these lengths, from `start` on. text: their first tokens, those that attended at once."""
        del self.digests[start // ATTEND_POSITIONS :]
        if start != len(self.digests) * ATTEND_POSITIONS:
            return
        # a read that ends beside the grid ends a group there: only groups before it are whole
        odd = next((i for i, length in enumerate(lengths) if length % ATTEND_POSITIONS), len(lengths))
        whole = vocabulary.cut(text, 0, sum(lengths[: odd + 1]))
        self.digests += prefix_digests(self.digests[-1] if self.digests else self.root, whole, vocabulary)

    def recall(self, caches: Sequence[LayerCache], tokens: NDArray[np.int64]) -> None:
        """Put what memory had into a session's caches, all layers of all parts in their order, and its text."""
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
    before: bytes  # digest of the piece before; the root for the first
    numbers: Tensor  # (2 x layers, kv_heads, ATTEND_POSITIONS, head_dim)
    tokens: NDArray[np.int64]  # (ATTEND_POSITIONS,): penalties go by all of a text


class PrefixStore:
    """All kept pieces of a host, the least recently used first. Not thread-safe: it lives on the event loop."""

    def __init__(self, budget_bytes: int) -> None:
        """:param budget_bytes: beside that of live sessions, so that nothing kept ever refuses one; 0 keeps nothing."""
        self.budget_bytes = budget_bytes
        self.bytes = self.hits = self.positions = 0
        # begins anywhere: a host that was restarted shall not be taken for the one before
        self.version = secrets.randbits(62) + 1
        self._pieces: OrderedDict[bytes, KeptPiece] = OrderedDict()

    def find(self, digest: bytes, root: bytes, positions: int) -> tuple[list[bytes], list[KeptPiece]]:
        """Digests and pieces of the prefix that ends in `digest`. Raises StatusError (NOT_FOUND) where it is gone."""
        digests, at = list[bytes](), digest
        while (piece := self._pieces.get(at)) is not None and piece.root == root:
            digests.insert(0, at)
            at = piece.before
        if at != root or len(digests) * ATTEND_POSITIONS != positions:
            raise StatusError(
                grpc.StatusCode.NOT_FOUND,
                f"the first {positions} tokens are not in memory here any more; send the whole text",
            )
        self._touch(digests)
        self.hits += 1
        self.positions += positions
        return digests, [self._pieces[each] for each in digests]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pieces

    def keep(self, beginning: Beginning, at: int, caches: Sequence[LayerCache], tokens: NDArray[np.int64]) -> None:
        """Copy piece `at` of a text; the pieces of other texts that were not used for longest make room for it."""
        chain, digest = beginning.digests[: at + 1], beginning.digests[at]
        before = chain[at - 1] if at else beginning.root
        self._touch(chain)
        if digest in self._pieces or (at and before not in self._pieces):
            return
        source = _numbers(caches, at)  # kept where it is: recalled, it need not cross to a device again
        text = tokens[at * ATTEND_POSITIONS : (at + 1) * ATTEND_POSITIONS].copy()
        need = text.nbytes + sum(numbers.numel() * numbers.element_size() for numbers in source)
        while self.bytes + need > self.budget_bytes:
            oldest = next(iter(self._pieces), None)
            if oldest is None or oldest in chain:
                return
            gone = self._pieces.pop(oldest)
            self.bytes -= gone.numbers.nbytes + gone.tokens.nbytes
            self.version += 1
        try:
            numbers = torch.stack(source)
        except torch.OutOfMemoryError:  # of a device: sessions need it more
            return
        self._pieces[digest] = KeptPiece(beginning.root, before, numbers, text)
        self.bytes += need
        self.version += 1
        self._touch(chain)

    def _touch(self, chain: Sequence[bytes]) -> None:
        """Book a use. The first piece of a text comes last, so that a text is forgotten from its end."""
        for digest in reversed(chain):
            if digest in self._pieces:
                self._pieces.move_to_end(digest)

    def listing(self, known: int) -> stage_pb2.PrefixList:
        """The list for a router that has version `known`."""
        told = stage_pb2.PrefixList(version=self.version)
        if known != self.version:
            latest = list(reversed(self._pieces))[:MOST_LISTED]
            told.digests = b"".join(digest[:LISTED_BYTES] for digest in latest)
        return told
