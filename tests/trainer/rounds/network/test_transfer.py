import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import RequestError
from tests.trainer.rounds.network.calls import pieces
from trainer.rounds import transfer
from trainer.rounds.transfer import PIECE_BYTES, DamagedError, IncomingFile, checked, file_of
from trainer.v1 import rounds_pb2

DATA = bytes(range(256)) * 2500


def taken(intake: IncomingFile, data: bytes) -> bytes:
    for piece in pieces(data, intake.offset):
        intake.write(piece)
    return intake.read()


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(1, 700))
def test_pieces_join_to_the_file_from_an_offset(size: int, offset: int, most: int) -> None:
    data = DATA[:size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", most)
        found = list(pieces(data, min(offset, size)))
    assert b"".join(piece.data for piece in found) == data[min(offset, size) :]
    assert all(len(piece.data) <= most for piece in found)


def test_an_interrupted_file_is_resumed(tmp_path: Path) -> None:
    IncomingFile(tmp_path / "x", file_of(DATA)).write(next(pieces(DATA)))
    again = IncomingFile(tmp_path / "x", file_of(DATA))
    assert again.offset == PIECE_BYTES
    assert taken(again, DATA) == DATA
    assert again.whole
    again.drop()
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_digest_is_dropped(tmp_path: Path) -> None:
    intake = IncomingFile(tmp_path / "x", rounds_pb2.File(size=len(DATA), sha256=hashlib.sha256(b"else").digest()))
    with pytest.raises(DamagedError, match="send it again"):
        taken(intake, DATA)
    assert list(tmp_path.iterdir()) == []
    assert intake.offset == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"offset": 7}, "got a piece at offset 7, expected 0"),
        ({"data": b""}, "a piece of 0 bytes"),
        ({"data": bytes(PIECE_BYTES + 1)}, f"a piece of {PIECE_BYTES + 1} bytes"),
        ({"crc32": 1}, "does not match its checksum"),
    ],
)
def test_a_wrong_piece_is_refused_and_not_stored(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    intake = IncomingFile(tmp_path / "x", file_of(DATA))
    piece = next(pieces(DATA))
    piece.MergeFrom(rounds_pb2.Piece(**changes))
    if "data" in changes:
        piece.data = changes["data"]
    with pytest.raises(RequestError, match=sentence):
        intake.write(piece)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "digest", "sentence"),
    [
        (0, 32, f"a file of 0 bytes; it must have 1 to {transfer.MAX_FILE_BYTES}"),
        (transfer.MAX_FILE_BYTES + 1, 32, f"a file of {transfer.MAX_FILE_BYTES + 1} bytes"),
        (5, 31, "a SHA-256 must have 32 bytes, not 31"),
    ],
)
def test_an_invalid_size_or_digest_is_refused_before_the_file(size: int, digest: int, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        checked(rounds_pb2.File(size=size, sha256=bytes(digest)))
