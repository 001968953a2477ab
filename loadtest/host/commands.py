"""The commands `onesweep bench host` and `peers`: what a machine makes of hosts, and of the same file elsewhere."""

import argparse
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.commands import CHECKPOINT, MAX_AT_ONCE, BenchReport, absolute, add_measurement, run_bench
from serving.router.topology import SHIPPED
from stages.settings import flag, from_flags, setting


@dataclass(frozen=True)
class HostBenchSettings:
    """Settings of `bench host`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    hosts: int | None = setting(None, "hosts that share the parts of the model", least=1, shown="3")
    max_tokens: int | None = setting(None, "tokens to generate; a byte model's are bytes", shown="128", least=1)
    levels: int = setting(12, "steps from noise to picture, of a bundle that draws", metavar="K", least=1)
    batch: int = setting(16, "requests of each mode, one after the other and at once", least=1, most=MAX_AT_ONCE)
    rounds: int = setting(5, "times that requests at once are measured", metavar="R", least=1)


@dataclass(frozen=True)
class PeerSettings:
    """Settings of `bench peers`."""

    checkpoint: Path = field(metadata=flag("an import of --source", metavar="DIR", type=absolute))
    source: Path = field(metadata=flag("what llama.cpp reads", metavar="FILE.gguf", type=absolute))
    rounds: int = setting(3, "times that both are measured, in turns", metavar="R", least=1)
    rpc: Path | None = setting(
        None, "llama.cpp's build/bin with RPC: over far links too, which needs root", metavar="DIR", type=absolute
    )


add_host = partial(add_measurement, settings=HostBenchSettings)
add_peers = partial(add_measurement, settings=PeerSettings)


def run_host(options: argparse.Namespace) -> int:
    settings = from_flags(HostBenchSettings, options)
    from loadtest.host.ring import measure_ring  # torch takes a second to import: only when it runs

    return run_bench(options, lambda: BenchReport.of_rows("host", settings, measure_ring(settings)))


def run_peers(options: argparse.Namespace) -> int:
    settings = from_flags(PeerSettings, options)
    from loadtest.host.peers import measure_peers

    return run_bench(options, lambda: BenchReport.of_rows("peers", settings, measure_peers(settings)))
