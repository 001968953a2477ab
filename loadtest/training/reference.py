"""What a checkpoint is worth, and what the same run is worth when nothing happens to it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.destination import write_json
from loadtest.training.stand import StandSettings, open_stand
from serving.deployment import MODULE
from stages.errors import ServiceError

WINDOWS, MIN_CONTEXT = 32, 1
COMMAND_S = 600.0
NEXT_BYTE = "next byte"

Scores = dict[str, float]
"""Nats a byte of validation text, by what `onesweep evaluate` calls them."""


@dataclass(frozen=True)
class Reference:
    """A run without faults."""

    key: str
    scores: Scores
    seconds: float
    cached: bool = False


def evaluate(checkpoint: Path, data: Path | None) -> Scores:
    """The losses of each block's next-byte head. Raises ServiceError."""
    text = () if data is None else ("--data", str(data))
    command = [sys.executable, *MODULE, "evaluate", str(checkpoint), "--json", "--steps", "1", *text]
    done = subprocess.run(
        [*command, "--windows", str(WINDOWS), "--min-context", str(MIN_CONTEXT)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    if done.returncode:
        raise ServiceError(f"`onesweep evaluate` failed: {done.stderr.strip()}")
    scores = json.loads(done.stdout)["checkpoints"][0]["scores"]
    return {s["name"]: s["bits_per_byte"] * math.log(2) for s in scores if s["name"].startswith(NEXT_BYTE)}


def final_nats(scores: Scores) -> float:
    """The loss at the end of the model: that of the last block."""
    return scores[max(scores, key=lambda name: int(name.rpartition(" ")[2]))]


def read_reference(path: Path, key: str) -> Reference | None:
    """What was measured before, if it is of this run."""
    try:
        found = Reference(**{**json.loads(path.read_text(encoding="utf-8")), "cached": True})
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == key else None


def make_reference(settings: StandSettings, key: str, patience_s: float, say: Callable[[str], None]) -> Reference:
    """Run it without faults. Raises ServiceError when it comes to no end."""
    say("the same run without faults ...")
    begin_s = time.monotonic()
    with open_stand(settings) as stand:
        stand.start()
        if not stand.wait_end(patience_s):
            raise ServiceError(f"the run without faults made no progress for {patience_s:.0f} s")
        return Reference(key, evaluate(stand.out, settings.data), time.monotonic() - begin_s)


def write_reference(path: Path, reference: Reference) -> None:
    """Raises OnesweepError."""
    write_json(path, {name: value for name, value in asdict(reference).items() if name != "cached"})
