"""Bytes of one worker: what the codecs say of its tensors, and what travelling adds to them."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.inventory import PartInventory
from trainer.rounds.codec import codec_named
from trainer.rounds.codec.fp32 import Fp32
from trainer.rounds.settings import RoundSettings
from trainer.rounds.transfer import PIECE_BYTES, pieces
from trainer.v1 import rounds_pb2

SEGMENT_BYTES, PACKET_BYTES = 1448, 1500
"""What TCP carries in a packet of 1500 bytes with time stamps (RFC 9293, RFC 7323), and that packet."""
HTTP_FRAME_BYTES, HTTP_HEADER_BYTES = 16384, 9
"""RFC 9113, 4.1 and 4.2: the frame size that nobody asked to change."""
GRPC_HEADER_BYTES = 5
"""Of each message: a flag and a length (gRPC over HTTP/2)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one worker, without headers: what the coordinator counts."""

    first: int
    """Versions 0, whole: of its part, and of those that it has copies of."""
    up: int
    """Its update of one round."""
    down: int
    """One version of its part, as it comes after the first."""
    copies: tuple[int, ...]
    """One refresh of each part that it has a copy of, likewise."""
    rounds: int
    versions: int
    """That it fetches of its part after the first."""
    refreshes: int
    """Of each copy after the first."""
    features: int = 0
    """Of one round, where it reads these."""

    @property
    def up_in_all(self) -> int:
        return self.rounds * self.up

    @property
    def down_in_all(self) -> int:
        versions = self.first + self.versions * self.down + self.refreshes * sum(self.copies)
        return versions + self.rounds * self.features


def traffic_of(part: PartInventory, settings: RoundSettings) -> Traffic:
    """:param settings: settled, so that `rounds` is a number above 0.

    A worker fetches one version of each part a round, but for the last, which nobody trains from; who goes on while its
    update travels begins a round from the version before.
    """
    up, down, copy = map(codec_named, (settings.codec, settings.down_codec, settings.copies_codec))
    versions = max(settings.rounds - (1 if settings.overlap == "none" else 2), 0)
    wholes = [part.shapes, *part.copied.values()]
    return Traffic(
        first=sum(map(Fp32().size, wholes)),
        up=up.size(part.shapes),
        down=down.size(part.shapes),
        copies=tuple(map(copy.size, part.copied.values())),
        rounds=settings.rounds,
        versions=versions,
        refreshes=versions // settings.copies_every,
        features=part.features.size if part.features else 0,
    )


def wire_bytes(payload: int) -> float:
    """What a link carries for a file of `payload` bytes: pieces in gRPC messages, HTTP/2 frames and TCP segments.

    Acknowledgements travel the other way and are not counted.
    """
    whole, rest = divmod(payload, PIECE_BYTES)
    sizes = [*[PIECE_BYTES] * min(whole, 1), *[rest] * (rest > 0)]
    counts = [*[whole] * min(whole, 1), *[1] * (rest > 0)]
    framed = sum(count * _framed(size) for size, count in zip(sizes, counts, strict=True))
    return framed * PACKET_BYTES / SEGMENT_BYTES


def _framed(size: int) -> int:
    (piece,) = pieces(bytes(size))
    message = rounds_pb2.SubmitRequest(piece=piece).ByteSize() + GRPC_HEADER_BYTES
    return message + HTTP_HEADER_BYTES * -(-message // HTTP_FRAME_BYTES)
