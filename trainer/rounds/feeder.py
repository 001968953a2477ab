"""A coordinator's side of features: it makes what later blocks read in a round, place by place, into files.

Not on its event loop, on a thread that gives way to merges, for one place at a time; in memory are the features of one
local step, and on the disk those of one round of each place.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable
from pathlib import Path

from stages.aside import giving_way, to_its_end
from stages.checkpoint import replace_file
from stages.errors import CheckpointError, Interrupted
from trainer.data import Corpus
from trainer.rounds.feature_format import is_fed
from trainer.rounds.feature_reader import FeatureReader, names_before
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Place
from trainer.rounds.plan import RunPlan
from trainer.rounds.shards import replica_seed
from trainer.rounds.tensors import Tensors
from trainer.rounds.transfer import Parcel
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

FOLDER = "features"
RETRY_S = 2.0
"""Between two tries to write what the disk did not take."""


class Feeder:
    """All methods but those with an underscore are for the event loop."""

    def __init__(
        self,
        plan: RunPlan,
        corpus: Corpus,
        ledger: Ledger,
        lock: asyncio.Lock,
        directory: Path,
        tell: Callable[[], None],
    ) -> None:
        """:param lock: of the ledger; :param tell: called when something was made."""
        self.problem = ""
        self._plan, self._corpus, self._ledger, self._lock, self._tell = plan, corpus, ledger, lock, tell
        self._directory = directory / FOLDER
        self._reader: FeatureReader | None = None
        self._made: dict[Place, tuple[int, rounds_pb2.File]] = {}
        """The newest of each place, and its round."""
        self._wanted: dict[Place, int] = {}
        """Rounds, in the order in which they were asked for."""
        self._making: asyncio.Task[None] | None = None
        self._stopping = False

    def is_ready(self, place: Place, round_: int) -> bool:
        """Whether who has the place can begin the round; what is missing is going to be made."""
        if not is_fed(self._plan.config, place.part):
            return True
        if place in self._made and self._made[place][0] == round_:
            return True
        self._wanted[place] = round_
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return False

    def file(self, place: Place, round_: int) -> rounds_pb2.File | None:
        """What is to be fetched for a round that is ready; None where nothing is needed."""
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
        """End what is being made; it is made again when it is asked for."""
        self._stopping = True
        if self._making is not None:
            await to_its_end(self._making)

    async def _make(self) -> None:
        while self._wanted and not self._stopping:
            place, round_ = next(iter(self._wanted.items()))
            async with self._lock:
                weights = {part: self._ledger.weights(part) for part in names_before(place.part)}
            try:
                parcel = await giving_way(lambda: self._write(place, round_, weights))  # noqa: B023 - awaited here
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
            self._tell()

    def _write(self, place: Place, round_: int, weights: dict[str, Tensors]) -> Parcel:
        """What is there already, of this coordinator or the one before, is not made again."""
        self._directory.mkdir(exist_ok=True)
        path = self._path(place, round_)
        if not path.exists():
            if self._reader is None:
                self._reader = FeatureReader(self._plan.frame, self._corpus)
            self._reader.take(weights)
            replace_file(path, lambda temporary: self._write_steps(temporary, place, round_))
        for other in self._directory.glob(f"{place.part}-{place.replica}-*"):
            if other != path:
                other.unlink(missing_ok=True)
        return Parcel.at(path)

    def _write_steps(self, path: Path, place: Place, round_: int) -> None:
        assert self._reader is not None
        seed, steps = replica_seed(self._plan.config.seed, place.replica), self._plan.config.rounds.steps_per_round
        with path.open("wb") as file:
            for step in range(round_ * steps, (round_ + 1) * steps):
                if self._stopping:
                    raise Interrupted("stopped: the features of this round are made when they are asked for again")
                file.write(self._reader.payload(place.part, seed, step))

    def _path(self, place: Place, round_: int) -> Path:
        return self._directory / f"{place.part}-{place.replica}-{round_}"
