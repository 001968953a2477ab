"""Settings of the processes of rounds, which are their commands' flags, and the speeds of their workers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.errors import ConfigError
from stages.settings import check, flag, setting
from stages.wire.tls import LOOPBACK_ONLY, Security

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig

# Modules that need torch are imported when a command runs, so nothing here may.

PROTOCOL = 4  # of rounds.proto; 3 had other sparse codecs, in 2 the coordinator made features, 1 had no incarnations
Fate = Literal["in time", "late", "lost"]
MAX_PACE_S = 3600.0
MAX_PATIENCE_S = 1e7
PATIENCE_S = 600.0
MOST_MACHINES = 64  # of a site
# What makes a virtual worker miss a round of those that pass features on to it.
ABSENT = ("in_time", "lost", "lie")


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of `onesweep train coordinate` beside those of the run."""

    listen: str = field(metadata=flag("", metavar="HOST:PORT"))
    out: Path = setting(Path("runs/chain"), "the checkpoint", metavar="DIR")
    own_data: bool = setting(False, "let workers bring other text than this")
    lease_s: float = setting(30.0, "silence after which a place is free", name="--lease", least=0.5, most=86400)
    # The last round is always published.
    publish_every: int = setting(10, "rounds between checkpoints", least=1)
    page: str | None = setting(None, "serve a page of the run there, for browsers", metavar="HOST:PORT")
    tokens: Path | None = setting(None, "who may work, from `onesweep token`")
    security: Security = LOOPBACK_ONLY


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of `onesweep train work`; without a flag are those that it finds out."""

    name: str
    state: Path  # A directory of this worker alone
    part: int | None = setting(None, "the part to train (default: whichever lacks a worker)", name="--block")
    wait: bool = setting(False, "where every place is taken, wait for one")
    save_every_s: float = setting(
        60.0, "between two saves in a round", name="--save-every", least=0, most=MAX_PATIENCE_S
    )
    device: str = "cpu"
    architecture: str = ""  # digest of the one that the run must have; empty = any
    site: str | None = setting(
        None, "work with other machines as one worker: where the first of them listens", metavar="HOST:PORT"
    )
    machine: int = setting(0, "number of this one at its site; 0 is the first, which dials the coordinator", least=0)
    machines: int = setting(1, "how many the site has", least=1, most=MOST_MACHINES)
    pace_s: float = setting(0.0, "what a local step takes at least", least=0, most=MAX_PACE_S)
    throttle: Throttle | None = None  # in place of one that has `pace_s`


@dataclass(frozen=True)
class WatchSettings:
    """Settings of `onesweep train status`; those of `onesweep train work` for its coordinator, too."""

    coordinator: str = field(metadata=flag("", name="coordinator", metavar="HOST:PORT"))
    interval_s: float = setting(1.0, "least time between two looks", name="--interval")
    once: bool = setting(False, "one look")
    patience_s: float = setting(
        PATIENCE_S, "how long to look for a coordinator that is away", name="--patience", least=0, most=MAX_PATIENCE_S
    )
    json: bool = setting(False, "a line of JSON for each look")


@dataclass(frozen=True)
class SimulatedWorkers:
    """Speeds and links of virtual workers, and the fate of their updates. Seconds are virtual."""

    step_s: float = setting(1.0, "seconds of a local step", above=0)
    # From the front again when there are more replicas.
    slowness: tuple[float, ...] = setting((1.0,), "times a replica takes longer, one by one", metavar="N[,N]", above=0)
    latency_s: float = setting(0.1, "of a message", above=0)
    up_mbps: float = setting(20.0, "of a worker's link", above=0)
    down_mbps: float = setting(100.0, "likewise", above=0)
    in_time: float = setting(1.0, "of the updates; others are late", metavar="SHARE", least=0, most=1)
    # In lengths of a round.
    late_rounds: float = setting(1.5, "by how many rounds", metavar="N", above=0)
    lost: float = setting(0.0, "of the updates that never come", metavar="SHARE", least=0, most=1)
    lie: float = setting(1.0, "times a liar's updates are too long; below 0 they point back", metavar="N")
    liars: int = setting(1, "of the last replicas", least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        if not self.slowness:
            raise ConfigError("slowness must be numbers above 0, not ()")
        if self.lost == 1:
            raise ConfigError("with lost = 1 no update ever comes")

    def check_run(self, config: TrainingConfig) -> None:
        """Raise ConfigError where such workers cannot train a run of these settings."""
        honest, lockstep = SimulatedWorkers(), config.rounds.deadline == "lockstep"
        absent = any(getattr(self, name) != getattr(honest, name) for name in ABSENT)
        if config.rounds.by_features and (absent or (len(set(self.slowness)) > 1 and not lockstep)):
            raise ConfigError(
                'virtual workers that read features are in every round: give deadline = "lockstep", '
                f'and leave out {", ".join(ABSENT)}; or context_by = "copies"'
            )

    def training_s(self, replica: int, steps: int) -> float:
        return steps * self.step_s * self._slowness(replica)

    def up_s(self, size: int) -> float:
        """A message of `size` bytes on its way to the coordinator."""
        return self.latency_s + size * 8e-6 / self.up_mbps

    def down_s(self, size: int) -> float:
        return self.latency_s + size * 8e-6 / self.down_mbps

    def fate(self, part: str, update: str) -> Fate:
        """Fate of an update, by its id: a pure function of the seed."""
        draw = random.Random(f"{self.seed} {part} {update}")
        if draw.random() < self.lost:
            return "lost"
        return "in time" if draw.random() < self.in_time else "late"

    def _slowness(self, replica: int) -> float:
        return self.slowness[replica % len(self.slowness)]


class Throttle:
    """Makes a worker's local steps as slow as on a slower machine, and counts them."""

    def __init__(self, pace_s: float = 0.0) -> None:
        """:param pace_s: what a step takes at least."""
        self.pace_s, self.steps = pace_s, 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one local step."""
        begin = time.monotonic()
        yield
        time.sleep(max(self.pace_s - (time.monotonic() - begin), 0.0))
        self.steps += 1
