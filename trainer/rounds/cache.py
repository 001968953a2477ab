"""A worker's cache: the newest weights that it fetched of each part, and the features of its round."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from stages.errors import CheckpointError, CodecError, InputError, file_errors
from trainer.blocks.config import CodecName
from trainer.blocks.state import digest
from trainer.rounds.client import FileGoneError, RoundsClient
from trainer.rounds.codecs import CODECS, WHOLE, Shapes, Tensors, receive
from trainer.rounds.parts import FEATURES, FeatureFormat, Learner, reads_features, sends_features, tidy
from trainer.rounds.settings import WorkerSettings
from trainer.rounds.transfer import PIECE_BYTES, size_of
from trainer.v1 import rounds_pb2

INCOMING = "incoming"
FOLDER = "features"
POLL_S = 0.01  # pause between two checks for a step's features


@dataclass(frozen=True)
class CachedWeights:
    """The fetched weights of one part."""

    version: int
    tensors: Tensors = field(repr=False)


class WeightCache:
    """The newest version of each part, checked by its digest."""

    def __init__(
        self, client: RoundsClient, worker: str, lease: str, directory: Path, like: Mapping[str, Shapes]
    ) -> None:
        """:param directory: for incoming files; :param like: shapes of every part's tensors."""
        self.held: dict[str, CachedWeights] = {}
        self._client, self._worker, self._lease, self._incoming, self._like = client, worker, lease, directory, like

    def summary(self) -> list[rounds_pb2.Held]:
        return [rounds_pb2.Held(part=part, version=held.version) for part, held in self.held.items()]

    def fetch(self, offer: rounds_pb2.Weights, codec: CodecName) -> Tensors:
        """Fetch the offered version of a part; :param codec: of differences.

        Raises FileGoneError, ServiceError, LeaseLostError, Interrupted.
        """
        like, held = self._like[offer.part], self.held.get(offer.part)
        tensors = held.tensors if held else Tensors()
        try:
            if offer.whole:
                (file,) = offer.files
                tensors = CODECS[WHOLE].decode(self._file(file, CODECS[WHOLE].size(like)), like)
            elif held is None:
                raise CodecError("the coordinator sent differences to a version that is not here")
            else:
                for file in offer.files:
                    tensors = receive(tensors, self._file(file, CODECS[codec].size(like)), codec)
            if digest(tensors) != offer.digest:
                raise CodecError("its digest does not match the announced one")
        except (InputError, ValueError) as error:
            # fetch the whole part next time: the same difference to the same weights would fail for ever
            self.held.pop(offer.part, None)
            raise FileGoneError(f"version {offer.version} of {offer.part}: {error}") from None
        self.held[offer.part] = CachedWeights(offer.version, tensors)
        return tensors

    def _file(self, file: rounds_pb2.File, size: int) -> bytes:
        if file.size != size:
            raise CodecError(f"{file.name[:80]!r} has {file.size} bytes, not {size}")
        name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
        return self._client.fetch(file, self._worker, self._lease, self._incoming / name)


class FeatureClient:
    """Transfer of one round's features, those that a worker reads and those that it makes, each in one file."""

    # On disk, so that a worker killed in the middle of a round finds its features again.

    def __init__(
        self, client: RoundsClient, settings: WorkerSettings, place: rounds_pb2.JoinResponse, learner: Learner
    ) -> None:
        """:param learner: its part reads features from here and passes features on to here, if parts do so."""
        self._client, self._worker, self._place, self._directory = client, settings.name, place, settings.state / FOLDER
        config, neighbours = learner.config, learner.part.neighbours
        self._reads, self._makes = reads_features(config, place.part), sends_features(config, place.part)
        self._format, self._threads = FeatureFormat.of(config), ThreadPoolExecutor(4, "features")
        self._round, self._made = 0, 0  # the round, and the bytes made in it
        self._turn = object()  # replaced whenever a round begins or ends
        self._fetched = self._passed = Future[None]()
        self._changed = threading.Condition()
        if self._reads:
            neighbours.read = self._read
        if self._makes:
            neighbours.send = self._write

    def resumes(self, round_: int | None, steps: int) -> bool:
        """Resume a round of which `steps` steps are made; False if it cannot be trained to its end."""
        made = steps * self._format.step_bytes
        if round_ is None or (self._makes and size_of(self._path(round_, "made")) < made):
            return round_ is None
        self.begin(round_, made)
        return True

    def begin(self, round_: int, made: int = 0) -> None:
        """Start fetching and sending a round's features; :param made: bytes already made. Raises CheckpointError."""
        if not (self._reads or self._makes):
            return
        self.end()
        self._round, self._made, turn = round_, made, self._turn
        still_needed, size = (lambda: self._turn is turn), self._format.size
        tidy(self._directory, "*", round_)
        if self._reads:
            request, path = rounds_pb2.FetchRequest(name=f"{FEATURES}{round_}"), self._path(round_, "read")
            request.worker, request.lease = self._worker, self._place.lease
            self._fetched = self._threads.submit(self._client.fetch_features, request, size, path, still_needed)
        if self._makes:
            passing = rounds_pb2.Passing(worker=self._worker, lease=self._place.lease, round=round_)
            read = partial(self._made_from, turn)
            self._passed = self._threads.submit(self._client.pass_features, passing, size, read, still_needed)

    def is_there(self, step: int) -> bool:
        """True if a step's features have arrived; else waits a moment. Raises the error that ended the transfer."""
        if not self._reads or size_of(self._path(self._round, "read")) >= self._end(step):
            return True
        if self._fetched.done():
            self._fetched.result()
        time.sleep(POLL_S)
        return False

    def settle(self) -> None:
        """Wait until the coordinator has all features made in the round. Raises the error that ended the transfer."""
        if self._makes:
            with contextlib.suppress(FileGoneError):  # the next part no longer wants them
                self._passed.result()

    def end(self) -> None:
        """Stop fetching and sending."""
        with self._changed:
            self._turn = object()
            self._changed.notify_all()

    def _read(self, step: int) -> Tensor:
        """A step's features, (sequences, positions, width) float32. Raises CheckpointError, CodecError."""
        size, path = self._format.step_bytes, self._path(self._round, "read")
        with file_errors(CheckpointError, f"cannot read {path}"), path.open("rb") as file:
            file.seek(self._end(step) - size)
            return self._format.decode(file.read(size))

    def _write(self, step: int, made: Tensor) -> None:
        payload, end, path = self._format.encode(made), self._end(step), self._path(self._round, "made")
        with (
            file_errors(CheckpointError, f"cannot write {path}", "free some space"),
            path.open("r+b" if path.exists() else "wb") as file,
        ):
            file.seek(end - len(payload))
            file.write(payload)
        with self._changed:
            self._made = end
            self._changed.notify_all()

    def _made_from(self, turn: object, offset: int) -> bytes:
        """Wait for a piece of the features made; empty once they are no longer sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._made > offset or self._turn is not turn)
            if self._turn is not turn:
                return b""
            ready, path = min(self._made - offset, PIECE_BYTES), self._path(self._round, "made")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(ready)
        except OSError:  # removed by the next round meanwhile
            return b""

    def _end(self, step: int) -> int:
        """End of a step's features in the file of its round."""
        return (step - self._round * self._format.steps + 1) * self._format.step_bytes

    def _path(self, round_: int, what: str) -> Path:
        # the name includes the place: a worker that gets another place must not train on this one's features
        return self._directory / f"{self._place.part}-{self._place.replica}-{what}-{round_}"
