"""Files that workers fetch from a coordinator: weights of fragments, and features that one worker makes for another."""

import asyncio
import contextlib
import mmap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from stages.wire.status import StatusError, invalid
from trainer.blocks.config import CodecName
from trainer.blocks.state import digest
from trainer.rounds.codecs import CODECS, WHOLE, Tensors, route
from trainer.rounds.features import FEATURES, FeatureFormat, is_fed, passes_on, tidy
from trainer.rounds.ledger import KEPT_VERSIONS, Ledger
from trainer.rounds.members import Member, Members, Place
from trainer.rounds.spec import RunSpec
from trainer.rounds.transfer import IncomingFile, Parcel, size_of
from trainer.v1 import rounds_pb2

# Files of a fragment, by kind: a worker that fetches a version while the next one is made can finish.
KEPT = {"whole": 2, "difference": KEPT_VERSIONS}
FOLDER = "features"
LOOK_S = 1.0  # between two looks at who makes the features that a worker waits for
MOST_DIGITS = 18  # of a round


class WeightServer:
    """The newest weights of each fragment, whole or as differences, in files made when they are first asked for.

    Their names last for a while. For one thread at a time.
    """

    def __init__(self, ledger: Ledger, codec: CodecName) -> None:
        """:param codec: of differences."""
        self.ledger, self.codec = ledger, codec
        self._files: dict[tuple[str, int, str], tuple[bytes, Parcel]] = {}
        self._digests: dict[tuple[str, int], str] = {}

    def weights(self, fragment: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """The newest version of a fragment, for a worker that holds some version of it, or none."""
        version, weights = self.ledger.round(fragment), self.ledger.weights(fragment)
        offered = rounds_pb2.Weights(part=fragment, version=version, digest=self._digest(fragment, version, weights))
        if held is not None and held.version == version:
            return offered
        difference = partial(self._difference, fragment)
        differences = route(held.version if held else None, version, difference, weights)
        offered.whole = not differences
        offered.codec = self.codec if differences else WHOLE
        for number, data in differences.items():
            offered.files.append(self._file(fragment, number, "difference", partial(bytes, data)))
        if offered.whole:
            encode = partial(CODECS[WHOLE].encode, weights)
            offered.files.append(self._file(fragment, version, "whole", encode))
        self._drop_old(fragment, version)
        return offered

    def read(self, name: str) -> bytes:
        """The file of this name. Raises Refusal."""
        for key, (data, _) in list(self._files.items()):  # orders are made on another thread
            if name == _name(*key):
                return data
        raise _gone(name)

    def _difference(self, fragment: str, number: int) -> bytes | None:
        """Read from the disk once, for any number of workers."""
        key = fragment, number, "difference"
        if key not in self._files:
            if not (data := self.ledger.difference(fragment, number)):
                return None
            self._files[key] = data, Parcel.of(data)
        return self._files[key][0]

    def _file(self, fragment: str, number: int, kind: str, make: Callable[[], bytes]) -> rounds_pb2.File:
        key = fragment, number, kind
        if key not in self._files:
            data = make()
            self._files[key] = data, Parcel.of(data)
        parcel = self._files[key][1]
        return rounds_pb2.File(name=_name(*key), size=parcel.size, sha256=parcel.sha256)

    def _digest(self, fragment: str, number: int, weights: Tensors) -> str:
        key = fragment, number
        if key not in self._digests:
            self._digests[key] = digest(weights)
        return self._digests[key]

    def _drop_old(self, fragment: str, newest: int) -> None:
        for key in [key for key in self._files if key[0] == fragment and key[1] <= newest - KEPT[key[2]]]:
            del self._files[key]
        for old in [key for key in self._digests if key[0] == fragment and key[1] < newest]:
            del self._digests[old]


def _name(fragment: str, number: int, kind: str) -> str:
    return f"{fragment}-{number}-{kind}"


def _gone(name: str) -> StatusError:
    return StatusError(grpc.StatusCode.NOT_FOUND, f"there is no file {name[:80]!r} any more: ask for the next order")


class FeatureRelay:
    """Features on their way between the workers of a replica, in one file a round. For the event loop."""

    # They pass through the coordinator, because workers only dial, and through its disk, because either end may be
    # killed in the middle of a round and come again.

    def __init__(self, spec: RunSpec, ledger: Ledger, members: Members, directory: Path) -> None:
        self._config, self._parts, self._ledger, self._members = spec.config, spec.parts, ledger, members
        self._format, self._directory = FeatureFormat.of(spec.config), directory / FOLDER
        self._grew = asyncio.Event()

    def may_begin(self, place: Place, round_: int) -> bool:
        """True if the worker at a place need not wait for those of other parts."""
        # Every part goes through a round with the others' weights of one version, on machines of any speed; and no more
        # than a round is on its way.
        if not self._config.rounds.by_features:
            return True
        later = self._parts[place.part + 1 :]
        return all(self._ledger.round(part) >= round_ for part in later) and not self.is_missed(place, round_)

    def is_missed(self, place: Place, round_: int) -> bool:
        """True if nobody will make what a place reads in a round, which is closed for the part before."""
        if not is_fed(self._config, place.part) or self._ledger.round(self._parts[place.part - 1]) <= round_:
            return False
        if size_of(self._path(place, round_)) == self._format.size:
            return False
        maker = self._members.at(Place(place.part - 1, place.replica))
        return maker is None or maker.beat.round != round_ or not self._members.is_here(maker, time.monotonic())

    def begin(self, place: Place, round_: int) -> IncomingFile:
        """The file for what the worker at a place makes in a round. Raises Refusal, CheckpointError."""
        if not passes_on(self._config, place.part) or round_ > self._ledger.round(self._parts[place.part]):
            raise invalid(f"nobody reads what {self._parts[place.part]} makes in round {round_}")
        reader = Place(place.part + 1, place.replica)
        oldest = self._ledger.round(self._parts[reader.part]) - 1  # one that is late may still be trained
        if round_ < oldest:
            raise _gone(f"{FEATURES}{round_}")
        tidy(self._directory, f"{reader.part}-{reader.replica}-*", oldest)
        return IncomingFile(self._path(reader, round_), Parcel(self._format.size, b""))

    def grew(self) -> None:
        """Some features came."""
        self._grew.set()
        self._grew = asyncio.Event()

    async def read(self, member: Member, name: str, offset: int) -> mmap.mmap:
        """A file that has something at `offset`, or ends there; waits for it. Raises Refusal."""
        place, number = member.place, name.removeprefix(FEATURES)
        round_ = int(number) if number.isdecimal() and len(number) <= MOST_DIGITS else -1
        while True:
            grew, size = self._grew, size_of(self._path(place, round_))
            if size > offset or size == self._format.size:
                break
            # a place reads its open round, or the one before: else calls without end could wait, each for another round
            newest = self._ledger.round(self._parts[place.part]) if is_fed(self._config, place.part) else -1
            asked = self._members.at(place) is member and max(newest - 1, 0) <= round_ <= newest
            if not asked or self.is_missed(place, round_):
                raise _gone(name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(grew.wait(), LOOK_S)
        try:
            with self._path(place, round_).open("rb") as opened:
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            raise _gone(name) from None

    def _path(self, place: Place, round_: int) -> Path:
        return self._directory / f"{place.part}-{place.replica}-{round_}"
