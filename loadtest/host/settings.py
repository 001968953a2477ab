"""Settings of the benchmarks of one machine. Help reads this file, so it imports nothing heavy."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onesweep.loadtest.commands import CHECKPOINT, absolute, numbers
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.settings import flag, setting

MAX_AT_ONCE = 64  # requests in flight that a router takes by default
MOST_REQUESTS = 100_000


DEVICE = flag("where it computes", metavar="cpu|cuda[:N]")


def numbers_flag(name: str, one: str, number: type[int] | type[float] = int) -> dict[str, Any]:
    """Metadata of a flag that takes a list of numbers."""
    return {"name": name, "metavar": f"{one}[,{one}]", "type": partial(numbers, flag=name, number=number)}


@dataclass(frozen=True)
class OverheadSettings:
    """Settings of `bench overhead`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    requests: int = setting(20, "requests of each mode", metavar="R", least=1)
    max_bytes: int = setting(128, "bytes to generate", name="--bytes")
    hosts: tuple[int, ...] = setting((), "hosts that share the blocks", shown="1,3", **numbers_flag("--hosts", "H"))


@dataclass(frozen=True)
class MemorySettings:
    """Settings of `bench memory`."""

    checkpoint: Path | None = setting(
        None, "hosts of this one, full of sessions, instead", metavar="DIR", type=absolute
    )
    session_mb: int = setting(256, "of sessions that these hold", least=1)
    block_mb: int = setting(200, "size of the block, about", least=1)


@dataclass(frozen=True)
class StageSettings:
    """Settings of `bench stage`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    slots: int = setting(128, "noisy slots of a piece")
    batches: tuple[int, ...] = setting((1, 4, 16), "pieces computed together", **numbers_flag("--batch", "N"))
    threads: int = setting(1, "processor threads", metavar="T")
    text: Path | None = setting(None, "text to measure losses on", shown="the probe text")
    device: str = field(default="cpu", metadata=DEVICE)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of `bench losses`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    text: Path = field(metadata=flag("held-out text"))
    backends: tuple[str, ...] = setting((), "backends to compare", metavar="B[,B]", shown="all that are installed")
    codecs: tuple[str, ...] = setting(("fp32", "int8"), "codecs of hidden states", metavar="C[,C]")
    symbols: int = setting(4096, "bytes or tokens to read", least=2, most=1 << 20)


@dataclass(frozen=True, kw_only=True)
class LeakSettings:
    """Settings of `bench leak`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    text: Path = field(metadata=flag("text that probes learn from and are tested on"))
    symbols: int = setting(20_480, "of the text to read, a fifth of them for the test", least=1, most=1 << 20)
    codecs: tuple[str, ...] = setting(("fp32", "int8"), "codecs of hidden states", metavar="C[,C]")
    noises: tuple[float, ...] = setting(
        (0.3, 1.0), "noise on states, relative to them", **numbers_flag("--noise", "X", float)
    )
    kept: tuple[int, ...] = setting((1, 4), "layers before the states, in addition", **numbers_flag("--kept", "N"))
    candidates: int = setting(16, "symbols whose states are compared", least=1, most=1024)
    seed: int = 0


@dataclass(frozen=True)
class BatchingSettings:
    """Settings of `bench batching`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    batch: int = setting(16, "requests at once", least=1, most=MAX_AT_ONCE)
    max_tokens: int = setting(128, "tokens to generate; a byte model's are bytes")
    levels: int = setting(12, "steps from noise to picture, of a bundle that draws", metavar="K")
    rounds: int = setting(5, "times that each is measured", metavar="R", least=1)


@dataclass(frozen=True)
class AuditSettings:
    """Settings of `bench audit`."""

    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    share: float = setting(0.05, "share of answers that are audited", metavar="S", above=0, most=1)
    modes: tuple[str, ...] | None = setting(None, "modes to measure the cost of", shown="all", metavar="M[,M]")
    rate: float = setting(1.0, "share of its sweeps that are wrong", above=0, most=1)
    sweeps: int = setting(100, "sweeps to find it in", least=1, most=MOST_REQUESTS)
    # each in a deployment of its own
    rounds: int = setting(5, "faulty hosts to find", metavar="R", least=1, most=MOST_REQUESTS)
    requests: int = setting(40, "requests of each mode, for the cost", metavar="R", least=2, most=MOST_REQUESTS)
    max_bytes: int = 64


@dataclass(frozen=True)
class ShapesSettings:
    """Settings of `bench shapes`."""

    widths: tuple[int, ...] = setting((512, 2048, 4096), "model widths", **numbers_flag("--widths", "D"))
    profile: str = setting("links-60", "links whose floor is added", metavar="P")
    slots: int = setting(128, "output tokens of a sweep")
    steps: int = setting(1, "Euler steps in each block", metavar="K")
    dtype: str = setting("fp32", "fp32 or bf16", metavar="T")
    device: str = field(default="cpu", metadata=DEVICE)
    seed: int = 0


@dataclass(frozen=True)
class ParitySettings:
    """Settings of `bench parity`."""

    checkpoint: Path = field(metadata=flag("imported model", metavar="DIR", type=absolute))
    source: Path | None = setting(
        None,
        "folder or .gguf file that it was imported from; without it ar-speculative is held against ar",
        metavar="SOURCE",
    )
    prompts: int = setting(20, "prompts")
    tokens: int = setting(64, "tokens to generate", name="--max-tokens")
