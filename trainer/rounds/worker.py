"""A worker: trains one part, hands in what it learned at the end of each round, and goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc

from stages.errors import ConfigError, Interrupted, ResumeError, ServiceError
from stages.manifest import parse_manifest
from trainer.config import TrainingConfig, parse_config
from trainer.data import Corpus
from trainer.rounds.bench import Bench, new_bench
from trainer.rounds.client import FileGoneError, LeaseLostError, Link
from trainer.rounds.codec import codec_named
from trainer.rounds.feedback import ErrorFeedback
from trainer.rounds.overlap import new_overlap
from trainer.rounds.plan import DATA_KIND, RunPlan, architecture_digest
from trainer.rounds.publication import receive
from trainer.rounds.tensors import Tensors, digest, load, norm, shapes, subtract, trainable
from trainer.rounds.worker_state import STATE_NAME, Pending, Standing, load_worker, save_worker
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

BEATS_A_LEASE = 3


@dataclass(frozen=True)
class WorkerSettings:
    """What `onesweep work` is told."""

    name: str
    state: Path
    """Directory of this worker alone: what it needs to go on after a kill."""
    part: int | None = None
    wait: bool = False
    """Whether to wait for a place."""
    device: str = "cpu"
    save_every_s: float = 60.0
    architecture: str = ""
    """Digest of the one that the run must have; empty = any."""


class Worker:
    """One process: its main thread trains, another tells the coordinator that it lives, a third one sends."""

    def __init__(self, link: Link, corpus: Corpus, settings: WorkerSettings, stop: threading.Event) -> None:
        self.link, self.corpus, self.settings, self.stop = link, corpus, settings, stop
        self.path = settings.state / STATE_NAME
        self.run, self.standing, self.groups = "", Standing(""), dict[str, Tensors]()
        if self.path.exists():
            self.run, self.standing, self.groups = load_worker(self.path)

    def work(self) -> int:
        """Work until the run is over; returns the rounds that were trained. Raises OnesweepError."""
        while True:
            place = self.link.join(self._request(), self.settings.wait)
            seat = Seat(self, place)
            try:
                return seat.work()
            except LeaseLostError as error:
                log.warning("%s", error)
            except (Interrupted, KeyboardInterrupt):
                seat.leave()
                raise
            finally:
                seat.close()

    def _request(self) -> rounds_pb2.JoinRequest:
        settings = self.settings
        return rounds_pb2.JoinRequest(
            worker=settings.name,
            version=version("onesweep"),
            part=settings.part,
            architecture=settings.architecture,
            data_kind=DATA_KIND,
            data=self.corpus.digest(),
            run=self.run,
            device=settings.device,
        )
