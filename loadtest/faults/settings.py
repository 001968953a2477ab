"""Settings of the commands `bench chaos` and `bench chaos-training`, and their flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.settings import setting

ROUNDS_A_MINUTE = 10  # of the run that ships: about what two cores make, faults included
SHIPPED_RUN = Path(__file__).with_name("run.toml")
MINUTES: dict[str, Any] = {"metavar": "M", "above": 0, "most": 7 * 24 * 60}


@dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """A run, and what happens to it."""

    minutes: float = setting(10.0, "Minutes of load", **MINUTES)
    profile: str = setting(
        "links-60", "Links between the machines; loopback needs no root, and cannot be cut", metavar="P"
    )
    profiles: Path | None = setting(None, "file with more profiles")
    seed: int = setting(0, "Seed for the fault schedule and the prompts", metavar="S", least=0, most=(1 << 32) - 1)
    faults: tuple[str, ...] | None = setting(
        None, "Kinds, such as kill,freeze", shown="all that can be done", metavar="F[,F]"
    )
    count: int | None = setting(
        None, "Number of faults", shown="some each minute, each kind at least once", metavar="N", above=0, most=10_000
    )
    length_scale: float = 1.0  # of every fault's length: below 1 a test takes less time


@dataclass(frozen=True, kw_only=True)
class ChaosSettings(FaultSettings):
    """A deployment, a load, and what happens to them."""

    checkpoint: Path | None = setting(None, "Bundle to serve", shown="the shipped weights", metavar="DIR")
    requests_at_once: int = setting(4, "Requests under way at any time", above=0, most=1000)
    patience_s: float = 60.0  # after which a client gives a request up
    routers: int = setting(1, "Routers in front of the hosts; clients of two continue at the other", least=1, most=2)
    warm_up_s: float = 5.0  # of load before the first fault
    simulate: bool = setting(False, "A tiny model in virtual time: schedules of faults, drawn from --seed and after")
    schedules: int = setting(1000, "With --simulate: how many", least=1, most=10_000_000)

    @property
    def seconds(self) -> float:
        return self.minutes * 60


@dataclass(frozen=True)
class RunFile:
    """The settings of a training that a testbed must know."""

    text: str
    rounds: int
    parts: int
    replicas: int
    model: str
    fragments: int

    @property
    def workers(self) -> tuple[int, ...]:
        """The part of each."""
        return tuple(part for part in range(self.parts) for _ in range(self.replicas))

    @classmethod
    def read(cls, path: Path | None, minutes: float) -> RunFile:
        """A file, or the run that ships with as many rounds as `minutes` have room for. Raises InputError."""
        from trainer.blocks.config import load_config

        config = load_config(path or SHIPPED_RUN)
        text = (path or SHIPPED_RUN).read_text(encoding="utf-8")
        rounds, parts = config.rounds, config.architecture.parts
        count = rounds.count(config.steps)
        if path is None:
            # the section [rounds] is the last of the run that ships
            count = max(round(minutes * ROUNDS_A_MINUTE), 2)
            text = f"{text.rstrip()}\nrounds = {count}\n"
        parts = 1 if rounds.model == "ar" else parts
        return cls(text, count, parts, rounds.replicas, rounds.model, rounds.fragments)


@dataclass(frozen=True, kw_only=True)
class TrainingChaosSettings(FaultSettings):
    """A training, and what happens to it."""

    minutes: float = setting(20.0, "Minutes that the run that ships is to take, over all seeds", **MINUTES)
    # the loss of one run says little: each is compared with the same run without faults
    seeds: tuple[int, ...] = setting((0, 1, 2), "Seeds of the training, each with and without faults", metavar="N[,N]")
    config: Path | None = setting(None, "Settings of a run of your own", shown="the run that ships", metavar="FILE")
    data: Path | None = setting(None, "UTF-8 text", shown="Python's docs", metavar="PATH")
    lease_s: float = 6.0
    patience_s: float = 300.0  # seconds without progress after which the run is given up

    def runs(self) -> list[TrainingChaosSettings]:
        """One for each seed, which have the minutes together."""
        minutes, first = self.minutes / len(self.seeds), self.seed
        return [replace(self, seeds=(s,), minutes=minutes, seed=first + i) for i, s in enumerate(self.seeds)]
