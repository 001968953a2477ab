"""A worker's cache: the newest weights of each fragment that it has fetched, and the features of its round."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from onesweep.stages.errors import CheckpointError, CodecError, InputError, ServiceError
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.round_settings import CodecName
from onesweep.trainer.blocks.state import digest
from onesweep.trainer.rounds.client import FileGoneError, RoundsClient
from onesweep.trainer.rounds.codecs import WHOLE, Shapes, Tensors, codec_named, receive
from onesweep.trainer.rounds.features import FeatureFormat
from onesweep.trainer.rounds.parts import FedPart, PartTask
from onesweep.trainer.rounds.transfer import Parcel
from onesweep.trainer.v1 import rounds_pb2

INCOMING = "incoming"
FOLDER = "features"


@dataclass(frozen=True)
class CachedWeights:
    """One fragment as it was fetched."""

    version: int
    digest: str
    tensors: Tensors = field(repr=False)


class WeightCache:
    """The newest version of each fragment, checked by its digest."""

    def __init__(
        self, client: RoundsClient, worker: str, lease: str, directory: Path, like: Mapping[str, Shapes]
    ) -> None:
        """:param directory: for files while they come in; :param like: shapes of every fragment's tensors."""
        self.held: dict[str, CachedWeights] = {}
        self._client, self._worker, self._lease, self._like = client, worker, lease, like
        self._incoming = directory / INCOMING
        self._incoming.mkdir(exist_ok=True)

    def summary(self) -> list[rounds_pb2.Held]:
        return [
            rounds_pb2.Held(part=part, version=held.version, digest=held.digest) for part, held in self.held.items()
        ]

    def fetch(self, wanted: rounds_pb2.Weights, codec: CodecName) -> Tensors:
        """The version that is offered of a fragment; :param codec: of differences.

        Raises FileGoneError, ServiceError, LeaseLostError, Interrupted.
        """
        like, held = self._like[wanted.part], self.held.get(wanted.part)
        tensors = held.tensors if held else Tensors()
        try:
            if wanted.whole:
                (file,) = wanted.files
                tensors = codec_named(WHOLE).decode(self._file(file, codec_named(WHOLE).size(like)), like)
            elif held is None:
                raise CodecError("it is sent as differences to what is not here")
            else:
                for file in wanted.files:
                    tensors = receive(tensors, self._file(file, codec_named(codec).size(like)), codec)
            if digest(tensors) != wanted.digest:
                raise CodecError("it does not have the digest that was told")
        except (InputError, ValueError) as error:
            # fetched whole the next time: the same difference to the same weights would fail for ever
            self.held.pop(wanted.part, None)
            raise FileGoneError(f"version {wanted.version} of {wanted.part}: {error}") from None
        self.held[wanted.part] = CachedWeights(wanted.version, wanted.digest, tensors)
        return tensors

    def _file(self, file: rounds_pb2.File, size: int) -> bytes:
        if file.size != size:
            raise CodecError(f"{file.name[:80]!r} has {file.size} bytes, not {size}")
        name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
        return self._client.fetch(file, self._worker, self._lease, self._incoming / name)


class FeatureClient:
    """Features for a part that reads them: fetched with a round's order, on the disk until the next one."""

    # They are as large as the text is long and a step needs a small piece of them; and a worker that is stopped in the
    # middle of a round must find the features it began with, for newer ones would be of other weights.

    def __init__(
        self,
        client: RoundsClient,
        worker: str,
        place: rounds_pb2.JoinResponse,
        directory: Path,
        part: PartTask,
        config: TrainingConfig,
    ) -> None:
        """:param directory: of the worker's state; :param part: needs no features if it has copies or reads bytes."""
        self._part = part if isinstance(part, FedPart) else None
        self._client, self._worker, self._place, self._directory = client, worker, place, directory
        self._format = FeatureFormat.of(config)

    def resumes(self, round_: int | None) -> bool:
        """True if the rest of a round can be trained with the features it began with."""
        if self._part is None or round_ is None:
            return True
        path = self._path(round_)
        if not path.exists() or path.stat().st_size != self._format.size:
            return False
        self._part.feed = StepFeatures(path, self._format, round_)
        return True

    def take(self, order: rounds_pb2.Order) -> None:
        """Fetch the features of a round. Raises ServiceError, FileGoneError, LeaseLostError, Interrupted."""
        if order.HasField("features") != (self._part is not None):
            raise ServiceError(f"{self._client.address} does not send what is read in a round: it is damaged")
        if self._part is None:
            return
        file, path = order.features, self._path(order.round)
        if file.size != self._format.size:
            raise ServiceError(
                f"{self._client.address} has {file.size} bytes of features for a round, not {self._format.size}: "
                "it is damaged"
            )
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or Parcel.at(path) != Parcel(file.size, file.sha256):
            for old in path.parent.iterdir():
                old.unlink()
            incoming = self._directory / INCOMING / FOLDER
            self._client.fetch_into(file, self._worker, self._place.lease, incoming, path)
        self._part.feed = StepFeatures(path, self._format, order.round)

    def _path(self, round_: int) -> Path:
        # the place is in the name: a worker that gets another one must not train on this one's features
        return self._directory / FOLDER / f"{self._place.part}-{self._place.replica}-{round_}"


class StepFeatures:
    """Features of a round's steps, read from its file one step at a time."""

    def __init__(self, path: Path, form: FeatureFormat, round_: int) -> None:
        self._path, self._format, self._first = path, form, round_ * form.steps

    def __call__(self, step: int) -> Tensor:
        """(sequences, positions, width) float32. Raises CheckpointError, CodecError."""
        size = self._format.step_bytes
        try:
            with self._path.open("rb") as file:
                file.seek((step - self._first) * size)
                return self._format.decode(file.read(size))
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from None
