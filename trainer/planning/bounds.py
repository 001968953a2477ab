"""Between which bytes a run lies whose rounds do not wait for everybody, or whose parts are not equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.planning.inventory import PartInventory
from trainer.planning.traffic import fragments_of, traffic_of, version_bytes
from trainer.rounds.codec import codec_named
from trainer.rounds.ledger import KEPT_VERSIONS
from trainer.rounds.publication import WHOLE
from trainer.rounds.settings import CodecName, RoundSettings
from trainer.rounds.tensors import Shapes


@dataclass(frozen=True)
class Bounds:
    """Of all workers, both ways, as the coordinator counts.

    They hold while everybody stays from the first round to the end, and nothing is refused, sent twice or too old to be
    fetched; whatever joins anew fetches its first versions again.
    """

    least: int
    most: int


def bounds_of(parts: Sequence[PartInventory], settings: RoundSettings) -> Bounds:
    """:param settings: settled."""
    found = [_of_part(part, settings) for part in parts]
    return Bounds(sum(each.least for each in found), sum(each.most for each in found))


def _of_part(part: PartInventory, settings: RoundSettings) -> Bounds:
    """Of its workers.

    Least: all have version 0, and each round is made of one update. Most: each worker hands in each round, and fetches
    every version from which a round may begin, as dearly as it may come; likewise with the copies, of which one may be
    made of the last version, too, where the part that is read is the quicker one.
    """
    traffic, replicas, rounds = traffic_of(part, settings), settings.replicas, settings.rounds
    *others, last = fragments_of(part.shapes, settings)
    own = sum(_most(like, rounds, settings.down_codec) for like in others)
    own += _most(last, rounds - 1, settings.down_codec)
    copied = (fragment for like in part.copied.values() for fragment in fragments_of(like, settings))
    copies = sum(_most(like, rounds // settings.copies_every, settings.copies_codec) for like in copied)
    return Bounds(
        traffic.up_in_all + replicas * traffic.first,
        replicas * (traffic.up_in_all + traffic.first + own + copies),
    )


def _most(like: Shapes, versions: int, codec: CodecName) -> int:
    """Bytes of so many versions one after the other: each as a difference, or those that a worker missed whole, which
    is dear where more differences than are kept would have been few bytes."""
    one, missed = version_bytes(like, codec), KEPT_VERSIONS + 1
    jumps = versions // missed
    return versions * one + jumps * max(codec_named(WHOLE).size(like) - missed * one, 0)
