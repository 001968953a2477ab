"""Files of a run: weights that workers fetch, features that one worker makes for another, and submitted updates."""

import asyncio
import contextlib
import math
import mmap
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stages.clock import monotonic
from stages.errors import CheckpointError, CodecError, InputError, RequestError, file_errors
from stages.wire.channel import check_name
from stages.wire.status import StatusError, invalid, not_found
from trainer.rounds.codecs import CODECS, WHOLE, route
from trainer.rounds.ledger import KEPT_VERSIONS, Ledger
from trainer.rounds.members import Member, Members, Place
from trainer.rounds.parts import FEATURES, FeatureFormat, reads_features, sends_features, tidy
from trainer.rounds.settings import MAX_MACHINES
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Update
from trainer.rounds.transfer import FILE_GONE, IncomingFile, checked, file_of, size_of
from trainer.v1 import rounds_pb2

# Files kept of a part, by kind: a worker that fetches a version while the next one is made can finish.
KEPT = {"whole": 2, "difference": KEPT_VERSIONS}
FOLDER = "features"
POLL_S = 1.0  # pause between two checks of the worker that makes awaited features
MAX_DIGITS = 18  # of a round number


class WeightServer:
    """The newest weights of each part, whole or as differences, in files made on first request.

    Their names stay valid for a while. For one thread at a time.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._files: dict[tuple[str, int, str], tuple[bytes, rounds_pb2.File]] = {}

    def weights(self, part: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """The newest version of a part, for a worker that holds an earlier version or none."""
        version, weights = self.ledger.round(part), self.ledger.weights(part)
        offered = rounds_pb2.Weights(part=part, version=version, digest=self.ledger.digest(part))
        if held is not None and held.version == version:
            return offered
        differences = route(held.version if held else None, version, partial(self._difference, part), weights)
        offered.whole = not differences
        keys = [(part, number, "difference") for number in differences] or [(part, version, "whole")]
        if offered.whole and keys[0] not in self._files:
            self._keep(keys[0], CODECS[WHOLE].encode(weights))
        offered.files.extend(self._files[key][1] for key in keys)
        for key in [key for key in self._files if key[0] == part and key[1] <= version - KEPT[key[2]]]:
            del self._files[key]
        return offered

    def read(self, name: str) -> bytes:
        """The file of this name. Raises StatusError."""
        for data, file in list(self._files.values()):  # a copy, because another thread makes orders
            if name == file.name:
                return data
        raise _file_gone(name)

    def _difference(self, part: str, number: int) -> bytes | None:
        """A difference, read from disk once for any number of workers."""
        key = part, number, "difference"
        if key not in self._files:
            if not (data := self.ledger.difference(part, number)):
                return None
            self._keep(key, data)
        return self._files[key][0]

    def _keep(self, key: tuple[str, int, str], data: bytes) -> None:
        self._files[key] = data, file_of(data, "-".join(map(str, key)))


def _file_gone(name: str) -> StatusError:
    return not_found(f"file {name[:80]!r} is gone: ask for the next order", reason=FILE_GONE)


class FeatureRelay:
    """Features in transit between the workers of a replica, one file per round. For the event loop."""

    # They pass through the coordinator, because workers only dial out, and through its disk, because either end may be
    # killed in the middle of a round and come back.

    def __init__(self, spec: RunSpec, ledger: Ledger, members: Members, directory: Path) -> None:
        self._config, self._parts, self._ledger, self._members = spec.config, spec.parts, ledger, members
        self._format, self._directory = FeatureFormat.of(spec.config), directory / FOLDER
        self._data_arrived = asyncio.Event()

    def may_begin(self, place: Place, round_: int) -> bool:
        """True if the worker at a place need not wait for workers of other parts."""
        # Every part trains a round with the others' weights of one version, whatever the speed of the machines, and at
        # most one round's features are in transit.
        if not self._config.rounds.by_features:
            return True
        later = self._parts[place.part + 1 :]
        return all(self._ledger.round(part) >= round_ for part in later) and not self.is_missed(place, round_)

    def is_missed(self, place: Place, round_: int) -> bool:
        """True if no worker will make the features of a place's round, because the previous part has closed it."""
        if not reads_features(self._config, place.part) or self._ledger.round(self._parts[place.part - 1]) <= round_:
            return False
        if size_of(self._path(place, round_)) == self._format.size:
            return False
        maker = self._members.at(Place(place.part - 1, place.replica))
        return maker is None or maker.beat.round != round_ or not self._members.is_present(maker, monotonic())

    def begin(self, place: Place, round_: int) -> IncomingFile:
        """The file for features that the worker at a place makes in a round. Raises StatusError, CheckpointError."""
        if not sends_features(self._config, place.part) or round_ > self._ledger.round(self._parts[place.part]):
            raise invalid(f"no worker reads the features of {self._parts[place.part]} in round {round_}")
        reader = Place(place.part + 1, place.replica)
        oldest = self._ledger.round(self._parts[reader.part]) - 1  # a late round may still be trained
        if round_ < oldest:
            raise _file_gone(f"{FEATURES}{round_}")
        tidy(self._directory, f"{reader.part}-{reader.replica}-*", oldest)
        return IncomingFile(self._path(reader, round_), rounds_pb2.File(size=self._format.size))

    def wake_readers(self) -> None:
        """Wake the readers: features have arrived."""
        self._data_arrived.set()
        self._data_arrived = asyncio.Event()

    async def read(self, member: Member, name: str, offset: int) -> mmap.mmap:
        """Wait for a file that has data at `offset` or ends there; returns it. Raises StatusError."""
        place, number = member.place, name.removeprefix(FEATURES)
        round_ = int(number) if number.isdecimal() and len(number) <= MAX_DIGITS else -1
        while True:
            arrived, size = self._data_arrived, size_of(self._path(place, round_))
            if size > offset or size == self._format.size:
                break
            # a place reads its open round or the previous one: else endless calls could wait, each for another round
            newest = self._ledger.round(self._parts[place.part]) if reads_features(self._config, place.part) else -1
            is_valid = self._members.at(place) is member and max(newest - 1, 0) <= round_ <= newest
            if not is_valid or self.is_missed(place, round_):
                raise _file_gone(name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), POLL_S)
        try:
            with self._path(place, round_).open("rb") as opened:
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            raise _file_gone(name) from None

    def _path(self, place: Place, round_: int) -> Path:
        return self._directory / f"{place.part}-{place.replica}-{round_}"


INCOMING = "incoming"
MAX_LOSSES = 16

OUTCOMES = {
    "accepted": rounds_pb2.OUTCOME_ACCEPTED,
    "duplicate": rounds_pb2.OUTCOME_DUPLICATE,
    "dropped": rounds_pb2.OUTCOME_REFUSED,
    "refused": rounds_pb2.OUTCOME_REFUSED,
}


class UpdateIntake:
    """Receives updates, one at a time per place."""

    def __init__(self, spec: RunSpec, ledger: Ledger, directory: Path) -> None:
        """:param directory: its folder `incoming` holds an update until the verdict."""
        self.spec, self.ledger, self.directory = spec, ledger, directory / INCOMING
        with file_errors(CheckpointError, f"cannot store updates in {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)

    def check(self, member: Member, submission: rounds_pb2.Submission) -> None:
        """Raise StatusError for a header that is impossible for this member's update."""
        part, rounds = self.spec.parts[member.place.part], self.spec.config.rounds
        try:
            check_name(submission.id, "submission id")
            codec = CODECS[rounds.up_codec(submission.round)]
            if submission.codec != codec.name:
                raise RequestError(f"updates of this round must be in {codec.name}, not {submission.codec[:20]!r}")
            checked(_file_of(submission))
            if submission.size != (size := codec.size(self.spec.shapes[part])):
                raise RequestError(f"an update of {part} must have {size} bytes as {codec.name}, not {submission.size}")
            if not 1 <= submission.steps <= rounds.steps_per_round:
                raise RequestError(f"an update must have 1 to {rounds.steps_per_round} steps, not {submission.steps}")
            # each machine of a site reads as many as a single worker
            if submission.sequences > submission.steps * self.spec.config.sequences * MAX_MACHINES:
                raise RequestError(f"{submission.steps} steps cannot read {submission.sequences} sequences")
            if submission.round >= self.spec.rounds or submission.base_version > submission.round:
                raise RequestError(
                    f"an update of round {submission.round} from version {submission.base_version} is impossible: "
                    f"this run has rounds 0 to {self.spec.rounds - 1}, each from a version up to its number"
                )
        except InputError as error:
            raise invalid(str(error)) from None
        _check_losses(submission.losses)

    def early_verdict(self, member: Member, submission: rounds_pb2.Submission) -> rounds_pb2.Verdict | None:
        """The verdict on a submission if it needs no payload, else None.

        :param submission: with a checked header.
        """
        part = self.spec.parts[member.place.part]
        if (version := self.ledger.version_with(part, submission.id, submission.worker)) is not None:
            return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_DUPLICATE, version=version)
        done, reason = member.finished, ""
        if self.ledger.round(part) >= self.spec.rounds:
            reason = f"{part} has finished its last round"
        elif submission.round <= done:  # a place counts once, whatever its workers' names
            reason = f"this place has already submitted round {done} of {part}"
        return rounds_pb2.Verdict(outcome=rounds_pb2.OUTCOME_REFUSED, reason=reason) if reason else None

    def begin(self, member: Member, submission: rounds_pb2.Submission) -> IncomingFile:
        """The file of an update, with the bytes received so far. Each place has one, which replaces an older one."""
        place = member.place
        return IncomingFile(self.directory / f"{place.part}-{place.replica}", _file_of(submission))

    def judge(
        self, part: str, submission: rounds_pb2.Submission, payload: bytes, now_s: float, voter: str
    ) -> rounds_pb2.Verdict:
        """Decode an update and get the ledger's verdict. Raises CheckpointError if the update cannot be stored."""
        try:
            codec = CODECS[self.spec.config.rounds.up_codec(submission.round)]
            delta = codec.decode(payload, self.spec.shapes[part])
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
            voter=voter,
        )
        verdict = self.ledger.accept(update, now_s)
        version = self.ledger.version_with(part, update.id, update.worker) or 0
        return rounds_pb2.Verdict(outcome=OUTCOMES[verdict.kind], reason=verdict.reason, version=version)


def check_beat(beat: rounds_pb2.BeatRequest) -> None:
    """Raise StatusError unless a worker's report of itself is fit to show."""
    _check_losses(beat.losses)
    for name in ("busy_seconds", "lived_seconds"):
        if not 0 <= getattr(beat, name) < math.inf:
            raise invalid(f"{name} must be a finite number of at least 0")


def _check_losses(losses: Mapping[str, float]) -> None:
    if len(losses) > MAX_LOSSES:
        raise invalid(f"{len(losses)} losses; report at most {MAX_LOSSES}")
    for name, value in losses.items():
        if not re.fullmatch(r"[a-z0-9_]{1,64}", name) or not math.isfinite(value):
            raise invalid("a loss must be a finite number with a name of letters, digits and underscores")


def _file_of(submission: rounds_pb2.Submission) -> rounds_pb2.File:
    return rounds_pb2.File(size=submission.size, sha256=submission.sha256)
