"""`onesweep wan train`: a small chain is trained over far links, and the result is served."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from loadtest.faults.base import Say
from loadtest.faults.settings import DemoSettings, RunFile
from loadtest.faults.training_run import NEXT_BYTE, final_scores
from loadtest.faults.training_testbed import TrainingSetup, TrainingTestbed, open_training_testbed
from loadtest.workload.testbed import LOOPBACK
from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.errors import OnesweepError
from trainer.v1.rounds_pb2 import WatchUpdate

PATIENCE_S = 300.0
MEGABYTE = 1e6
LOSS = "next_byte_nats"


@dataclass(frozen=True)
class DemoResult:
    """The run's cost, the loss of its checkpoint, and a text of it."""

    rounds: int
    moved_bytes: int  # payload, both ways, as the coordinator counts it
    next_byte_nats: float  # of the published checkpoint, on validation text
    text: str
    sweeps: int


def train_and_serve(settings: DemoSettings, say: Say) -> DemoResult:
    """Raises OnesweepError."""
    run = RunFile.read(settings.config, settings.minutes)
    setup = (settings.data, run.workers, settings.profile, settings.profiles)
    with tempfile.TemporaryDirectory(prefix="onesweep-demo-") as folder:
        config = Path(folder) / "run.toml"
        config.write_text(run.text, encoding="utf-8")
        over = settings.profile if settings.profile == LOOPBACK else f"emulated links, {settings.profile}"
        say(f"{run.parts} blocks, {len(run.workers)} workers, one coordinator ({over}) ...")
        with open_training_testbed(TrainingSetup(config, *setup)) as testbed:
            last = _follow(testbed, say)
            nats = final_scores(testbed.out)[NEXT_BYTE]
            say(f"published, next byte {nats:.3f} nats on text that nobody trained on; now it is served ...")
            text, sweeps = _generate(testbed.out, run.parts, settings)
    return DemoResult(last.rounds, moved_bytes(last), nats, text, sweeps)


def moved_bytes(update: WatchUpdate) -> int:
    """Payload, both ways, as the coordinator counts it."""
    return update.received_bytes + update.sent_bytes


def _follow(testbed: TrainingTestbed, say: Say) -> WatchUpdate:
    """The last status of the run; a line whenever every block has made a few rounds more."""
    testbed.start()
    told = 0

    def tell() -> None:
        nonlocal told
        if (run := testbed.view) is None:
            return
        made = min(part.round for part in run.parts)
        if made >= told + max(run.rounds // 6, 1):
            told = made
            losses = ", ".join(f"{part.name} {dict(part.losses).get(LOSS, '-'):.4}" for part in run.parts)
            say(f"  round {made} of {run.rounds}: {losses} nats; {moved_bytes(run) / MEGABYTE:.1f} MB moved")

    testbed.wait_end(PATIENCE_S, tell)
    assert testbed.view is not None
    return testbed.view


def _generate(checkpoint: Path, parts: int, settings: DemoSettings) -> tuple[str, int]:
    """The text that hosts of the checkpoint, one a block, write after the prompt, and its sweeps."""
    topology = local_topology(parts, parts, checkpoint, free_port_block(parts + 1) + 1)
    with temporary_deployment(topology, checkpoint) as deployment, Client(deployment.topology.router) as client:
        result = client.generate(settings.prompt, mode="sweep", max_bytes=settings.max_bytes, seed=1)
    if result.output_bytes != settings.max_bytes:
        raise OnesweepError(f"{result.output_bytes} bytes came instead of {settings.max_bytes}")
    return result.text, result.sweeps
