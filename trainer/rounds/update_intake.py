"""Intake of updates: checked before anything is stored, and judged when they are whole."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from stages.errors import CodecError, InputError, RequestError
from stages.wire.channel import check_name
from stages.wire.status import invalid
from trainer.rounds.codecs import CODECS
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member
from trainer.rounds.settings import MOST_MACHINES
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Update
from trainer.rounds.transfer import IncomingFile, Parcel
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


class UpdateIntake:
    """Takes updates in, one at a time for each place."""

    def __init__(self, spec: RunSpec, ledger: Ledger, directory: Path) -> None:
        """:param directory: an update lies in its folder `incoming` until it is judged."""
        self.spec, self.ledger, self.directory = spec, ledger, directory / INCOMING
        self.directory.mkdir(parents=True, exist_ok=True)
        self._known: dict[tuple[str, str], rounds_pb2.Verdict] = {}

    def check(self, member: Member, submission: rounds_pb2.Submission) -> None:
        """Raise Refusal for a header that no update of this member can have."""
        fragments, rounds = self.spec.fragments_of(member.place.part), self.spec.config.rounds
        try:
            check_name(submission.id, "submission id")
            if submission.fragment >= len(fragments):
                raise RequestError(f"no fragment {submission.fragment}: parts of this run have {len(fragments)}")
            fragment = fragments[submission.fragment]
            codec = CODECS[rounds.up_codec(submission.round)]
            if submission.codec != codec.name:
                raise RequestError(f"this round's updates travel as {codec.name}, not {submission.codec[:20]!r}")
            _parcel_of(submission).check()
            if submission.size != (due := codec.size(self.spec.fragments.like[fragment])):
                raise RequestError(f"an update of {fragment} has {due} bytes as {codec.name}, not {submission.size}")
            if not 1 <= submission.steps <= rounds.steps_per_round:
                raise RequestError(f"a round has 1 to {rounds.steps_per_round} steps, not {submission.steps}")
            # of a site, each machine reads as many as a worker does
            if submission.sequences > submission.steps * self.spec.config.sequences * MOST_MACHINES:
                raise RequestError(f"{submission.steps} steps do not see {submission.sequences} sequences")
            if submission.round >= self.spec.rounds or submission.base_version > submission.round:
                raise RequestError(
                    f"round {submission.round} from version {submission.base_version}; this run has rounds 0 to "
                    f"{self.spec.rounds - 1}, each from a version of at most its number"
                )
        except InputError as error:
            raise invalid(str(error)) from None
        _check_losses(submission.losses)

    def known(self, member: Member, submission: rounds_pb2.Submission) -> rounds_pb2.Verdict | None:
        """The verdict on a submission where it needs no payload, else None.

        :param submission: its header was checked.
        """
        if (said := self._known.get((submission.worker, submission.id))) is not None:
            return said
        fragment = self.spec.fragments_of(member.place.part)[submission.fragment]
        if self.ledger.owner(fragment, submission.id) == submission.worker:
            return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_DUPLICATE)
        done, reason = member.done(fragment), ""
        if self.ledger.round(fragment) >= self.spec.rounds:
            reason = f"{fragment} has made its last round"
        elif submission.round <= done:  # a place counts once, under any worker names
            reason = f"this place has handed in round {done} of {fragment} already"
        return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_REFUSED, reason=reason) if reason else None

    def begin(self, member: Member, submission: rounds_pb2.Submission) -> IncomingFile:
        """The file of an update, with what has come of it already. One a place: an older one makes room."""
        place = member.place
        return IncomingFile(self.directory / f"{place.part}-{place.replica}", _parcel_of(submission))

    def judge(
        self, fragment: str, submission: rounds_pb2.Submission, payload: bytes, now_s: float, voter: str
    ) -> rounds_pb2.Verdict:
        """Decode an update and ask the ledger. Raises CheckpointError when it cannot be stored."""
        try:
            codec = CODECS[self.spec.config.rounds.up_codec(submission.round)]
            delta = codec.decode(payload, self.spec.fragments.like[fragment])
        except CodecError as error:
            return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_REFUSED, reason=str(error))
        update = Update(
            id=submission.id,
            worker=submission.worker,
            fragment=fragment,
            base_version=submission.base_version,
            round=submission.round,
            steps=submission.steps,
            sequences=submission.sequences,
            delta=delta,
            losses=dict(submission.losses),
            voter=voter,
        )
        version = max(update.round, self.ledger.round(fragment)) + 1
        said = self.ledger.accept(update, now_s)
        verdict = rounds_pb2.Verdict(outcome=OUTCOMES[said.kind], reason=said.reason)
        if said.kind == "accepted":
            verdict.version = version
        self._remember((submission.worker, submission.id), verdict)
        return verdict

    def _remember(self, key: tuple[str, str], verdict: rounds_pb2.Verdict) -> None:
        """Keep the answer for when the same comes again."""
        again = rounds_pb2.Verdict()
        again.CopyFrom(verdict)
        if again.outcome == rounds_pb2.OUTCOME_ACCEPTED:
            again.outcome = rounds_pb2.OUTCOME_DUPLICATE
        self._known[key] = again
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def check_beat(beat: rounds_pb2.BeatRequest) -> None:
    """Raise Refusal unless a worker's report of itself can be shown."""
    _check_losses(beat.losses)
    for name in ("busy_seconds", "lived_seconds"):
        if not 0 <= getattr(beat, name) < math.inf:
            raise invalid(f"{name} must be a finite number from 0")


def _check_losses(losses: Mapping[str, float]) -> None:
    if len(losses) > MAX_LOSSES:
        raise invalid(f"{len(losses)} losses; tell at most {MAX_LOSSES}")
    for name, value in losses.items():
        if not re.fullmatch(r"[a-z0-9_]{1,64}", name) or not math.isfinite(value):
            raise invalid("a loss must be a finite number with a name of letters, digits and underscores")


def _parcel_of(submission: rounds_pb2.Submission) -> Parcel:
    return Parcel(submission.size, submission.sha256)
