"""What a worker holds of the parts: the newest version of each fragment that it has fetched, checked by its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.errors import CodecError, InputError
from trainer.rounds.client import FileGoneError, Link
from trainer.rounds.codec import codec_named
from trainer.rounds.publication import WHOLE, receive
from trainer.rounds.settings import CodecName
from trainer.rounds.tensors import Shapes, Tensors, digest
from trainer.v1 import rounds_pb2

INCOMING = "incoming"


@dataclass(frozen=True)
class Holding:
    """One fragment as it was fetched."""

    version: int
    digest: str
    tensors: Tensors = field(repr=False)


class Holdings:
    def __init__(self, link: Link, worker: str, lease: str, directory: Path, like: Mapping[str, Shapes]) -> None:
        """:param directory: where files lie while they come; :param like: shapes of every fragment's tensors."""
        self.held: dict[str, Holding] = {}
        self._link, self._worker, self._lease, self._like = link, worker, lease, like
        self._incoming = directory / INCOMING
        self._incoming.mkdir(exist_ok=True)

    def told(self) -> list[rounds_pb2.Held]:
        """What the coordinator is told of it."""
        return [
            rounds_pb2.Held(part=part, version=held.version, digest=held.digest) for part, held in self.held.items()
        ]

    def fetch(self, wanted: rounds_pb2.Weights, codec: CodecName) -> Tensors:
        """The version that is offered of a fragment; :param codec: of differences.

        Raises FileGoneError, ServiceError, LeaseLostError, Interrupted.
        """
        like, held = self._like[wanted.part], self.held.get(wanted.part)
        tensors = held.tensors if held else Tensors()
        try:
            if wanted.whole:
                (file,) = wanted.files
                tensors = codec_named(WHOLE).decode(self._file(file, codec_named(WHOLE).size(like)), like)
            elif held is None:
                raise CodecError("it is sent as differences to what is not here")
            else:
                for file in wanted.files:
                    tensors = receive(tensors, self._file(file, codec_named(codec).size(like)), codec)
            if digest(tensors) != wanted.digest:
                raise CodecError("it does not have the digest that was told")
        except (InputError, ValueError) as error:
            self.held.pop(wanted.part, None)  # whole, the next time
            raise FileGoneError(f"version {wanted.version} of {wanted.part}: {error}") from None
        self.held[wanted.part] = Holding(wanted.version, wanted.digest, tensors)
        return tensors

    def _file(self, file: rounds_pb2.File, size: int) -> bytes:
        if file.size != size:
            raise CodecError(f"{file.name[:80]!r} has {file.size} bytes, not {size}")
        name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
        return self._link.fetch(file, self._worker, self._lease, self._incoming / name)
