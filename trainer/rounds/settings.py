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
    out: Path = setting(Path("runs/chain"), "checkpoint to write", metavar="DIR")
    own_data: bool = setting(False, "let workers train on their own text")
    lease_s: float = setting(30.0, "silence after which a lease expires", name="--lease", minimum=0.5, maximum=86400)
    # The last round is always published too.
    publish_every: int = setting(10, "rounds between checkpoints", minimum=1)
    tokens: Path | None = setting(None, "tokens of allowed workers, from `onesweep token`")
    security: Security = LOOPBACK_ONLY


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of `onesweep train work`; those without a flag it finds out itself."""

    name: str
    state: Path  # a directory for this worker alone
    part: int | None = setting(None, "part to train (default: one that lacks a worker)", name="--block")
    wait: bool = setting(False, "wait for a place if all are taken")
    save_every_s: float = setting(
        60.0, "between saves of a round", name="--save-every", minimum=0, maximum=MAX_PATIENCE_S
    )
    device: str = setting("cpu", "where to train", metavar="cpu|cuda[:N]")
    site: str | None = setting(
        None, "train with other machines as one worker: address of the first machine", metavar="HOST:PORT"
    )
    machine: int = setting(0, "number of this machine in its site; 0, the first, dials the coordinator", minimum=0)
    machines: int = setting(1, "machines in the site", minimum=1, maximum=MAX_MACHINES)
    pace_s: float = setting(0.0, "minimum time of a local step", minimum=0, maximum=3600)


@dataclass(frozen=True)
class WatchSettings:
    """Settings of `onesweep train status`, and of `onesweep train work` for its coordinator."""

    coordinator: str = field(metadata=flag("", name="coordinator", metavar="HOST:PORT"))
    interval_s: float = setting(1.0, "minimum time between updates", name="--interval")
    once: bool = setting(False, "print one update and exit")
    patience_s: float = setting(
        PATIENCE_S, "how long to retry an unreachable coordinator", name="--patience", minimum=0, maximum=MAX_PATIENCE_S
    )
    json: bool = setting(False, "print each update as a line of JSON")
