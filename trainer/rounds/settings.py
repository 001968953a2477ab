"""Settings of the processes of rounds, which define their commands' flags."""

from dataclasses import dataclass, field
from pathlib import Path

from stages.settings import flag, setting
from stages.wire.tls import LOOPBACK_ONLY, Security

# `--help` imports this module, so it must not import torch.

# Version of rounds.proto: 4 had fragments of parts, 3 other sparse codecs, in 2 the coordinator made features, 1 had
# no incarnations.
PROTOCOL = 5
MAX_PATIENCE_S = 1e7
PATIENCE_S = 600.0
MAX_MACHINES = 64  # per site


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of `onesweep train coordinate`, in addition to the run's."""

    listen: str = field(metadata=flag("", metavar="HOST:PORT"))
    out: Path = setting(Path("runs/chain"), "the checkpoint", metavar="DIR")
    own_data: bool = setting(False, "let workers bring other text than this")
    lease_s: float = setting(30.0, "silence after which a place is free", name="--lease", least=0.5, most=86400)
    # The last round is always published too.
    publish_every: int = setting(10, "rounds between checkpoints", least=1)
    tokens: Path | None = setting(None, "who may work, from `onesweep token`")
    security: Security = LOOPBACK_ONLY


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of `onesweep train work`; those without a flag it finds out itself."""

    name: str
    state: Path  # a directory for this worker alone
    part: int | None = setting(None, "the part to train (default: whichever lacks a worker)", name="--block")
    wait: bool = setting(False, "where every place is taken, wait for one")
    save_every_s: float = setting(60.0, "between saves in a round", name="--save-every", least=0, most=MAX_PATIENCE_S)
    device: str = setting("cpu", "where to train", metavar="cpu|cuda[:N]")
    site: str | None = setting(
        None, "work with other machines as one worker: where the first of them listens", metavar="HOST:PORT"
    )
    machine: int = setting(0, "number of this one at its site; 0 is the first, which dials the coordinator", least=0)
    machines: int = setting(1, "how many the site has", least=1, most=MAX_MACHINES)
    pace_s: float = setting(0.0, "what a local step takes at least", least=0, most=3600)


@dataclass(frozen=True)
class WatchSettings:
    """Settings of `onesweep train status`, and of `onesweep train work` for its coordinator."""

    coordinator: str = field(metadata=flag("", name="coordinator", metavar="HOST:PORT"))
    interval_s: float = setting(1.0, "least time between two looks", name="--interval")
    once: bool = setting(False, "one look")
    patience_s: float = setting(
        PATIENCE_S, "how long to look for a coordinator that is away", name="--patience", least=0, most=MAX_PATIENCE_S
    )
    json: bool = setting(False, "a line of JSON for each look")
