"""Bytes that one worker sends and fetches: its tensors as codecs encode them, and the headers of the network."""

from dataclasses import dataclass

from trainer.blocks.round_settings import CodecName, RoundSettings
from trainer.planning.inventory import PartInventory
from trainer.rounds.codecs import CODECS, WHOLE, Shapes
from trainer.rounds.spec import cut
from trainer.rounds.transfer import PIECE_BYTES, pieces
from trainer.v1 import rounds_pb2

# Payload of a TCP packet of 1500 bytes with time stamps (RFC 9293, RFC 7323), and that packet.
SEGMENT_BYTES, PACKET_BYTES = 1448, 1500
HTTP_FRAME_BYTES, HTTP_HEADER_BYTES = 16384, 9  # RFC 9113, 4.1 and 4.2: the default frame size
GRPC_HEADER_BYTES = 5  # a flag and a length before each message (gRPC over HTTP/2)


@dataclass(frozen=True)
class WorkerTraffic:
    """Bytes of one worker without headers, as the coordinator counts them."""

    first: int  # versions 0, whole, of its part and of the parts that it has copies of
    ups: tuple[int, ...]  # its update of one round, fragment by fragment
    downs: tuple[int, ...]  # one version of each fragment after the first
    copies: tuple[int, ...]  # one refresh of each fragment of the parts that it has copies of
    rounds: int
    # Versions that it fetches of its last fragment and of each copy after the first; of the other fragments one more.
    versions: int
    features: int = 0  # features that it reads in one round
    made: int = 0  # features that it makes for the next part in one round
    hops: int = 0  # that a step's features make from the first part to the last
    last: int = 0  # by how much its last update is longer

    @property
    def up(self) -> int:
        """Its update of one round."""
        return sum(self.ups)

    @property
    def down(self) -> int:
        """One version of its part."""
        return sum(self.downs)

    @property
    def up_in_all(self) -> int:
        return self.rounds * (self.up + self.made) + self.last

    @property
    def fetched(self) -> tuple[int, ...]:
        """Versions that it fetches of each fragment after the first."""
        return (*[self.versions + 1] * (len(self.downs) - 1), self.versions)

    @property
    def down_in_all(self) -> int:
        own = sum(count * size for count, size in zip(self.fetched, self.downs, strict=True))
        return self.first + own + self.versions * sum(self.copies) + self.rounds * self.features


def traffic_of(part: PartInventory, settings: RoundSettings) -> WorkerTraffic:
    """Traffic of a worker of `part` when every worker submits in every round and each round waits for all of them.

    settings: settled, so that `rounds` is above 0. Raises ConfigError for too many fragments.
    """
    # A worker begins round n with version n, or with version n - 1 where it does not wait. The last round ends with the
    # last fragment, whose last version nobody trains from; the other fragments are fetched once more.
    up, down = CODECS[settings.codec], settings.down_codec
    own, last = fragments_of(part.shapes, settings), CODECS[settings.up_codec(settings.rounds - 1)]
    versions = max(settings.rounds - 1 - settings.ahead, 0)
    return WorkerTraffic(
        first=sum(map(CODECS[WHOLE].size, [part.shapes, *part.copied.values()])),
        ups=tuple(map(up.size, own)),
        downs=tuple(version_bytes(like, down) for like in own),
        copies=tuple(version_bytes(f, down) for like in part.copied.values() for f in fragments_of(like, settings)),
        rounds=settings.rounds,
        versions=versions,
        features=part.reads.size if part.reads else 0,
        made=part.makes.size if part.makes else 0,
        hops=part.hops,
        last=sum(last.size(like) - up.size(like) for like in own),
    )


def version_bytes(like: Shapes, codec: CodecName) -> int:
    """One version for a worker that has the one before: as a difference, or whole if that is not more."""
    return min(CODECS[codec].size(like), CODECS[WHOLE].size(like))


def fragments_of(like: Shapes, settings: RoundSettings) -> list[Shapes]:
    """The tensors of each fragment of a part. Raises ConfigError for more fragments than tensors."""
    return [{name: like[name] for name in names} for names in cut(like, settings.fragments)]


def wire_bytes(payload: int) -> float:
    """Bytes on the link for a file of `payload` bytes: pieces in gRPC messages, HTTP/2 frames and TCP segments."""
    # Acknowledgements travel the other way and are not counted.
    whole, rest = divmod(payload, PIECE_BYTES)
    sizes = [*[PIECE_BYTES] * min(whole, 1), *[rest] * (rest > 0)]
    counts = [*[whole] * min(whole, 1), *[1] * (rest > 0)]
    framed = sum(count * _framed(size) for size, count in zip(sizes, counts, strict=True))
    return framed * PACKET_BYTES / SEGMENT_BYTES


def _framed(size: int) -> int:
    (piece,) = pieces(bytes(size))
    message = rounds_pb2.SubmitRequest(piece=piece).ByteSize() + GRPC_HEADER_BYTES
    return message + HTTP_HEADER_BYTES * -(-message // HTTP_FRAME_BYTES)
