"""Memory of real worker processes, with a coordinator of their own over loopback."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from onesweep.stages.errors import ConfigError, Interrupted, ServiceError
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus, load_corpus
from onesweep.trainer.rounds.client import RoundsClient
from onesweep.trainer.rounds.parts import Learner
from onesweep.trainer.rounds.processes import PRELOADED
from onesweep.trainer.rounds.server import coordinate
from onesweep.trainer.rounds.settings import CoordinatorSettings, WorkerSettings
from onesweep.trainer.rounds.spec import RunSpec
from onesweep.trainer.rounds.worker import work

# Enough for everything that is ever held: optimizer state, an update, a version that replaces another.
ROUNDS, STEPS = 2, 2
STATUS = Path("/proc/self/status")
END_S = 30.0
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Footprint:
    """Bytes of a process that are in memory, as the kernel counts them."""

    part: int
    before: int  # with its text and all of the program that training uses, but nothing of the model
    peak: int

    @property
    def held(self) -> int:
        """Bytes of the model, at most."""
        return self.peak - self.before

    def to_record(self) -> dict[str, int]:
        return {**asdict(self), "held": self.held}


def measure_workers(config: TrainingConfig, data: Path | None, blocks: Sequence[int]) -> dict[int, list[Footprint]]:
    """Workers of the same layers in one block (end to end) and in so many: of the last block, or of all that pass
    features on.

    Raises ConfigError where the layers cannot be cut so, ServiceError where a process does not come to its end.
    """
    layers = config.architecture.parts * config.architecture.layers
    for count in blocks:
        if count < 1 or layers % count:
            raise ConfigError(f"{layers} layers cannot be cut into {count} equal blocks")
    if not STATUS.exists():
        raise ConfigError("the memory of a process is read from /proc: this takes Linux")
    found = {}
    for count in sorted({1, *blocks}):
        cut = replace(config.architecture, parts=count, layers=layers // count)
        found[count] = measure(replace(config, architecture=cut), data)
    return found


def measure(config: TrainingConfig, data: Path | None) -> list[Footprint]:
    """A worker of the last part, or one of each part where they pass features on, for a few rounds.

    Raises ServiceError.
    """
    settings = replace(config.rounds, replicas=1, rounds=ROUNDS, steps_per_round=max(STEPS, config.rounds.fragments))
    config = replace(config, rounds=settings)
    # who is measured has imported everything itself; the coordinator may be forked from who has
    forked, processes = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    forked.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        told, tells = processes.Pipe(duplex=False)
        coordinator = forked.Process(target=_coordinate, args=(config, data, Path(directory), tells))
        coordinator.start()
        tells.close()
        try:
            port = _receive(told, "the coordinator")
            last, started = config.architecture.parts - 1, list[tuple[BaseProcess, Connection]]()
            for part in range(0 if settings.by_features else last, last + 1):
                (heard, says), state = processes.Pipe(duplex=False), Path(directory) / f"state-{part}"
                worker = processes.Process(target=_work, args=(config, data, f"127.0.0.1:{port}", state, part, says))
                worker.start()
                started.append((worker, heard))
                says.close()
            found = [_receive(heard, "the worker") for _, heard in started]
            for process, _ in started:
                process.join()
        finally:
            coordinator.terminate()
            coordinator.join(END_S)
            coordinator.kill()
    return found


def _coordinate(config: TrainingConfig, data: Path | None, directory: Path, port: Connection) -> None:
    with suppress(Interrupted):
        coordinate(config, load_corpus(data), CoordinatorSettings("127.0.0.1:0", directory / "out"), port.send)


def _work(config: TrainingConfig, data: Path | None, address: str, state: Path, part: int, answer: Connection) -> None:
    corpus, link = load_corpus(data), RoundsClient(address, patience_s=PATIENCE_S)
    _train_small(config, corpus)
    before = _resident("VmRSS")
    work(link, corpus, WorkerSettings(f"measured-{part}", state, part))
    link.close()
    answer.send(Footprint(part, before, _resident("VmHWM")))


def _train_small(config: TrainingConfig, corpus: Corpus) -> None:
    """Have all of the program loaded that training uses, which is the same for every size."""
    small = replace(config.architecture, parts=1, layers=1, width=8, heads=1, context_length=8)
    config = replace(config, architecture=small, rounds=replace(config.rounds, context_by="copies"))
    Learner(RunSpec.of(config, corpus).task(0, corpus, config.seed), config).train(0, 1)


def _resident(name: str) -> int:
    """Bytes that this process has in memory (VmRSS), or had at most (VmHWM)."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ServiceError(f"{STATUS} does not tell {name}")


def _receive(pipe: Connection, who: str) -> Any:  # noqa: ANN401 - whatever was sent
    try:
        return pipe.recv()
    except EOFError:
        raise ServiceError(f"{who} that was to be measured did not come to its end") from None
