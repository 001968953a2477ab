"""A worker's side of features: those of a round are fetched with its order, and lie on the disk until the next one."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stages.errors import CheckpointError, ServiceError
from trainer.config import TrainingConfig
from trainer.rounds.client import Link
from trainer.rounds.feature_format import FeatureFormat
from trainer.rounds.holdings import INCOMING
from trainer.rounds.parts import FedPart, Part
from trainer.rounds.transfer import Parcel
from trainer.v1 import rounds_pb2

FOLDER = "features"


class Feed:
    """What a part reads; of one that reads bytes or has copies, nothing."""

    def __init__(
        self,
        link: Link,
        worker: str,
        place: rounds_pb2.JoinResponse,
        directory: Path,
        part: Part,
        config: TrainingConfig,
    ) -> None:
        """:param directory: of the worker's state; :param config: of the run."""
        self._part = part if isinstance(part, FedPart) else None
        self._link, self._worker, self._place, self._directory = link, worker, place, directory
        self._format = FeatureFormat.of(config)

    def resumes(self, round_: int | None) -> bool:
        """Whether the rest of a round can be trained on what it began with."""
        if self._part is None or round_ is None:
            return True
        path = self._path(round_)
        if not path.exists() or path.stat().st_size != self._format.size:
            return False
        self._part.feed(StepsOf(path, self._format, round_))
        return True

    def take(self, order: rounds_pb2.Order) -> None:
        """Fetch what a round is trained with. Raises ServiceError, FileGoneError, LeaseLostError, Interrupted."""
        if order.HasField("features") != (self._part is not None):
            raise ServiceError(f"{self._link.address} does not send what is read in a round: it is damaged")
        if self._part is None:
            return
        file, path = order.features, self._path(order.round)
        if file.size != self._format.size:
            raise ServiceError(
                f"{self._link.address} has {file.size} bytes of features for a round, not {self._format.size}: "
                "it is damaged"
            )
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or Parcel.at(path) != Parcel(file.size, file.sha256):
            for old in path.parent.iterdir():
                old.unlink()
            incoming = self._directory / INCOMING / FOLDER
            self._link.fetch_into(file, self._worker, self._place.lease, incoming, path)
        self._part.feed(StepsOf(path, self._format, order.round))

    def _path(self, round_: int) -> Path:
        # who gets another place must not train on what was made for this one
        return self._directory / FOLDER / f"{self._place.part}-{self._place.replica}-{round_}"


class StepsOf:
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
