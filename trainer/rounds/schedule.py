"""The schedule of a run: a worker's next round, and the workers that a round waits for."""

from collections.abc import Callable

from stages.wire.status import StatusError, failed_precondition
from trainer.rounds.file_server import FeatureRelay
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member, Members
from trainer.rounds.spec import RunSpec


class RoundSchedule:
    """Rounds of parts, from the current ledger and members."""

    def __init__(
        self, spec: RunSpec, ledger: Ledger, members: Members, features: FeatureRelay, clock: Callable[[], float]
    ) -> None:
        self.spec, self.ledger, self.members, self.features, self.clock = spec, ledger, members, features, clock

    @property
    def closed(self) -> int:
        """Number of rounds that every part has finished."""
        return min(map(self.ledger.round, self.spec.parts))

    @property
    def ended(self) -> bool:
        """True if every part has finished its last round."""
        return self.closed >= self.spec.rounds

    def may_begin(self, member: Member, part: str, round_: int) -> bool:
        """True if a worker can start a round without waiting."""
        return round_ <= self.ledger.round(part) and self.features.may_begin(member.place, round_)

    def round_to_train(self, member: Member, part: str, done: int) -> int | None:
        """The round for a worker to train: the open one again if it was given up, else the next; None if there is none
        for it."""
        open_round = self.ledger.round(part)
        if not member.has_passed(open_round):
            return self.next_round(part, done)
        # with features missed, it could not be trained now either
        if self._is_given_up(part) and not self.features.is_missed(member.place, open_round):
            member.passed = open_round - 1
            return open_round
        return open_round + 1  # after the last round too: it waits, since the others may fail as it did

    def next_round(self, part: str, done: int) -> int | None:
        """The round after the finished ones; None after the last."""
        target_round = max(self.ledger.round(part), done + 1)
        return target_round if target_round < self.spec.rounds else None

    def is_answered(self, part: str, done: int) -> bool:
        """True if a worker that has finished round `done` need not wait."""
        target_round = self.next_round(part, done)
        return target_round is None or target_round <= self.ledger.round(part)

    def check_known(self, part: str, done: int, version: int) -> None:
        """Raise StatusError if a worker knows a later round than this coordinator, which never goes back by itself."""
        open_round = self.ledger.round(part)
        if max(done, version) > open_round:
            problem = f"you know round {max(done, version)} of {part}, but here round {open_round} is open"
            raise state_mismatch(f"{problem}: the coordinator's directory is an older copy")

    def expected(self, part: str) -> int:
        """Number of workers that will hand in for the open round: those of places never taken, the present ones, and
        those that already did."""
        # Without present workers whose update was refused: a repeat would give the same update.
        now, round_ = self.clock(), self.ledger.round(part)
        members = self.trainers(part)
        gone = sum(not self.members.is_present(m, now) and m.finished < round_ for m in members)
        gone += sum(self.members.is_present(m, now) and m.has_passed(round_) for m in members)
        return max(self.members.replicas - gone, 1)

    def trainers(self, part: str) -> list[Member]:
        return [m for m in self.members if self.spec.parts[m.place.part] == part]

    def _is_given_up(self, part: str) -> bool:
        """True if the open round has no update and will get none, because all its updates were refused."""
        now, round_ = self.clock(), self.ledger.round(part)
        here = [m for m in self.trainers(part) if self.members.is_present(m, now)]
        return self.ledger.due_at(part) is None and all(m.has_passed(round_) for m in here)


def state_mismatch(problem: str) -> StatusError:
    """The refusal of a worker that knows a different state of the run."""
    remedies = "restore the right directory and restart the coordinator, or start each worker with another --state"
    return failed_precondition(f"{problem}; {remedies} to continue from the open round")
