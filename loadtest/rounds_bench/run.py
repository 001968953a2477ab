"""One training over the links: real commands in a lab's nodes, watched until they end."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.load.target import LOOPBACK
from loadtest.rounds_bench.settings import RoundsBench
from loadtest.rounds_bench.timeline import Busy, busy_shares, round_seconds, step_seconds
from loadtest.rounds_bench.uplinks import NAME, with_uplinks, write_profile
from loadtest.training.stand import Stand, StandSettings, open_stand
from loadtest.training.view import View
from loadtest.wan.profile import profile_named
from stages.errors import OnesweepError

LEASE_S = 15.0
"""A worker tells its figures three times a lease."""
PUBLISH_EVERY = 1_000_000
"""Rounds: a checkpoint is written once, when the run is over."""


@dataclass(frozen=True)
class NetworkRun:
    """What one run came to."""

    next_byte: float
    """Validation loss in nats, of the last block's head."""
    round_s: float
    step_s: float
    """Of a local step, as it was on the machine that all workers share."""
    busy: list[Busy]
    payload_bytes: int
    """As the coordinator counts: pieces of updates and of weights."""
    link_bytes: int | None
    """As the lab's links count, both ways, headers and acknowledgements among it; None where they do not count."""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def run_over_links(bench: RoundsBench, seed: int, workers: tuple[int, ...], steps_per_round: int) -> NetworkRun:
    """:param workers: the part of each. Raises OnesweepError."""
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        directory = Path(folder)
        with open_stand(_stand_settings(bench, seed, workers, directory)) as stand:
            return _figures(stand, _followed(stand, bench.within_s), steps_per_round)


def seeded_config(bench: RoundsBench, seed: int, directory: Path) -> Path:
    """The settings with a seed, which a TOML file has before its first section."""
    path = directory / f"seed-{seed}.toml"
    path.write_text(f"seed = {seed}\n" + bench.config.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def _stand_settings(bench: RoundsBench, seed: int, workers: tuple[int, ...], directory: Path) -> StandSettings:
    profile, profiles = bench.profile, bench.profiles
    if profile != LOOPBACK and bench.up_mbps is not None:
        profiles = directory / "profiles.toml"
        write_profile(with_uplinks(profile_named(profile, bench.profiles), len(workers), bench.up_mbps), profiles)
        profile = NAME
    config = seeded_config(bench, seed, directory)
    return StandSettings(
        config,
        bench.data,
        workers,
        profile,
        profiles,
        lease_s=LEASE_S,
        publish_every=PUBLISH_EVERY,
        worker_options=("--pace-s", str(bench.pace_s)),
    )


def _followed(stand: Stand, within_s: float) -> list[View]:
    """Every view of the run, the last one of its end, when all its processes have ended."""
    seen: list[View] = []

    def looked() -> bool:
        """Whether what is seen is the end."""
        stand.check()
        view = stand.watch.last if stand.watch is not None else None
        if view is not None and (not seen or view.at_s != seen[-1].at_s):
            seen.append(view)
        return view is not None and view.finished

    # who watches finds a coordinator at the first try, and so before any worker is ready to train
    stand.coordinator.start()

    def begun() -> bool:
        stand.check()
        return bool(stand.journal.entries)

    stand.wait_until(begun, within_s)
    stand.start()
    if not stand.wait_until(looked, within_s) or not stand.wait_end(within_s):
        raise OnesweepError(f"the run has not ended after {within_s:.0f} s: {stand.coordinator.last_words()}")
    return seen


def _figures(stand: Stand, views: list[View], steps_per_round: int) -> NetworkRun:
    shares = busy_shares(views, steps_per_round)
    round_s = round_seconds(stand.journal.entries)
    if not shares or round_s is None:
        raise OnesweepError("the run was over before it could be watched: give it more steps")
    lab = stand.ground.lab
    counters = lab.counters() if lab is not None else {}
    metrics = json.loads((stand.out / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    return NetworkRun(
        next_byte=metrics["valid"]["next_byte"],
        round_s=round_s,
        step_s=step_seconds(shares),
        busy=shares,
        payload_bytes=views[-1].received_bytes + views[-1].sent_bytes,
        link_bytes=sum(counts["carried_bytes"] for counts in counters.values()) or None,
    )
