"""Settings of the command `bench chaos`, which are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.settings import setting


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """A deployment, a load, and what happens to them."""

    minutes: float = setting(10.0, "Minutes of load", metavar="M", above=0, most=7 * 24 * 60)
    profile: str = setting(
        "links-60", "Links between the machines; loopback needs no root, and cannot be cut", metavar="P"
    )
    profiles: Path | None = setting(None, "file with more profiles")
    seed: int = setting(0, "Seed for the fault schedule and the prompts", metavar="S", least=0, most=(1 << 32) - 1)
    length_scale: float = 1.0  # of every fault's length: below 1 a test takes less time
    checkpoint: Path | None = setting(None, "Bundle to serve", shown="the shipped weights", metavar="DIR")
    requests_at_once: int = 4
    patience_s: float = 60.0  # after which a client gives a request up
    warm_up_s: float = 5.0  # of load before the first fault
    simulate: bool = setting(False, "A tiny model in virtual time: schedules of faults, drawn from --seed and after")
    schedules: int = setting(1000, "With --simulate: how many", least=1, most=10_000_000)

    @property
    def seconds(self) -> float:
        return self.minutes * 60
