"""`onesweep wan train`: a small chain is trained over far links, and what came out is served."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.target import LOOPBACK
from loadtest.training.reference import evaluate, final_nats
from loadtest.training.settings import ROUNDS_A_MINUTE, SHIPPED, RunFile
from loadtest.training.stand import Stand, StandSettings, open_stand
from loadtest.training.view import View
from serving.client import Client
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.errors import InputError, OnesweepError, ServiceError

MOST_MINUTES = 24 * 60.0
PATIENCE_S = 300.0
MEGABYTE = 1e6
LOSS = "next_byte_nats"


@dataclass(frozen=True)
class DemoSettings:
    """What `onesweep wan train` is told."""

    minutes: float = 3.0
    """About how long six workers of the run that ships take on two cores."""
    config: Path | None = None
    """None: the run that ships."""
    profile: str = "links-60"
    profiles: Path | None = None
    data: Path | None = None
    """None: the text that ships with Python."""
    prompt: str = "The "
    max_bytes: int = 64

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and 0 < self.minutes <= MOST_MINUTES):
            raise InputError(f"--minutes must be above 0 and at most {MOST_MINUTES:g}, not {self.minutes:g}")
        if self.data is not None and not self.data.exists():
            raise InputError(f"no text at {self.data}: give a file or a folder of UTF-8 text")

    def run_file(self) -> RunFile:
        """Raises InputError."""
        if self.config is not None:
            return RunFile.read(self.config)
        return RunFile.read(SHIPPED, max(round(self.minutes * ROUNDS_A_MINUTE), 2))


@dataclass(frozen=True)
class DemoResult:
    """What came out."""

    rounds: int
    moved_bytes: int
    """Payload, both ways, as the coordinator counts it."""
    next_byte_nats: float
    """Of the published checkpoint, on validation text."""
    text: str
    sweeps: int


def train_and_serve(settings: DemoSettings, say: Callable[[str], None]) -> DemoResult:
    """Raises OnesweepError."""
    run = settings.run_file()
    workers = tuple(part for part in range(run.parts) for _ in range(run.replicas))
    with tempfile.TemporaryDirectory(prefix="onesweep-demo-") as folder:
        config = Path(folder) / "run.toml"
        config.write_text(run.text, encoding="utf-8")
        links = "loopback" if settings.profile == LOOPBACK else f"emulated links, {settings.profile}"
        say(f"{run.parts} blocks, {len(workers)} workers, one coordinator ({links}) ...")
        stand_settings = StandSettings(config, settings.data, workers, settings.profile, settings.profiles)
        with open_stand(stand_settings) as stand:
            last = _follow(stand, say)
            nats = final_nats(evaluate(stand.out, settings.data))
            say(f"published, next byte {nats:.3f} nats on text that nobody trained on; now it is served ...")
            text, sweeps = _written(stand.out, run.parts, settings)
    return DemoResult(last.rounds, last.received_bytes + last.sent_bytes, nats, text, sweeps)


def _follow(stand: Stand, say: Callable[[str], None]) -> View:
    """Until the run is over, a line whenever every block has made a few rounds more."""
    stand.start()
    told = 0

    def ended() -> bool:
        nonlocal told
        stand.check()
        view = stand.watch.last if stand.watch is not None else None
        if view is not None and view.least_round >= told + max(view.rounds // 6, 1):
            told = view.least_round
            losses = ", ".join(f"{part.name} {part.losses.get(LOSS, '-'):.4}" for part in view.parts)
            moved = (view.received_bytes + view.sent_bytes) / MEGABYTE
            say(f"  round {told} of {view.rounds}: {losses} nats; {moved:.1f} MB moved")
        return view is not None and view.finished

    known = -1
    while not stand.wait_until(ended, PATIENCE_S):
        if known == (known := len(stand.journal.entries)):
            raise ServiceError(f"nothing happened for {PATIENCE_S:.0f} s: {stand.coordinator.last_words()}")
    if not stand.wait_end(PATIENCE_S):
        raise ServiceError("the run is over, and its processes do not end")
    assert stand.watch is not None
    assert stand.watch.last is not None
    return stand.watch.last


def _written(checkpoint: Path, parts: int, settings: DemoSettings) -> tuple[str, int]:
    """What hosts of the checkpoint, one a block, write after the prompt in one sweep."""
    topology = local_topology(parts, parts, checkpoint, free_port_block(parts + 1) + 1)
    with temporary_deployment(topology, checkpoint) as deployment, Client(deployment.topology.router) as client:
        result = client.generate(settings.prompt, mode="sweep", max_bytes=settings.max_bytes, seed=1)
    if result.output_bytes != settings.max_bytes:
        raise OnesweepError(f"{result.output_bytes} bytes came instead of {settings.max_bytes}")
    return result.text, result.sweeps
