"""Files in pieces: each piece has a checksum, the whole has another, and a cut costs only what was under way.

Both ways use the same: who receives says from which offset on, and who sends goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.errors import CheckpointError, RequestError
from trainer.v1 import rounds_pb2

PIECE_BYTES = 256 << 10
MAX_FILE_BYTES = 1 << 36
DIGEST_BYTES = 32
PARTIAL = ".partial"


class DamagedError(RequestError):
    """What has come is not what was announced; what is stored of it is dropped, and it must be sent anew."""


@dataclass(frozen=True)
class Parcel:
    """What is to come: its size in bytes and SHA-256."""

    size: int
    sha256: bytes

    @classmethod
    def of(cls, data: bytes) -> Parcel:
        return cls(len(data), hashlib.sha256(data).digest())

    def check(self, most: int = MAX_FILE_BYTES) -> Parcel:
        """Itself, if it can be taken in. Raises RequestError."""
        if not 1 <= self.size <= most:
            raise RequestError(f"a file of {self.size} bytes; it must have 1 to {most}")
        if len(self.sha256) != DIGEST_BYTES:
            raise RequestError(f"a SHA-256 has {DIGEST_BYTES} bytes, not {len(self.sha256)}")
        return self


def pieces(data: bytes, offset: int = 0) -> Iterator[rounds_pb2.Piece]:
    """`data` from `offset` on. Raises RequestError for an offset behind its end."""
    if offset > len(data):
        raise RequestError(f"offset {offset} lies behind the end of a file of {len(data)} bytes")
    view = memoryview(data)
    for start in range(offset, len(data), PIECE_BYTES):
        part = bytes(view[start : start + PIECE_BYTES])
        yield rounds_pb2.Piece(offset=start, data=part, crc32=zlib.crc32(part))


class Intake:
    """One file that comes in, at `path` once it is whole; until then beside it, so that it can be gone on with."""

    def __init__(self, path: Path, parcel: Parcel) -> None:
        """:param parcel: checked already. What is left of another file with this path is dropped."""
        self.path, self.parcel = path, parcel
        # the digest is part of the name: what came of another file is never gone on with
        self.partial = path.with_name(f"{path.name}.{parcel.sha256.hex()[:16]}{PARTIAL}")
        for other in path.parent.glob(f"{path.name}.*{PARTIAL}"):
            if other != self.partial:
                other.unlink(missing_ok=True)
        self.offset = min(self.partial.stat().st_size, parcel.size) if self.partial.exists() else 0

    def write(self, piece: rounds_pb2.Piece) -> None:
        """Append a piece. Raises RequestError for one that does not follow or is damaged, CheckpointError."""
        if piece.offset != self.offset:
            raise RequestError(f"a piece at offset {piece.offset}; {self.offset} comes next")
        if not 1 <= len(piece.data) <= PIECE_BYTES:
            raise RequestError(f"a piece of {len(piece.data)} bytes; it must have 1 to {PIECE_BYTES}")
        if self.offset + len(piece.data) > self.parcel.size:
            raise RequestError(f"pieces beyond the announced size of {self.parcel.size} bytes")
        if zlib.crc32(piece.data) != piece.crc32:
            raise RequestError(f"the piece at offset {piece.offset} does not have its checksum: send it again")
        try:
            with self.partial.open("r+b" if self.partial.exists() else "wb") as file:
                file.truncate(self.offset)  # a kill may have left half a piece
                file.seek(self.offset)
                file.write(piece.data)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.partial}: {error.strerror}; free some space") from None
        self.offset += len(piece.data)

    @property
    def whole(self) -> bool:
        return self.offset == self.parcel.size

    def finish(self) -> bytes:
        """The file's bytes, which then lie at `path`, too. Raises DamagedError, CheckpointError."""
        try:
            data = self.partial.read_bytes()
            if Parcel.of(data) != self.parcel:
                self.partial.unlink()
                raise DamagedError("what has come does not have the announced SHA-256: send it anew")
            with self.partial.open("rb") as file:
                os.fsync(file.fileno())
            self.partial.replace(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}; free some space") from None
        return data


def drop_partials(directory: Path) -> None:
    """Forget what did not come to its end."""
    for path in directory.glob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
