"""What a worker holds of the parts: the newest version of each that it has fetched, checked by its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from stages.errors import CodecError, InputError
from trainer.rounds.client import FileGoneError, Link
from trainer.rounds.codec import codec_named
from trainer.rounds.publication import receive
from trainer.rounds.settings import CodecName
from trainer.rounds.tensors import Shapes, Tensors, digest
from trainer.v1 import rounds_pb2

INCOMING = "incoming"
WHOLE: CodecName = "fp32"
"""How a version travels to who has none."""


class Holdings:
    def __init__(
        self, link: Link, worker: str, lease: str, directory: Path, like: Mapping[str, Shapes], codec: CodecName
    ) -> None:
        """:param directory: where files lie while they come.

        :param like: shapes of every part's tensors, by name; :param codec: of differences between versions.
        """
        self.held: dict[str, tuple[int, Tensors]] = {}
        """Number and weights, by part."""
        self._link, self._worker, self._lease, self._like, self._codec = link, worker, lease, like, codec
        self._incoming = directory / INCOMING
        self._incoming.mkdir(exist_ok=True)

    def fetch(self, wanted: rounds_pb2.Weights) -> Tensors:
        """The version that is offered of a part.

        Raises FileGoneError, ServiceError, LeaseLostError, Interrupted.
        """
        like = self._like[wanted.part]
        number, tensors = self.held.get(wanted.part, (None, Tensors()))
        try:
            if wanted.whole:
                (file,) = wanted.files
                tensors = codec_named(WHOLE).decode(self._file(file, codec_named(WHOLE).size(like)), like)
            elif number is None:
                raise CodecError("it is sent as differences to what is not here")
            else:
                for file in wanted.files:
                    tensors = receive(tensors, self._file(file, codec_named(self._codec).size(like)), self._codec)
            if digest(tensors) != wanted.digest:
                raise CodecError("it does not have the digest that was told")
        except (InputError, ValueError) as error:
            self.held.pop(wanted.part, None)  # whole, the next time
            raise FileGoneError(f"version {wanted.version} of {wanted.part}: {error}") from None
        self.held[wanted.part] = (wanted.version, tensors)
        return tensors

    def _file(self, file: rounds_pb2.File, size: int) -> bytes:
        if file.size != size:
            raise CodecError(f"{file.name[:80]!r} has {file.size} bytes, not {size}")
        name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
        return self._link.fetch(file, self._worker, self._lease, self._incoming / name)
