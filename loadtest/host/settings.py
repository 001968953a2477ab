"""Settings of the benchmarks of one machine. `onesweep --help` reads this file, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.commands import CHECKPOINT, absolute, numbers
from serving.cli.deployment import SHIPPED
from stages.settings import flag

MAX_AT_ONCE = 64  # requests in flight that a router takes by default
MOST_SYMBOLS = 1 << 20
MOST_REQUESTS = 100_000


def numbers_flag(help: str, name: str, metavar: str, shown: str | None = None) -> dict[str, Any]:
    """Metadata of a field with a list of whole numbers, whose flag is `name`."""
    return flag(help, name=name, metavar=metavar, shown=shown, type=partial(numbers, flag=name))


@dataclass(frozen=True)
class OverheadSettings:
    """Settings of `bench overhead`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    requests: int = field(default=20, metadata=flag("requests of each mode", metavar="R", least=1))
    max_bytes: int = field(default=128, metadata=flag("bytes to generate", name="--bytes"))
    hosts: tuple[int, ...] = field(
        default=(), metadata=numbers_flag("hosts that share the blocks", "--hosts", "H[,H]", shown="1,3")
    )


@dataclass(frozen=True)
class MemorySettings:
    """Settings of `bench memory`."""

    checkpoint: Path | None = field(
        default=None, metadata=flag("hosts of this one, full of sessions, instead", metavar="DIR", type=absolute)
    )
    session_mb: int = field(default=64, metadata=flag("of sessions that these hold", least=1))
    block_mb: int = field(default=200, metadata=flag("size of the block, about", least=1))


@dataclass(frozen=True)
class StageSettings:
    """Settings of `bench stage`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    slots: int = field(default=128, metadata=flag("noisy slots of a piece"))
    batches: tuple[int, ...] = field(
        default=(1, 4, 16), metadata=numbers_flag("pieces computed together", "--batch", "N[,N]")
    )
    threads: int = field(default=1, metadata=flag("processor threads", metavar="T"))
    text: Path | None = field(default=None, metadata=flag("text to measure losses on", shown="the probe text"))


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of `bench losses`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    text: Path = field(metadata=flag("held-out text"))
    backends: tuple[str, ...] = field(
        default=(), metadata=flag("backends to compare", metavar="B[,B]", shown="all that are installed")
    )
    codecs: tuple[str, ...] = field(default=("fp32", "int8"), metadata=flag("codecs of hidden states", metavar="C[,C]"))
    symbols: int = field(default=4096, metadata=flag("bytes or tokens to read", least=2, most=MOST_SYMBOLS))


@dataclass(frozen=True)
class BatchingSettings:
    """Settings of `bench batching`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    batch: int = field(default=16, metadata=flag("requests at once", least=1, most=MAX_AT_ONCE))
    max_bytes: int = field(default=128, metadata=flag("bytes to generate", name="--bytes"))
    rounds: int = field(default=5, metadata=flag("times that each is measured", metavar="R", least=1))


@dataclass(frozen=True)
class AuditSettings:
    """Settings of `bench audit`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    share: float = field(default=0.05, metadata=flag("share of sweeps that are audited", metavar="S", above=0, most=1))
    modes: tuple[str, ...] = field(
        default=("sweep", "chunked", "ar"), metadata=flag("modes to measure the cost of", metavar="M[,M]")
    )
    sweeps: int = field(
        default=100, metadata=flag("sweeps within which a faulty host should be found", least=1, most=MOST_REQUESTS)
    )
    rounds: int = field(
        default=5, metadata=flag("faulty hosts to find", metavar="R", least=1, most=MOST_REQUESTS)
    )  # each in a deployment of its own
    requests: int = field(
        default=40, metadata=flag("requests of each mode, for the cost", metavar="R", least=2, most=MOST_REQUESTS)
    )
    max_bytes: int = 64


@dataclass(frozen=True)
class TelemetrySettings:
    """Settings of `bench seeing`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    modes: tuple[str, ...] = field(default=("sweep", "ar"), metadata=flag("modes", metavar="M[,M]"))
    users: int = field(default=4, metadata=flag("requests at once", metavar="U", least=1, most=MAX_AT_ONCE))
    requests: int = field(default=2, metadata=flag("requests of each user in a turn", metavar="R", least=1, most=1000))
    max_bytes: int = field(default=64, metadata=flag("bytes to generate", name="--bytes", least=1))
    rounds: int = field(default=40, metadata=flag("turns of each deployment", metavar="R", least=1, most=1000))
    hosts: int = field(default=3, metadata=flag("hosts that share the blocks", metavar="H"))
    watched: tuple[str, ...] = field(
        default=("off", "default", "all"), metadata=flag("share traced: default 0.01, all 1", metavar="W,W")
    )
    scrape_s: float = field(default=1.0, metadata=flag("pause between scrapes", above=0, most=3600))


@dataclass(frozen=True)
class ShapesSettings:
    """Settings of `bench shapes`."""

    widths: tuple[int, ...] = field(
        default=(512, 2048, 4096), metadata=numbers_flag("model widths", "--widths", "D[,D]")
    )
    profile: str = field(default="links-60", metadata=flag("links whose floor is added", metavar="P"))
    slots: int = field(default=128, metadata=flag("output tokens of a sweep"))
    steps: int = field(default=1, metadata=flag("Euler steps in each block", metavar="K"))
    dtype: str = field(default="fp32", metadata=flag("fp32 or bf16", metavar="T"))
    seed: int = 0


@dataclass(frozen=True)
class ParitySettings:
    """Settings of `bench parity`."""

    checkpoint: Path = field(metadata=flag("imported model", metavar="DIR", type=absolute))
    source: Path = field(metadata=flag("folder or .gguf file that it was imported from", metavar="SOURCE"))
    prompts: int = field(default=20, metadata=flag("prompts"))
    tokens: int = field(default=64, metadata=flag("tokens to generate", name="--max-tokens"))
