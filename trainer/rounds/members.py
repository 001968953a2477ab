"""Members: the places of a run, and the leases of the workers that hold them."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from stages.errors import ConfigError, ResumeError
from stages.settings import from_toml
from stages.wire.status import aborted, already_exists, exhausted, not_found
from trainer.rounds.store import DATABASE, RESTORE, Record, Store
from trainer.v1 import rounds_pb2

RETRY_MS = 2000
SAVED_FIELDS = ("worker", "lease", "device", "key", "finished")  # fields of a member that are saved with its place
NAME_TAKEN = "another process already works as {}: give each worker its own --name, and its own token if required"


@dataclass(frozen=True, order=True)
class Place:
    """One worker's position; `part` is the number of its part in the run."""

    part: int
    replica: int


@dataclass
class Member:
    """The worker that holds a place, or held it last."""

    worker: str
    place: Place
    lease: str
    last_call_s: float  # time of its last call
    device: str = ""
    key: str = ""  # the token or certificate that it presented; empty with open access
    finished: int = -1  # the last round with an accepted update from this place; -1 for none
    # The last round for which it is done: its update was accepted or refused.
    passed: int = -1
    beat: rounds_pb2.BeatRequest = field(default_factory=rounds_pb2.BeatRequest)  # its last report of itself
    accepted: int = 0
    refused: int = 0
    problem: str = ""

    @property
    def voter(self) -> str:
        """The owner of one vote in a merge, whatever names its workers take."""
        return self.key or f"place-{self.place.replica}"

    def record_order(self, round_: int) -> None:
        """Record that an order was given, which ends its earlier report."""
        self.beat.doing, self.beat.round, self.beat.steps = rounds_pb2.DOING_FETCHING, round_, 0

    def record_finished(self, round_: int) -> None:
        """Record that its update was accepted."""
        self.finished = max(self.finished, round_)
        if self.beat.round <= round_:
            self.beat.doing = rounds_pb2.DOING_WAITING

    def record_verdict(self, round_: int, verdict: rounds_pb2.Verdict) -> None:
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            self.refused, self.problem = self.refused + 1, f"refused: {verdict.reason}"
        else:
            self.accepted, self.problem = self.accepted + (verdict.outcome == rounds_pb2.OUTCOME_ACCEPTED), ""
            self.record_finished(round_)

    def has_passed(self, round_: int) -> bool:
        """True if its update of a round was refused: it does not repeat it without an order."""
        return self.finished < round_ <= self.passed

    def is_late(self, open_round: int) -> bool:
        """True if the round that it hands in next is already closed: it is slow or hangs."""
        known = self.beat.doing != rounds_pb2.DOING_UNSPECIFIED
        return known and max(self.beat.round, self.finished + 1) < open_round


class Members:
    """The places of a run. They outlive the coordinator: after a restart every lease starts over.

    Times are seconds on a monotonic clock.
    """

    def __init__(self, store: Store, parts: int, replicas: int, lease_s: float, now_s: float) -> None:
        """:param store: holds the places, before and after. Raises ResumeError if they are damaged."""
        self.store, self.parts, self.replicas, self.lease_s = store, parts, replicas, lease_s
        self.is_closed: Callable[[Place], bool] = lambda place: False  # True if no worker may take the place
        self._members: dict[Place, Member] = {}
        try:
            for record in store.members():
                place = from_toml(Place, {name: record[name] for name in ("part", "replica")}, "its place")
                own = {"place": place, "last_call_s": now_s}
                member = from_toml(Member, own | {name: record[name] for name in SAVED_FIELDS}, "its worker")
                if not member.lease:  # else its lease starts over
                    self.leave(member)
                if place.part in range(parts) and place.replica in range(replicas):
                    self._members[place] = member
        except (ConfigError, KeyError) as error:
            raise ResumeError(f"{DATABASE} has a place that makes no sense ({error!r}); {RESTORE}") from None

    def __iter__(self) -> Iterator[Member]:
        return iter([self._members[place] for place in sorted(self._members)])

    def join(
        self, worker: str, part: int | None, now_s: float, device: str = "", key: str = "", stands_by: bool = False
    ) -> Member:
        """A place for `worker`: its own, else an unused one, else one whose worker is gone. Raises StatusError.

        :param key: the key presented; each has one place. :param stands_by: do not take it from a process of its name.

        The caller saves it before any worker learns of it.
        """
        if part is not None and not 0 <= part < self.parts:
            span = f"parts 0 to {self.parts - 1}" if self.parts > 1 else "one part, 0"
            raise not_found(f"part {part} does not exist: this run has {span}")
        same = [m for m in self._members.values() if m.key == key and (key or m.worker == worker)]
        for other in same:
            if self.is_present(other, now_s) and (stands_by or other.worker != worker):
                taken = f"{key} already has a place, as {other.worker}: a key has one place, and one vote in a merge"
                reason = NAME_TAKEN.format(worker) if other.worker == worker else f"{taken}; get a key for each worker"
                raise exhausted(reason, RETRY_MS)
        place = self._own_place(same, worker, part) or self._free_place(part, now_s)
        if place is None:
            where = f"part {part}" if part is not None else "every part"
            reason = f"{where} already has as many workers as the run's settings allow, {self.replicas}"
            raise exhausted(f"{reason}; --wait waits for a free place", RETRY_MS)
        before = self._members.get(place)
        for other in [m for m in same if m.place != place]:
            self.leave(other)
        member = Member(worker, place, secrets.token_hex(16), now_s, device, key)
        if before is not None:
            member.finished = before.finished
            if before.worker == worker:
                member.accepted, member.refused = before.accepted, before.refused
        self._members[place] = member
        return member

    def called(self, worker: str, lease: str, now_s: float) -> Member:
        """The calling member, with its lease renewed. Raises StatusError."""
        for member in self._members.values():
            if member.lease and member.worker == worker:
                if member.lease == lease:
                    member.last_call_s = now_s
                    return member
                if self.is_present(member, now_s):
                    raise already_exists(NAME_TAKEN.format(worker))
        reason = f"{worker} does not hold this lease: its place was taken, or the coordinator's directory is new"
        raise aborted(f"{reason}; the worker joins again")

    def remember(self, worker: str, part: int, round_: int) -> None:
        """Record that an update of `worker` was accepted for this round before this process started."""
        # Updates from its place under other names were saved when it got the place.
        for member in self._members.values():
            if member.worker == worker and member.place.part == part:
                member.record_finished(round_)

    def leave(self, member: Member) -> None:
        """Give a place back; its updates stay known. The caller saves this."""
        member.lease, member.last_call_s = "", float("-inf")

    def records(self) -> list[Record]:
        """The current state to save."""
        return [asdict(m.place) | {name: getattr(m, name) for name in SAVED_FIELDS} for m in self]

    def at(self, place: Place) -> Member | None:
        """The member that holds a place, or held it last."""
        return self._members.get(place)

    def is_present(self, member: Member, now_s: float) -> bool:
        """True if its lease holds."""
        return now_s - member.last_call_s < self.lease_s

    def present(self, part: int, now_s: float) -> int:
        """Number of a part's workers whose leases hold."""
        return sum(m.place.part == part and self.is_present(m, now_s) for m in self._members.values())

    def _own_place(self, same: Sequence[Member], worker: str, part: int | None) -> Place | None:
        """The place that it holds, in preference to one that it gave back."""
        own = [m for m in same if m.worker == worker and part in (None, m.place.part)]
        return min(own, key=lambda m: not m.lease).place if own else None

    def _free_place(self, part: int | None, now_s: float) -> Place | None:
        """A free place, first in the parts with the fewest workers."""
        parts = range(self.parts) if part is None else (part,)
        places = [Place(p, r) for p in parts for r in range(self.replicas) if not self.is_closed(Place(p, r))]
        taken = {place for place, member in self._members.items() if self.is_present(member, now_s)}
        free = [place for place in places if place not in taken]
        return min(free, key=lambda p: (self.present(p.part, now_s), p in self._members, p), default=None)
