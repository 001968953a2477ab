"""Members: the places of a run, and the leases of the workers that have them."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from stages.wire.status import aborted, already_exists, exhausted, not_found
from trainer.rounds.store import Record, Store
from trainer.v1 import rounds_pb2

RETRY_MS = 2000
KEPT = ("worker", "lease", "device", "key", "finished")  # of a member, beside its place
ANOTHER = "another process works as {}: give each worker a --name of its own, and a token where one is asked for"


@dataclass(frozen=True, order=True)
class Place:
    """One of the workers that a part has; `part` counts the parts of the run."""

    part: int
    replica: int


@dataclass
class Member:
    """The worker that has a place, or had it last."""

    worker: str
    place: Place
    lease: str
    heard_s: float  # time of its last call
    device: str = ""
    key: str = ""  # the token or certificate that it showed; empty where everybody has access
    finished: int = -1  # the last round for which something was accepted from this place; -1 for none
    # The last round for which nothing more comes from it: what it made was accepted, or refused.
    passed: int = -1
    beat: rounds_pb2.BeatRequest = field(default_factory=rounds_pb2.BeatRequest)  # its last report of itself
    accepted: int = 0
    refused: int = 0
    problem: str = ""

    @property
    def voter(self) -> str:
        """Has one vote in a merge, whatever names its workers take."""
        return self.key or f"place-{self.place.replica}"

    def begins(self, round_: int) -> None:
        """An order was given: what it said of itself before is over."""
        self.beat.doing, self.beat.round, self.beat.steps = rounds_pb2.DOING_FETCHING, round_, 0

    def has_finished(self, round_: int) -> None:
        """Its update was accepted."""
        self.finished = max(self.finished, round_)
        if self.beat.round <= round_:
            self.beat.doing = rounds_pb2.DOING_WAITING

    def was_told(self, round_: int, verdict: rounds_pb2.Verdict) -> None:
        """Note the verdict on its update."""
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            self.refused, self.problem = self.refused + 1, f"refused: {verdict.reason}"
        else:
            self.accepted, self.problem = self.accepted + (verdict.outcome == rounds_pb2.OUTCOME_ACCEPTED), ""
            self.has_finished(round_)

    def has_passed(self, round_: int) -> bool:
        """True if its update of a round was refused: it is not made again, unless it is asked for."""
        return self.finished < round_ <= self.passed

    def is_late(self, open_round: int) -> bool:
        """True if the round that it is to hand in next is closed: it is slow, or hangs."""
        known = self.beat.doing != rounds_pb2.DOING_UNSPECIFIED
        return known and max(self.beat.round, self.finished + 1) < open_round


class Members:
    """The places of a run. They outlive the coordinator: after a restart every lease begins anew.

    Times are seconds on a clock that only goes forward.
    """

    def __init__(self, store: Store, parts: int, replicas: int, lease_s: float, now_s: float) -> None:
        """:param store: where the places were kept, and will be."""
        self.store, self.parts, self.replicas, self.lease_s = store, parts, replicas, lease_s
        self.is_closed: Callable[[Place], bool] = lambda place: False  # nobody may take it
        self._members: dict[Place, Member] = {}
        for record in store.members():
            place = Place(record["part"], record["replica"])
            # where somebody had it, the lease begins anew
            heard_s = now_s if record["lease"] else float("-inf")
            if place.part < parts and place.replica < replicas:
                kept = {name: record[name] for name in KEPT}
                self._members[place] = Member(place=place, heard_s=heard_s, **kept)

    def __iter__(self) -> Iterator[Member]:
        return iter([self._members[place] for place in sorted(self._members)])

    def join(
        self, worker: str, part: int | None, now_s: float, device: str = "", key: str = "", stands_by: bool = False
    ) -> Member:
        """A place for `worker`: its own, else one that nobody had, else one whose worker is gone. Raises StatusError.

        :param key: that it showed; a key has one place. :param stands_by: not to take it from a process of its name.

        To be saved before anybody learns of it.
        """
        if part is not None and not 0 <= part < self.parts:
            span = f"parts 0 to {self.parts - 1}" if self.parts > 1 else "one part, 0"
            raise not_found(f"there is no part {part}: this run has {span}")
        same = [m for m in self._members.values() if m.key == key and (key or m.worker == worker)]
        for other in same:
            if self.is_here(other, now_s) and (stands_by or other.worker != worker):
                taken = f"{key} has a place already, as {other.worker}: a key has one place, and one vote in a merge"
                said = ANOTHER.format(worker) if other.worker == worker else f"{taken}; get a key for each worker"
                raise exhausted(said, RETRY_MS)
        place = self._own(same, worker, part) or self._free(part, now_s)
        if place is None:
            where = f"part {part}" if part is not None else "every part"
            said = f"{where} has its {self.replicas} workers, as many as the run's settings plan"
            raise exhausted(f"{said}; --wait waits until one is gone", RETRY_MS)
        before = self._members.get(place)
        for other in [m for m in same if m.place != place]:
            self.leave(other)
        member = Member(worker, place, secrets.token_hex(16), now_s, device, key)
        if before is not None:
            member.finished = before.finished
        self._members[place] = member
        return member

    def called(self, worker: str, lease: str, now_s: float) -> Member:
        """The member that calls, whose lease begins anew. Raises StatusError."""
        for member in self._members.values():
            if member.lease and member.worker == worker:
                if member.lease == lease:
                    member.heard_s = now_s
                    return member
                if self.is_here(member, now_s):
                    raise already_exists(ANOTHER.format(worker))
        said = f"{worker} has no such lease: its place went to another, or the coordinator's directory is a new one"
        raise aborted(f"{said}; it joins again")

    def remember(self, worker: str, part: int, round_: int) -> None:
        """Something of `worker` was accepted for this round, before this process began."""
        # What came from its place under other names was saved when the place went to it.
        for member in self._members.values():
            if member.worker == worker and member.place.part == part:
                member.has_finished(round_)

    def leave(self, member: Member) -> None:
        """Give a place back; what was handed in from it stays known. To be saved."""
        member.lease, member.heard_s = "", float("-inf")

    def records(self) -> list[Record]:
        """All that is to be saved, as it is now."""
        return [asdict(m.place) | {name: getattr(m, name) for name in KEPT} for m in self]

    def at(self, place: Place) -> Member | None:
        """The member that has a place, or had it last."""
        return self._members.get(place)

    def is_here(self, member: Member, now_s: float) -> bool:
        """True if its lease holds."""
        return now_s - member.heard_s < self.lease_s

    def present(self, part: int, now_s: float) -> int:
        """Workers of a part whose leases hold."""
        return sum(m.place.part == part and self.is_here(m, now_s) for m in self._members.values())

    def _own(self, same: Sequence[Member], worker: str, part: int | None) -> Place | None:
        """The place that it has, before one that it gave back."""
        own = [m for m in same if m.worker == worker and part in (None, m.place.part)]
        return min(own, key=lambda m: not m.lease).place if own else None

    def _free(self, part: int | None, now_s: float) -> Place | None:
        """The parts that have the fewest workers come first."""
        wanted = range(self.parts) if part is None else (part,)
        places = [Place(p, r) for p in wanted for r in range(self.replicas) if not self.is_closed(Place(p, r))]
        taken = {place for place, member in self._members.items() if self.is_here(member, now_s)}
        free = [place for place in places if place not in taken]
        return min(free, key=lambda p: (self.present(p.part, now_s), p in self._members, p), default=None)
