"""Real processes over gRPC on this machine: a coordinator, and a worker for each replica of each part."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.client import Link
from trainer.rounds.coordinator import MEMBERS
from trainer.rounds.coordinator_settings import CoordinatorSettings
from trainer.rounds.disk import open_store
from trainer.rounds.engine.base import Tally, Trained, check_real
from trainer.rounds.engine.crew import Crew, Tell
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.inprocess import Traffic
from trainer.rounds.pace import Pace
from trainer.rounds.server import STORE, ServerSettings, coordinate
from trainer.rounds.store import Record, Store
from trainer.rounds.tensors import Tensors
from trainer.rounds.worker import WorkerSettings, work

COORDINATOR = "coordinator"
NEVER = 2**31
"""Rounds between two checkpoints: only the end is published."""
LEASE_S = 600.0
"""Nobody is taken for gone because this machine is busy."""


@dataclass(frozen=True)
class Worked:
    """What a worker says at its end."""

    made: int
    busy_s: float
    seconds: float
    """From when all were there to its end."""
    sent_bytes: int
    received_bytes: int


class Network:
    def check(self, config: TrainingConfig, fleet: Fleet) -> None:
        check_real(fleet)

    def train(self, frame: Frame, corpus: Corpus, fleet: Fleet) -> Trained:
        config, parts = frame.config, frame.names()
        names = [[f"{part}-{replica}" for replica in range(config.rounds.replicas)] for part in parts]
        workers = sum(map(len, names))
        worked: dict[str, Worked] = {}
        with tempfile.TemporaryDirectory(prefix="onesweep-rounds-") as scratch, Crew(workers) as crew:
            directory, all_here = Path(scratch), crew.context.Barrier(workers)
            crew.start(COORDINATOR, _coordinate, config, corpus, directory)
            for name, word in crew.told():
                if name != COORDINATOR:
                    worked[name] = word
                    continue
                for index, replicas in enumerate(names):
                    for replica in replicas:
                        settings = WorkerSettings(replica, directory / replica, part=index, pace=Pace(fleet))
                        crew.start(replica, _work, word, corpus, settings, all_here)
            with open_store(directory / STORE) as store:
                weights, merges = _newest(store, parts), Merges(store.records())
            in_order = _by_place(directory / STORE / MEMBERS)
        seconds = max(min(worked[name].seconds for name in replicas) for replicas in names)
        return Trained(
            weights,
            Traffic(
                up_bytes=sum(each.sent_bytes for each in worked.values()),
                down_bytes=sum(each.received_bytes for each in worked.values()),
                updates=merges.updates,
                busy_s=sum(each.busy_s for each in worked.values()),
                seconds=seconds,
            ),
            workers,
            [Tally(worked[name].made, merges.steps[name], worked[name].busy_s) for name in in_order],
        )


class Merges:
    """What a log says of who was merged."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.updates: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        """By worker, times what the late ones were worth."""
        accepted: dict[tuple[str, str], Record] = {}
        for record in records:
            if record["kind"] == "accepted":
                accepted[record["part"], record["id"]] = record
                self.updates["late" if record["staleness"] else "in time"] += 1
            elif record["kind"] == "dropped":
                self.updates["dropped"] += 1
            elif record["kind"] == "closed":
                for name in record["updates"]:
                    update = accepted[record["part"], name]
                    self.steps[update["worker"]] += update["weight"]


def _newest(store: Store, parts: Sequence[str]) -> dict[str, Tensors]:
    closed = {record["part"]: record for record in store.records() if record["kind"] == "closed"}
    return {part: store.get_version(part, closed[part]["round"] + 1, closed[part]["sha256"]).public for part in parts}


def _by_place(path: Path) -> list[str]:
    """The workers, part by part, replica by replica: who comes first is replica 0."""
    return [
        record["worker"] for record in sorted(json.loads(path.read_text()), key=lambda r: (r["part"], r["replica"]))
    ]


def _coordinate(tell: Tell, config: TrainingConfig, corpus: Corpus, out: Path) -> None:
    server, settings = ServerSettings("127.0.0.1:0"), CoordinatorSettings(LEASE_S, NEVER)
    coordinate(config, corpus, out, server, settings, lambda port: tell(f"127.0.0.1:{port}"))


def _work(tell: Tell, address: str, corpus: Corpus, settings: WorkerSettings, all_here: Barrier) -> None:
    link = Link(address)
    all_here.wait()
    begin = time.monotonic()
    try:
        work(link, corpus, settings)
    finally:
        link.close()
    pace, seconds = settings.pace, time.monotonic() - begin
    tell(Worked(pace.steps, pace.busy_s, seconds, link.sent_bytes, link.received_bytes))
