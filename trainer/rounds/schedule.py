"""The schedule of a run: the round that a worker makes next, and the workers that a round waits for."""

from collections.abc import Callable

from stages.wire.status import StatusError, failed_precondition
from trainer.rounds.file_server import FeatureRelay
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member, Members
from trainer.rounds.spec import RunSpec


class RoundSchedule:
    """Rounds of parts, as the ledger and the members are now."""

    def __init__(
        self, spec: RunSpec, ledger: Ledger, members: Members, features: FeatureRelay, clock: Callable[[], float]
    ) -> None:
        self.spec, self.ledger, self.members, self.features, self.clock = spec, ledger, members, features, clock

    @property
    def closed(self) -> int:
        """Rounds that every part has made."""
        return min(map(self.ledger.round, self.spec.parts))

    @property
    def ended(self) -> bool:
        """True if every part has made its last round."""
        return self.closed >= self.spec.rounds

    def may_begin(self, member: Member, part: str, round_: int) -> bool:
        """True if a worker need not wait any more for a round that it is to make."""
        return round_ <= self.ledger.round(part) and self.features.may_begin(member.place, round_)

    def wanted_round(self, member: Member, part: str, done: int) -> int | None:
        """The round that a worker is to make: the open one again where it was given up, else the next; None where there
        is none for it."""
        again = self.ledger.round(part)
        if not member.has_passed(again):
            return self.next_round(part, done)
        # where its features are missed, it could not be made now either
        if self._is_given_up(part) and not self.features.is_missed(member.place, again):
            member.passed = again - 1
            return again
        return again + 1  # after the last round, too: it waits, for the others may fail as it did

    def next_round(self, part: str, done: int) -> int | None:
        """The round after those that are done; None where there is no more."""
        wanted = max(self.ledger.round(part), done + 1)
        return wanted if wanted < self.spec.rounds else None

    def is_answered(self, part: str, done: int) -> bool:
        """True if a worker that has done this round need not wait."""
        wanted = self.next_round(part, done)
        return wanted is None or wanted <= self.ledger.round(part)

    def check_known(self, part: str, done: int, version: int) -> None:
        """Raise StatusError where a worker knows more than this coordinator, which never goes back by itself."""
        open_round = self.ledger.round(part)
        if max(done, version) > open_round:
            said = f"you know round {max(done, version)} of {part}, and here round {open_round} is open"
            raise put_back(f"{said}: the coordinator's directory is an older one")

    def expected(self, part: str) -> int:
        """Workers that will hand in for the open round: of places that were never taken, those that are here, and those
        that did already."""
        # Not of workers that are here and whose update was refused: made again it would be the same.
        now, round_ = self.clock(), self.ledger.round(part)
        members = self.trainers(part)
        gone = sum(not self.members.is_here(m, now) and m.finished < round_ for m in members)
        gone += sum(self.members.is_here(m, now) and m.has_passed(round_) for m in members)
        return max(self.members.replicas - gone, 1)

    def trainers(self, part: str) -> list[Member]:
        """Members that train a part."""
        return [m for m in self.members if self.spec.parts[m.place.part] == part]

    def _is_given_up(self, part: str) -> bool:
        """True if nothing came for the open round, and nothing will: all that was made for it was refused."""
        now, round_ = self.clock(), self.ledger.round(part)
        here = [m for m in self.trainers(part) if self.members.is_here(m, now)]
        return self.ledger.due_at(part) is None and all(m.has_passed(round_) for m in here)


def put_back(said: str) -> StatusError:
    """The refusal of a worker that knows another state of the run."""
    ways = "put the right directory back and start the coordinator again, or start each worker with another --state"
    return failed_precondition(f"{said}; {ways} to go on from the round that is open here")
