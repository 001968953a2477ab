"""Subprocesses that end with their command, and the engine that runs coordinator and workers in them."""

from __future__ import annotations

import json
import multiprocessing
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

from onesweep.stages.errors import OnesweepError, ServiceError
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.rounds.client import RoundsClient
from onesweep.trainer.rounds.codecs import Tensors
from onesweep.trainer.rounds.coordinator import MEMBERS
from onesweep.trainer.rounds.server import STORE, coordinate
from onesweep.trainer.rounds.settings import CoordinatorSettings, SimulatedWorkers, Throttle, WorkerSettings
from onesweep.trainer.rounds.simulation import RoundsTraffic, Trained, WorkerTally, check_real
from onesweep.trainer.rounds.spec import RunSpec
from onesweep.trainer.rounds.store import Record, Store, open_store
from onesweep.trainer.rounds.worker import work

# Imported once, by the server that processes are forked from: torch takes seconds, and so does the last, which every
# process would import with its first optimizer.
PRELOADED = ["onesweep.trainer.rounds.processes", "torch._dynamo"]
END_S = 30.0  # time that a process has to end after its last message

Tell = Callable[[Any], None]


class SubprocessPool:
    """Each process runs one function, which sends messages; a failure of any ends them all."""

    # They are forked from a server that has imported torch once, and nothing else has happened in it.

    def __init__(self, size: int) -> None:
        """:param size: processes that will compute at the same time; they share this one's threads."""
        self.context = multiprocessing.get_context("forkserver")
        # each process would import torch for seconds, and `torch._dynamo` with its first optimizer
        self.context.set_forkserver_preload(PRELOADED)
        self.threads = max(torch.get_num_threads() // size, 1)
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[Connection, str] = {}

    def __enter__(self) -> SubprocessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def start(self, name: str, job: Callable[..., object], *arguments: object) -> None:
        """Run `job(tell, *arguments)` in a process of its own; messages to `tell` must be small, or a path."""
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_run, args=(theirs, self.threads, job, arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes[name], self._pipes[ours] = process, name

    def told(self) -> Iterator[tuple[str, Any]]:
        """Names and messages, until all have ended. Raises ServiceError when one fails."""
        while self._pipes:
            for pipe in wait(list(self._pipes)):
                assert isinstance(pipe, Connection)
                name = self._pipes[pipe]
                try:
                    word = pipe.recv()
                except EOFError:
                    self._ended(pipe, name)
                    continue
                if isinstance(word, _Failure):
                    raise ServiceError(f"{name}: {word.sentence}")
                yield name, word

    def _ended(self, pipe: Connection, name: str) -> None:
        del self._pipes[pipe]
        pipe.close()
        process = self._processes[name]
        process.join(END_S)
        if process.exitcode != 0:
            raise ServiceError(f"the process of {name} ended with code {process.exitcode}; what it wrote is above")


class _Failure:
    def __init__(self, sentence: str) -> None:
        self.sentence = sentence


def _run(pipe: Connection, threads: int, job: Callable[..., object], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; who started us ends us
    torch.set_num_threads(threads)
    try:
        job(pipe.send, *arguments)
    except OnesweepError as error:
        pipe.send(_Failure(str(error)))


COORDINATOR = "coordinator"
NEVER = 2**31  # rounds between two checkpoints: only the end is published
LEASE_S = 600.0  # nobody is taken for gone because this machine is busy


@dataclass(frozen=True)
class Worked:
    """A worker's last message."""

    made: int
    busy_s: float
    seconds: float  # from when all were there to its end
    sent_bytes: int
    received_bytes: int


class GrpcEngine:
    def check(self, config: TrainingConfig, fleet: SimulatedWorkers) -> None:
        check_real(fleet)

    def train(self, spec: RunSpec, corpus: Corpus, fleet: SimulatedWorkers) -> Trained:
        config, parts = spec.config, spec.parts
        names = [[f"{part}-{replica}" for replica in range(config.rounds.replicas)] for part in parts]
        workers = sum(map(len, names))
        worked: dict[str, Worked] = {}
        with tempfile.TemporaryDirectory(prefix="onesweep-rounds-") as scratch, SubprocessPool(workers) as crew:
            directory, all_here = Path(scratch), crew.context.Barrier(workers)
            crew.start(COORDINATOR, _coordinate, config, corpus, directory)
            for name, word in crew.told():
                if name != COORDINATOR:
                    worked[name] = word
                    continue
                for index, replicas in enumerate(names):
                    for replica in replicas:
                        settings = WorkerSettings(replica, directory / replica, part=index, throttle=Throttle(fleet))
                        crew.start(replica, _work, word, corpus, settings, all_here)
            with open_store(directory / STORE) as store:
                weights, (updates, steps) = _newest(store, parts), count_merges(store.records())
            places = json.loads((directory / STORE / MEMBERS).read_text())
            in_order = [place["worker"] for place in sorted(places, key=lambda p: (p["part"], p["replica"]))]
        seconds = max(min(worked[name].seconds for name in replicas) for replicas in names)
        return Trained(
            weights,
            RoundsTraffic(
                up_bytes=sum(each.sent_bytes for each in worked.values()),
                down_bytes=sum(each.received_bytes for each in worked.values()),
                updates=updates,
                busy_s=sum(each.busy_s for each in worked.values()),
                seconds=seconds,
            ),
            workers,
            [WorkerTally(worked[name].made, steps[name], worked[name].busy_s) for name in in_order],
        )


def count_merges(records: Sequence[Record]) -> tuple[Counter[str], Counter[str]]:
    """From the records of a log: updates by fate, and merged steps by worker, late ones times their worth."""
    updates, steps = Counter[str](), Counter[str]()
    accepted: dict[tuple[str, str], Record] = {}
    for record in records:
        if record["kind"] == "accepted":
            accepted[record["part"], record["id"]] = record
            updates["late" if record["staleness"] else "in time"] += 1
        elif record["kind"] == "dropped":
            updates["dropped"] += 1
        elif record["kind"] == "closed":
            updates.update(["left out"] * len(record.get("left_out", ())))
            for name in record["updates"]:
                update = accepted[record["part"], name]
                steps[update["worker"]] += update["weight"]
    return updates, steps


def _newest(store: Store, parts: Sequence[str]) -> dict[str, Tensors]:
    closed = {record["part"]: record for record in store.records() if record["kind"] == "closed"}
    return {part: store.get_version(part, closed[part]["round"] + 1, closed[part]["sha256"]).public for part in parts}


def _coordinate(tell: Tell, config: TrainingConfig, corpus: Corpus, out: Path) -> None:
    settings = CoordinatorSettings("127.0.0.1:0", out, lease_s=LEASE_S, publish_every=NEVER)
    coordinate(config, corpus, settings, lambda port: tell(f"127.0.0.1:{port}"))


def _work(tell: Tell, address: str, corpus: Corpus, settings: WorkerSettings, all_here: Barrier) -> None:
    link = RoundsClient(address)
    all_here.wait()
    begin = time.monotonic()
    try:
        work(link, corpus, settings)
    finally:
        link.close()
    throttle, seconds = settings.throttle, time.monotonic() - begin
    tell(Worked(throttle.steps, throttle.busy_s, seconds, link.sent_bytes, link.received_bytes))
