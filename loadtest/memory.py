"""What a loaded block takes in memory, over a server that holds next to nothing."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.random_chain import block_bytes, sized_architecture, write_random_chain
from loadtest.table import aligned
from serving.client import Client
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.architecture import Architecture
from stages.errors import OnesweepError

TARGET_RATIO = 1.3
"""Most bytes of memory for a byte of weights, after loading and warming up."""
IDLE = Architecture(parts=1, layers=1, width=16, heads=2, code_dim=4, condition_dim=4)
PROMPT = "The old man looked at the sea and said that "
REQUEST_BYTES = 256
REQUESTS = 3
MEASURES = ("rss", "pss", "uss", "peak")


@dataclass(frozen=True)
class ServerMemory:
    """One stage server, bytes. Resident, proportional (shared pages divided), unique; and the peak so far."""

    rss: int
    pss: int
    uss: int
    peak: int


@dataclass(frozen=True)
class MemoryFigures:
    """An idle server against one with a block: when ready (loaded and warmed up), and after requests."""

    block_bytes: int
    width: int
    idle: ServerMemory
    loaded: ServerMemory
    idle_after: ServerMemory
    loaded_after: ServerMemory

    def ratio(self, measure: str, after: bool = False) -> float:
        """(loaded - idle) / block bytes."""
        pair = (self.loaded_after, self.idle_after) if after else (self.loaded, self.idle)
        return float(getattr(pair[0], measure) - getattr(pair[1], measure)) / self.block_bytes

    @property
    def met(self) -> bool:
        return self.ratio("rss") <= TARGET_RATIO


def measure_memory(block_mb: int) -> MemoryFigures:
    """Measure both servers, one after the other. Raises OnesweepError."""
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        architecture = sized_architecture(block_mb)
        idle, idle_after = serve_random(small, IDLE)
        loaded, loaded_after = serve_random(large, architecture)
        return MemoryFigures(block_bytes(large), architecture.width, idle, loaded, idle_after, loaded_after)


def memory_table(figures: MemoryFigures) -> str:
    rows = []
    for name, idle, loaded, after in (
        ("ready", figures.idle, figures.loaded, False),
        (f"after {REQUESTS} requests", figures.idle_after, figures.loaded_after, True),
    ):
        for measure in MEASURES:
            low, high = getattr(idle, measure), getattr(loaded, measure)
            rows.append((f"{measure}, {name}", *map(_mb, (low, high)), f"{figures.ratio(measure, after):.2f}"))
    block = f"block of {figures.block_bytes / 1e6:.1f} MB (width {figures.width})"
    met = "yes" if figures.met else "no"
    return "\n".join(
        [
            block,
            aligned(("measure", "idle MB", "loaded MB", "(loaded - idle) / block"), rows),
            f"rss when ready at most {TARGET_RATIO} of the block: {met}",
        ]
    )


def memory_record(figures: MemoryFigures) -> dict[str, Any]:
    """Figures for a JSON file."""
    ratios = {
        when: {measure: figures.ratio(measure, after) for measure in MEASURES}
        for when, after in (("ready", False), ("after_requests", True))
    }
    return {"bench": "memory", **asdict(figures), "ratios": ratios, "target_ratio": TARGET_RATIO, "met": figures.met}


def serve_random(checkpoint: Path, architecture: Architecture) -> tuple[ServerMemory, ServerMemory]:
    """Serve one random block, which is written to `checkpoint`: its server's memory when ready, and after requests."""
    write_random_chain(checkpoint, architecture)
    topology = local_topology(1, 1, checkpoint, free_port_block(2) + 1)
    with temporary_deployment(topology, checkpoint) as deployment:
        pid = deployment.processes[topology.hosts[0].name]
        ready = memory_of(pid)
        with Client(topology.router) as client:
            for seed in range(REQUESTS):
                client.generate(PROMPT, mode="sweep", max_bytes=REQUEST_BYTES, seed=seed)
        return ready, memory_of(pid)


def memory_of(pid: int) -> ServerMemory:
    """A stage server's memory now. Raises OnesweepError where it cannot be read."""
    try:
        info = psutil.Process(pid).memory_full_info()
        return ServerMemory(info.rss, info.pss, info.uss, _peak(pid))
    except (psutil.Error, OSError, AttributeError) as error:
        raise OnesweepError(f"cannot read the memory of a stage server ({error!r}): this bench needs Linux") from None


def _peak(pid: int) -> int:
    """VmHWM: the most that was ever resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
