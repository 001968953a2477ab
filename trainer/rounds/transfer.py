"""Files in pieces: each piece has a checksum, the whole file has another, and a cut costs only the data in flight.

Both directions work alike: the receiver names an offset, and the sender begins there.
"""

import hashlib
import zlib
from mmap import mmap
from pathlib import Path

from stages.checkpoint.files import sync
from stages.errors import CheckpointError, RequestError, file_errors
from trainer.v1 import rounds_pb2

PIECE_BYTES = 256 << 10
MAX_FILE_BYTES = 1 << 36
DIGEST_BYTES = 32
FILE_GONE = "file_gone"  # a refusal's reason: a worker then asks for its next order


class DamagedError(RequestError):
    """A file arrived with other bytes than announced; it was dropped and must be sent again."""


def file_of(data: bytes, name: str = "") -> rounds_pb2.File:
    """Size and SHA-256 of a file."""
    return rounds_pb2.File(name=name, size=len(data), sha256=hashlib.sha256(data).digest())


def checked(file: rounds_pb2.File) -> rounds_pb2.File:
    """`file` itself, if it can be received. Raises RequestError."""
    if not 1 <= file.size <= MAX_FILE_BYTES:
        raise RequestError(f"a file of {file.size} bytes; it must have 1 to {MAX_FILE_BYTES}")
    if len(file.sha256) != DIGEST_BYTES:
        raise RequestError(f"a SHA-256 must have {DIGEST_BYTES} bytes, not {len(file.sha256)}")
    return file


def piece_at(data: bytes | mmap, offset: int) -> rounds_pb2.Piece | None:
    """The piece of `data` at `offset`; None at the end. Raises RequestError past the end."""
    if offset > len(data):
        raise RequestError(f"offset {offset} is beyond the end of a file of {len(data)} bytes")
    part = data[offset : offset + PIECE_BYTES]
    return piece_of(part, offset) if part else None


def piece_of(data: bytes, offset: int) -> rounds_pb2.Piece:
    """The piece of a file at `offset`."""
    return rounds_pb2.Piece(offset=offset, data=data, crc32=zlib.crc32(data))


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class IncomingFile:
    """One incoming file, which stays on disk until it is dropped, so that its transfer can resume."""

    def __init__(self, path: Path, file: rounds_pb2.File) -> None:
        """:param path: its location, except for a suffix; files with the same path replace each other.

        :param file: already checked. A file that is still being made has no digest and no suffix.
        """
        # the name includes the digest, so the rest of another file is never appended
        name = f"{path.name}.{file.sha256.hex()[:32]}" if file.sha256 else path.name
        self.path, self.file = path.with_name(name), file
        for other in path.parent.glob(f"{path.name}.*"):
            if other != self.path:
                other.unlink(missing_ok=True)
        self.offset = min(size_of(self.path), file.size)

    @property
    def whole(self) -> bool:
        return self.offset == self.file.size

    def write(self, piece: rounds_pb2.Piece) -> None:
        """Append a piece. Raises RequestError for a damaged piece or a gap, CheckpointError."""
        if piece.offset != self.offset:
            raise RequestError(f"got a piece at offset {piece.offset}, expected {self.offset}")
        if not 1 <= len(piece.data) <= PIECE_BYTES:
            raise RequestError(f"a piece of {len(piece.data)} bytes; it must have 1 to {PIECE_BYTES}")
        if self.offset + len(piece.data) > self.file.size:
            raise RequestError(f"the pieces exceed the announced size of {self.file.size} bytes")
        if zlib.crc32(piece.data) != piece.crc32:
            raise RequestError(f"the piece at offset {piece.offset} does not match its checksum: send it again")
        with (
            file_errors(CheckpointError, f"cannot write {self.path}", "free some space"),
            self.path.open("r+b" if self.offset else "wb") as file,
        ):
            file.seek(self.offset)
            file.write(piece.data)
        self.offset += len(piece.data)

    def read(self) -> bytes:
        """Read the whole file. Raises DamagedError, and drops it, if it is not the announced one."""
        with file_errors(CheckpointError, f"cannot read {self.path}"):
            data = self.path.read_bytes()
        if (len(data), hashlib.sha256(data).digest()) != (self.file.size, self.file.sha256):
            self.drop()
            raise DamagedError("the received file does not match the announced SHA-256: send it again")
        return data

    def sync(self) -> None:
        """Force the received data to disk. Raises CheckpointError."""
        with file_errors(CheckpointError, f"cannot write {self.path}"):
            sync(self.path)
            sync(self.path.parent)

    def drop(self) -> None:
        """Remove the file, which is no longer needed."""
        self.path.unlink(missing_ok=True)
        self.offset = 0
