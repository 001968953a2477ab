"""What `onesweep bench rounds` is told, and what can be wrong with it before anything is trained."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.target import LOOPBACK
from loadtest.rounds_bench.difference import MAX_SEEDS
from loadtest.wan.lab import lab_problem
from loadtest.wan.profile import profile_named
from stages.errors import InputError, OnesweepError

MOST_PACE_S = 3600.0
SIX = Path(__file__).with_name("six.toml")


@dataclass(frozen=True)
class RoundsBench:
    """What is trained, where, and how often."""

    config: Path = SIX
    data: Path | None = None
    """None: the text that ships with Python."""
    profile: str = "links-60"
    """Of the links between workers and coordinator; `loopback`: no lab."""
    profiles: Path | None = None
    up_mbps: float | None = 20.0
    """Of each worker's link to the coordinator; None: as the profile has it."""
    pace_s: float = 0.4
    """What a local step takes at least: workers that share cores rest until then, as slower machines would compute."""
    seeds: tuple[int, ...] = (0,)
    within_s: float = 3600.0
    """Seconds after which one run is given up."""


def check_bench(bench: RoundsBench) -> None:
    """Raises OnesweepError."""
    if not bench.seeds or len(set(bench.seeds)) < len(bench.seeds) or min(bench.seeds) < 0:
        raise InputError(f"--seeds must be different whole numbers of at least 0, not {bench.seeds}")
    if len(bench.seeds) > MAX_SEEDS:
        raise InputError(f"--seeds takes at most {MAX_SEEDS}, not {len(bench.seeds)}")
    if bench.up_mbps is not None and not 0 < bench.up_mbps <= 1e5:
        raise InputError(f"--up-mbps must be more than 0 and at most 100000, not {bench.up_mbps:g}")
    if not 0 <= bench.pace_s <= MOST_PACE_S:
        raise InputError(f"--pace-s must be from 0 to {MOST_PACE_S:g} seconds, not {bench.pace_s:g}")
    if not 1 <= bench.within_s <= 1e6:
        raise InputError(f"--within-s must be from 1 to 1000000 seconds, not {bench.within_s:g}")
    try:
        settings = tomllib.loads(bench.config.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {bench.config}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{bench.config} is not TOML: {error}") from None
    if "seed" in settings:
        raise InputError(f"{bench.config} has a seed; leave it out, --seeds says it")
    if bench.profile == LOOPBACK:
        return
    profile_named(bench.profile, bench.profiles)
    if problem := lab_problem():
        raise OnesweepError(problem)
