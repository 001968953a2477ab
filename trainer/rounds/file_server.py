"""Files that workers fetch from a coordinator: weights of fragments, and features of rounds."""

import asyncio
import logging
import mmap
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from onesweep.stages.checkpoint.checkpoint import replace_file
from onesweep.stages.errors import CheckpointError, Interrupted
from onesweep.stages.threads import in_low_priority_thread, to_its_end
from onesweep.stages.wire.status import StatusError
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.blocks.round_settings import CodecName, RoundSettings
from onesweep.trainer.blocks.state import digest
from onesweep.trainer.rounds.codecs import WHOLE, Tensors, codec_named, publish, route, whole_size
from onesweep.trainer.rounds.features import FeatureReader, is_fed, names_before
from onesweep.trainer.rounds.ledger import KEPT_VERSIONS, Ledger
from onesweep.trainer.rounds.members import Place
from onesweep.trainer.rounds.spec import RunSpec, replica_seed
from onesweep.trainer.rounds.transfer import Parcel
from onesweep.trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

# Files of a line, by kind: a worker that fetches a version while the next one is made can finish.
KEPT = {"whole": 2, "difference": KEPT_VERSIONS}
FOLDER = "features"
RETRY_S = 2.0  # between two tries to write what the disk did not take


class CopyLine:
    """One fragment as workers of other parts have it: a line of versions of its own, refreshed now and then."""

    # The rounded difference to the copy before travels, so that what one refresh rounds away is in the next.

    def __init__(self, settings: RoundSettings, version: int, weights: Tensors) -> None:
        """:param version, weights: with which the line begins."""
        self.settings = settings
        # Number of refreshes, version of the last one, and the copy.
        self.number, self.version, self.tensors = 0, version, weights
        # To the last few copies from those before, by number; none in `fp32`, where a copy travels whole.
        self.differences: dict[int, bytes] = {}

    def follow(self, version: int, weights: Tensors) -> None:
        """Refresh the copy from the newest version, if it is old enough."""
        if version - self.version < self.settings.copies_every:
            return
        self.tensors, difference = publish(weights, self.tensors, self.settings.copies_codec)
        self.number, self.version = self.number + 1, version
        if difference:
            self.differences[self.number] = difference
            self.differences.pop(self.number - KEPT_VERSIONS, None)

    def size(self, held: int | None) -> int:
        """Bytes from the copy of this number (None: no copy) to the newest."""
        if held == self.number:
            return 0
        differences = route(held, self.number, self.differences.get, self.tensors)
        return sum(map(len, differences.values())) or whole_size(self.tensors)


@dataclass(frozen=True)
class Edition:
    """The newest of a line of versions."""

    line: str
    fragment: str
    number: int
    weights: Tensors = field(repr=False)
    codec: CodecName  # of the differences
    difference: Callable[[int], bytes | None] = field(repr=False)  # from the number before to this one


class WeightServer:
    """The newest weights of each fragment, whole or as differences, in files made when they are first asked for.

    Their names last for a while. For one thread at a time.
    """

    def __init__(self, ledger: Ledger, settings: RoundSettings) -> None:
        self.ledger, self.settings = ledger, settings
        self._files: dict[tuple[str, int, str], tuple[bytes, Parcel]] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._copies: dict[str, CopyLine] = {}
        # copies are kept in memory only: after a restart, numbers on their lines mean something else
        self._copy = f"copy-{secrets.token_hex(4)}"

    def weights(self, fragment: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """The newest version of a fragment, for a worker that trains it and holds some version."""
        version, difference = self.ledger.round(fragment), partial(self.ledger.difference, fragment)
        codec, weights = self.settings.down_codec, self.ledger.weights(fragment)
        edition = Edition(fragment, fragment, version, weights, codec, difference)
        return self._offered(edition, held.version if held else None)

    def copy(self, fragment: str, held: rounds_pb2.Held | None) -> rounds_pb2.Weights:
        """The newest copy of a fragment, for a worker of another part."""
        version, weights = self.ledger.round(fragment), self.ledger.weights(fragment)
        copy = self._copies.setdefault(fragment, CopyLine(self.settings, version, weights))
        copy.follow(version, weights)
        line, codec = f"{fragment}-{self._copy}", self.settings.copies_codec
        known = held is not None and self._digests.get((line, held.version)) == held.digest
        edition = Edition(line, fragment, copy.number, copy.tensors, codec, copy.differences.get)
        return self._offered(edition, held.version if held is not None and known else None)

    def read(self, name: str) -> bytes:
        """The file of this name. Raises Refusal."""
        for key, (data, _) in list(self._files.items()):  # orders are made on another thread
            if name == _name(*key):
                return data
        raise StatusError(grpc.StatusCode.NOT_FOUND, f"there is no file {name[:80]!r} any more: ask for the next order")

    def _offered(self, edition: Edition, held: int | None) -> rounds_pb2.Weights:
        offered = rounds_pb2.Weights(part=edition.fragment, version=edition.number, digest=self._digest(edition))
        if held == edition.number:
            return offered
        differences = route(held, edition.number, partial(self._difference, edition), edition.weights)
        offered.whole = not differences
        offered.codec = edition.codec if differences else WHOLE
        for number, data in differences.items():
            offered.files.append(self._file(edition.line, number, "difference", partial(bytes, data)))
        if offered.whole:
            encode = partial(codec_named(WHOLE).encode, edition.weights)
            offered.files.append(self._file(edition.line, edition.number, "whole", encode))
        self._drop_old(edition)
        return offered

    def _difference(self, edition: Edition, number: int) -> bytes | None:
        """Read from the disk once, for any number of workers."""
        key = edition.line, number, "difference"
        if key not in self._files:
            if not (data := edition.difference(number)):
                return None
            self._files[key] = data, Parcel.of(data)
        return self._files[key][0]

    def _file(self, line: str, number: int, kind: str, make: Callable[[], bytes]) -> rounds_pb2.File:
        key = line, number, kind
        if key not in self._files:
            data = make()
            self._files[key] = data, Parcel.of(data)
        parcel = self._files[key][1]
        return rounds_pb2.File(name=_name(*key), size=parcel.size, sha256=parcel.sha256)

    def _digest(self, edition: Edition) -> str:
        key = edition.line, edition.number
        if key not in self._digests:
            self._digests[key] = digest(edition.weights)
        return self._digests[key]

    def _drop_old(self, edition: Edition) -> None:
        line, newest = edition.line, edition.number
        for key in [key for key in self._files if key[0] == line and key[1] <= newest - KEPT[key[2]]]:
            del self._files[key]
        for old in [key for key in self._digests if key[0] == line and key[1] < newest - KEPT_VERSIONS]:
            del self._digests[old]


def _name(line: str, number: int, kind: str) -> str:
    return f"{line}-{number}-{kind}"


class FeatureServer:
    """Makes the features that later blocks read in a round, place by place, into files.

    On a thread that gives way to merges, for one place at a time; in memory are the features of one local step, and on
    the disk those of one round of each place. Methods without an underscore are for the event loop.
    """

    # The coordinator makes them, not the workers of the blocks before: those would have to be there, fast and trusted,
    # and have the text of others. The coordinator has all that is needed, and what it makes is a function of versions,
    # seed, replica and round. They are made when a round is asked for: made ahead they would be of older versions, and
    # of rounds that are never trained.

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        ledger: Ledger,
        lock: asyncio.Lock,
        directory: Path,
        notify: Callable[[], None],
        reader: type[FeatureReader] = FeatureReader,
    ) -> None:
        """:param lock: of the ledger; :param notify: called when something was made."""
        self.problem = ""
        self._spec, self._corpus, self._ledger, self._lock, self._notify = spec, corpus, ledger, lock, notify
        self._directory = directory / FOLDER
        self._reader_type = reader
        self._reader: FeatureReader | None = None
        # The newest of each place, and its round.
        self._made: dict[Place, tuple[int, rounds_pb2.File]] = {}
        # Rounds, in the order in which they were asked for.
        self._wanted: dict[Place, int] = {}
        self._making: asyncio.Task[None] | None = None
        self._stopping = False

    def is_ready(self, place: Place, round_: int) -> bool:
        """True if the worker at a place can begin the round; missing features are then made."""
        if not is_fed(self._spec.config, place.part):
            return True
        if place in self._made and self._made[place][0] == round_:
            return True
        self._wanted[place] = round_
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return False

    def file(self, place: Place, round_: int) -> rounds_pb2.File | None:
        """The file to fetch for a round that is ready; None where it needs none."""
        made, file = self._made.get(place, (-1, None))
        return file if made == round_ else None

    def read(self, name: str) -> mmap.mmap | None:
        """The file of this name, without reading it; None where there is none."""
        for place, (round_, file) in self._made.items():
            if file.name == name:
                try:
                    with self._path(place, round_).open("rb") as opened:
                        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    log.error("%s is gone, and is made again: %s", name, error)
                    del self._made[place]
                    break
        return None

    async def close(self) -> None:
        """Stop making features; they are made again when they are asked for."""
        self._stopping = True
        if self._making is not None:
            await to_its_end(self._making)

    async def _make(self) -> None:
        while self._wanted and not self._stopping:
            place, round_ = next(iter(self._wanted.items()))
            async with self._lock:
                weights = {part: self._ledger.weights(part) for part in names_before(place.part)}
            try:
                parcel = await in_low_priority_thread(lambda: self._write(place, round_, weights))  # noqa: B023 - awaited here
            except (CheckpointError, OSError) as error:
                if self.problem != str(error):
                    log.error("%s", error)
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
            except Interrupted:
                return
            else:
                self.problem = ""
                name = f"{FOLDER}-{self._path(place, round_).name}"
                self._made[place] = round_, rounds_pb2.File(name=name, size=parcel.size, sha256=parcel.sha256)
            if self._wanted.get(place) == round_:
                del self._wanted[place]
            self._notify()

    def _write(self, place: Place, round_: int, weights: dict[str, Tensors]) -> Parcel:
        """Made once, also where the coordinator before this one made it."""
        self._directory.mkdir(exist_ok=True)
        path = self._path(place, round_)
        if not path.exists():
            if self._reader is None:
                self._reader = self._reader_type(self._spec.config, self._spec.codes, self._corpus)
            self._reader.take(weights)
            replace_file(path, lambda temporary: self._write_steps(temporary, place, round_))
        for other in self._directory.glob(f"{place.part}-{place.replica}-*"):
            if other != path:
                other.unlink(missing_ok=True)
        return Parcel.at(path)

    def _write_steps(self, path: Path, place: Place, round_: int) -> None:
        assert self._reader is not None
        seed, steps = replica_seed(self._spec.config.seed, place.replica), self._spec.config.rounds.steps_per_round
        with path.open("wb") as file:
            for step in range(round_ * steps, (round_ + 1) * steps):
                if self._stopping:
                    raise Interrupted("stopped: the features of this round are made when they are asked for again")
                file.write(self._reader.payload(place.part, seed, step))

    def _path(self, place: Place, round_: int) -> Path:
        return self._directory / f"{place.part}-{place.replica}-{round_}"
