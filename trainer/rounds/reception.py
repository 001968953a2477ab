"""What comes in from workers: checked before anything of it is stored, and judged when it is whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from stages.errors import CodecError, InputError, RequestError
from stages.refusal import invalid
from stages.transport import check_name
from trainer.rounds.codec import codec_named
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member
from trainer.rounds.plan import RunPlan
from trainer.rounds.transfer import Intake, Parcel
from trainer.rounds.update import Update
from trainer.v1 import rounds_pb2

INCOMING = "incoming"
MAX_LOSSES = 16
MAX_REMEMBERED = 4096

OUTCOMES = {
    "accepted": rounds_pb2.OUTCOME_ACCEPTED,
    "duplicate": rounds_pb2.OUTCOME_DUPLICATE,
    "dropped": rounds_pb2.OUTCOME_REFUSED,
    "refused": rounds_pb2.OUTCOME_REFUSED,
}


class Reception:
    """Takes updates in, one at a time for each place."""

    def __init__(self, plan: RunPlan, ledger: Ledger, directory: Path) -> None:
        """:param directory: what has come of an update stays in its folder `incoming` until it is judged."""
        self.plan, self.ledger, self.directory = plan, ledger, directory / INCOMING
        self.directory.mkdir(parents=True, exist_ok=True)
        self.codec = codec_named(plan.config.rounds.codec)
        self._known: dict[tuple[str, str], rounds_pb2.Verdict] = {}

    def check(self, member: Member, submission: rounds_pb2.Submission) -> None:
        """Raise Refusal for a header that no update of this member can have."""
        fragments, rounds = self.plan.cutting.parts[self.plan.parts[member.place.part]], self.plan.config.rounds
        try:
            check_name(submission.id, "submission id")
            if submission.fragment >= len(fragments):
                raise RequestError(f"no fragment {submission.fragment}: parts of this run have {len(fragments)}")
            part = fragments[submission.fragment]
            if submission.codec != self.codec.name:
                raise RequestError(f"updates of this run travel as {self.codec.name}, not {submission.codec[:20]!r}")
            parcel_of(submission).check()
            if submission.size != (due := self.codec.size(self.plan.cutting.like[part])):
                raise RequestError(f"an update of {part} has {due} bytes as {self.codec.name}, not {submission.size}")
            if not 1 <= submission.steps <= rounds.steps_per_round:
                raise RequestError(f"a round has 1 to {rounds.steps_per_round} steps, not {submission.steps}")
            if submission.sequences > submission.steps * self.plan.config.sequences:
                raise RequestError(f"{submission.steps} steps do not see {submission.sequences} sequences")
            if submission.round >= self.plan.rounds or submission.base_version > submission.round:
                raise RequestError(
                    f"round {submission.round} from version {submission.base_version}; this run has rounds 0 to "
                    f"{self.plan.rounds - 1}, each from a version of at most its number"
                )
        except InputError as error:
            raise invalid(str(error)) from None
        check_losses(submission.losses)

    def known(self, member: Member, submission: rounds_pb2.Submission) -> rounds_pb2.Verdict | None:
        """What can be said of a submission without its payload; None where that must come.

        :param submission: its header was checked.
        """
        if (said := self._known.get((submission.worker, submission.id))) is not None:
            return said
        fragment = self.plan.cutting.parts[self.plan.parts[member.place.part]][submission.fragment]
        if self.ledger.owner(fragment, submission.id) == submission.worker:
            return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_DUPLICATE)
        done, reason = member.done(fragment), ""
        if self.ledger.round(fragment) >= self.plan.rounds:
            reason = f"{fragment} has made its last round"
        elif submission.round <= done:  # whatever names its workers take, a place counts once
            reason = f"this place has handed in round {done} of {fragment} already"
        return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_REFUSED, reason=reason) if reason else None

    def begin(self, member: Member, submission: rounds_pb2.Submission) -> Intake:
        """What is there of it already, to be gone on with. One file a place: an older one makes room."""
        place = member.place
        return Intake(self.directory / f"{place.part}-{place.replica}", parcel_of(submission))

    def judge(self, part: str, submission: rounds_pb2.Submission, payload: bytes, now_s: float) -> rounds_pb2.Verdict:
        """Decode an update and ask the ledger. Raises CheckpointError when it cannot be stored.

        :param part: as the ledger knows it: a fragment.
        """
        try:
            delta = self.codec.decode(payload, self.plan.cutting.like[part])
        except CodecError as error:
            return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_REFUSED, reason=str(error))
        update = Update(
            id=submission.id,
            worker=submission.worker,
            part=part,
            base_version=submission.base_version,
            round=submission.round,
            steps=submission.steps,
            sequences=submission.sequences,
            delta=delta,
            losses=dict(submission.losses),
        )
        version = max(update.round, self.ledger.round(part)) + 1
        said = self.ledger.accept(update, now_s)
        verdict = rounds_pb2.Verdict(outcome=OUTCOMES[said.kind], reason=said.reason)
        if said.kind == "accepted":
            verdict.version = version
        self._remember((submission.worker, submission.id), verdict)
        return verdict

    def _remember(self, key: tuple[str, str], verdict: rounds_pb2.Verdict) -> None:
        """What to say when the same comes again."""
        again = rounds_pb2.Verdict()
        again.CopyFrom(verdict)
        if again.outcome == rounds_pb2.OUTCOME_ACCEPTED:
            again.outcome = rounds_pb2.OUTCOME_DUPLICATE
        self._known[key] = again
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def parcel_of(submission: rounds_pb2.Submission) -> Parcel:
    return Parcel(submission.size, submission.sha256)


def check_beat(beat: rounds_pb2.BeatRequest) -> None:
    """Raise Refusal unless what a worker says of itself can be shown."""
    check_losses(beat.losses)
    for name in ("busy_seconds", "lived_seconds"):
        if not 0 <= getattr(beat, name) < math.inf:
            raise invalid(f"{name} must be a finite number from 0")


def check_losses(losses: Mapping[str, float]) -> None:
    """Raise Refusal unless `losses` can be shown."""
    if len(losses) > MAX_LOSSES:
        raise invalid(f"{len(losses)} losses; tell at most {MAX_LOSSES}")
    for name, value in losses.items():
        if not re.fullmatch(r"[a-z0-9_]{1,64}", name) or not math.isfinite(value):
            raise invalid("a loss must be a finite number with a name of letters, digits and underscores")
