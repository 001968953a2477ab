"""What workers fetch: the newest weights of each fragment, whole or as differences, by names that last for a while."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import grpc

from stages.refusal import Refusal
from trainer.rounds.codec import codec_named
from trainer.rounds.copies import CopyLine
from trainer.rounds.ledger import KEPT_VERSIONS, Ledger
from trainer.rounds.publication import WHOLE, route
from trainer.rounds.settings import CodecName, RoundSettings
from trainer.rounds.tensors import Tensors, digest
from trainer.rounds.transfer import Parcel
from trainer.v1 import rounds_pb2

KEPT = {"whole": 2, "difference": KEPT_VERSIONS}
"""Files of a line, by kind: who fetches a version while the next one is made gets to its end."""


@dataclass(frozen=True)
class Edition:
    """What is newest on a line of versions."""

    line: str
    part: str
    number: int
    weights: Tensors = field(repr=False)
    codec: CodecName
    """Of the differences."""
    difference: Callable[[int], bytes | None] = field(repr=False)
    """From the number before to this one."""


class Offers:
    """Files made from the ledger when they are first asked for. Not for several threads at once."""

    def __init__(self, ledger: Ledger, settings: RoundSettings) -> None:
        self.ledger, self.settings = ledger, settings
        self._files: dict[tuple[str, int, str], tuple[bytes, Parcel]] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._copies: dict[str, CopyLine] = {}
        # copies are kept in memory only: after a restart, numbers on their lines mean something else
        self._copy = f"copy-{secrets.token_hex(4)}"

    def weights(self, part: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """How a worker that holds some version of a fragment that it trains gets the newest one."""
        version, difference = self.ledger.round(part), partial(self.ledger.difference, part)
        edition = Edition(part, part, version, self.ledger.weights(part), self.settings.down_codec, difference)
        return self._offered(edition, held.version if held else None)

    def copy(self, part: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """The same for a copy of what others train."""
        version, weights = self.ledger.round(part), self.ledger.weights(part)
        copy = self._copies.setdefault(part, CopyLine(self.settings, version, weights))
        copy.follow(version, weights)
        line, codec = f"{part}-{self._copy}", self.settings.copies_codec
        known = held is not None and self._digests.get((line, held.version)) == held.digest
        edition = Edition(line, part, copy.number, copy.tensors, codec, copy.differences.get)
        return self._offered(edition, held.version if held is not None and known else None)

    def read(self, name: str) -> bytes:
        """The file of this name. Raises Refusal."""
        for key, (data, _) in list(self._files.items()):  # orders are made on another thread
            if name == _name(*key):
                return data
        raise Refusal(grpc.StatusCode.NOT_FOUND, f"there is no file {name[:80]!r} any more: ask for the next order")

    def _offered(self, edition: Edition, held: int | None) -> rounds_pb2.Weights:
        offered = rounds_pb2.Weights(part=edition.part, version=edition.number, digest=self._digest(edition))
        if held == edition.number:
            return offered
        differences = route(held, edition.number, partial(self._difference, edition), edition.weights)
        offered.whole = not differences
        offered.codec = edition.codec if differences else WHOLE
        for number, data in differences.items():
            offered.files.append(self._file(edition.line, number, "difference", partial(bytes, data)))
        if offered.whole:
            encode = partial(codec_named(WHOLE).encode, edition.weights)
            offered.files.append(self._file(edition.line, edition.number, "whole", encode))
        self._drop_old(edition)
        return offered

    def _difference(self, edition: Edition, number: int) -> bytes | None:
        """From the disk once, however many ask for it."""
        key = edition.line, number, "difference"
        if key not in self._files:
            if not (data := edition.difference(number)):
                return None
            self._files[key] = data, Parcel.of(data)
        return self._files[key][0]

    def _file(self, line: str, number: int, kind: str, make: Callable[[], bytes]) -> rounds_pb2.File:
        key = line, number, kind
        if key not in self._files:
            data = make()
            self._files[key] = data, Parcel.of(data)
        parcel = self._files[key][1]
        return rounds_pb2.File(name=_name(*key), size=parcel.size, sha256=parcel.sha256)

    def _digest(self, edition: Edition) -> str:
        key = edition.line, edition.number
        if key not in self._digests:
            self._digests[key] = digest(edition.weights)
        return self._digests[key]

    def _drop_old(self, edition: Edition) -> None:
        line, newest = edition.line, edition.number
        for key in [key for key in self._files if key[0] == line and key[1] <= newest - KEPT[key[2]]]:
            del self._files[key]
        for old in [key for key in self._digests if key[0] == line and key[1] < newest - KEPT_VERSIONS]:
            del self._digests[old]


def _name(line: str, number: int, kind: str) -> str:
    return f"{line}-{number}-{kind}"
