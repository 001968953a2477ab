"""What workers fetch: the newest weights of each part, whole or as differences, by names that last for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc

from stages.refusal import Refusal
from trainer.rounds.codec.fp32 import Fp32
from trainer.rounds.ledger import KEPT_VERSIONS, Ledger
from trainer.rounds.tensors import digest, shapes
from trainer.rounds.transfer import Parcel
from trainer.v1 import rounds_pb2

KEPT_WHOLE = 2
"""Of a part: who fetches a version while the next one is made gets to its end."""


class Offers:
    """Files made from the ledger when they are first asked for. Not for several threads at once."""

    def __init__(self, ledger: Ledger, down_codec: str) -> None:
        self.ledger, self.down_codec = ledger, down_codec
        self._files: dict[tuple[str, int, str], tuple[bytes, Parcel]] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._whole = Fp32()

    def weights(self, part: str, held: int | None) -> rounds_pb2.Weights:
        """How a worker that holds version `held` of a part gets the newest one."""
        version = self.ledger.round(part)
        offered = rounds_pb2.Weights(part=part, version=version, digest=self._digest(part, version))
        if held == version:
            return offered
        differences = self._differences(part, held, version)
        offered.whole = not differences
        offered.codec = self.down_codec if differences else self._whole.name
        offered.files.extend(differences or [self._offer(part, version, "whole", self._encoded)])
        return offered

    def read(self, name: str) -> bytes:
        """The file of this name. Raises Refusal."""
        for (part, version, kind), (data, _) in list(self._files.items()):  # orders are made on another thread
            if name == _name(part, version, kind):
                return data
        raise Refusal(grpc.StatusCode.NOT_FOUND, f"there is no file {name[:80]!r} any more: ask for the next order")

    def _differences(self, part: str, held: int | None, version: int) -> list[rounds_pb2.File]:
        """Those from `held` to `version`, where all are kept and smaller than the whole."""
        if held is None or not version - KEPT_VERSIONS <= held < version:
            return []
        found = {number: self.ledger.difference(part, number) or b"" for number in range(held + 1, version + 1)}
        whole = self._whole.size(shapes(self.ledger.weights(part)))
        if not all(found.values()) or sum(map(len, found.values())) >= whole:
            return []
        return [self._offer(part, number, "difference", partial(_given, data)) for number, data in found.items()]

    def _offer(self, part: str, version: int, kind: str, make: Callable[[str], bytes]) -> rounds_pb2.File:
        key = (part, version, kind)
        if key not in self._files:
            data = make(part)
            self._files[key] = (data, Parcel.of(data))
            self._drop_old(part)
        parcel = self._files[key][1]
        return rounds_pb2.File(name=_name(*key), size=parcel.size, sha256=parcel.sha256)

    def _encoded(self, part: str) -> bytes:
        return self._whole.encode(self.ledger.weights(part))

    def _digest(self, part: str, version: int) -> str:
        if (part, version) not in self._digests:
            self._digests = {key: value for key, value in self._digests.items() if key[0] != part}
            self._digests[part, version] = digest(self.ledger.weights(part))
        return self._digests[part, version]

    def _drop_old(self, part: str) -> None:
        newest = self.ledger.round(part)
        kept = {"whole": KEPT_WHOLE, "difference": KEPT_VERSIONS}
        old = [key for key in self._files if key[0] == part and key[1] <= newest - kept[key[2]]]
        for key in old:
            del self._files[key]


def _name(part: str, version: int, kind: str) -> str:
    return f"{part}-{version}-{kind}"


def _given(data: bytes, part: str) -> bytes:
    return data
