"""`onesweep wan train`: a small chain is trained over far links, and the result is served."""

import tempfile
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

PATIENCE_S = 300.0
MEGABYTE = 1e6
LOSS = "next_byte_nats"


def train_and_serve(settings: DemoSettings, say: Say) -> None:
    """Say how the blocks learn, what the links carry, and what the result writes. Raises OnesweepError."""
    run = RunFile.read(settings.config, settings.minutes)
    setup = (settings.data, run.workers, settings.profile, settings.profiles)
    with tempfile.TemporaryDirectory(prefix="onesweep-demo-") as folder:
        config = Path(folder) / "run.toml"
        config.write_text(run.text, encoding="utf-8")
        over = settings.profile if settings.profile == LOOPBACK else f"emulated links, {settings.profile}"
        say(f"{run.parts} blocks, {len(run.workers)} workers, one coordinator ({over}) ...")
        with open_training_testbed(TrainingSetup(config, *setup)) as testbed:
            _follow(testbed, run.rounds, say)
            # the bytes on the links, with all headers; loopback does not count them
            counters = testbed.network.lab.counters().values() if testbed.network.lab else ()
            carried = sum(counts["carried_bytes"] for counts in counters) / MEGABYTE
            nats = final_scores(testbed.out)[NEXT_BYTE]
            say(f"published, next byte {nats:.3f} nats on text that nobody trained on; now it is served ...")
            ring = local_topology(run.parts, run.parts, testbed.out, free_port_block(run.parts + 1) + 1)
            with temporary_deployment(ring, testbed.out), Client(ring.router) as client:
                made = client.generate(settings.prompt, mode="sweep", max_bytes=settings.max_bytes, seed=1)
    say(f"\n  {settings.prompt}|{made.text.replace(chr(10), '⏎')}\n")
    over_links = f"{carried:.1f} MB over the links, " if carried else ""
    say(
        f"{run.rounds} rounds, {over_links}next byte {nats:.3f} nats; "
        f"{made.output_bytes} bytes in {made.sweeps} sweep: a training so short writes no words"
    )


def _follow(testbed: TrainingTestbed, rounds: int, say: Say) -> None:
    """Train to the end; a line whenever every block has made a few rounds more."""
    testbed.start()
    told = 0

    def tell() -> None:
        nonlocal told
        entries = testbed.log.entries
        parts = entries[0].record["parts"] if entries else ()
        made = min(map(testbed.log.closed, parts), default=0)
        if made >= told + max(rounds // 6, 1):
            told = made
            losses = {entry.part: entry.record["losses"][LOSS] for entry in entries if entry.kind == "accepted"}
            shown = ", ".join(f"{part} {nats:.4}" for part, nats in sorted(losses.items()))
            say(f"  round {made} of {rounds}: {shown} nats")

    testbed.wait_end(PATIENCE_S, tell)
