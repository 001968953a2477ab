"""A profile whose workers have slow links towards their coordinator: far apart, and asymmetric as at home."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from loadtest.wan.link import Link
from loadtest.wan.profile import ROUTER, Override, Profile, node_names

NAME = "uplinks"


def with_uplinks(profile: Profile, workers: int, up_mbps: float | None) -> Profile:
    """:param up_mbps: of every link from a worker to the coordinator; None: as it is."""
    if up_mbps is None:
        return profile
    slow = []
    for node in node_names(workers)[1:]:
        link = profile.link(node, ROUTER)
        slow.append(Override(node, ROUTER, Link(**{**asdict(link), "rate_mbps": up_mbps})))
    return Profile(
        NAME,
        profile.description,
        profile.default,
        (*profile.overrides, *slow),
        profile.congestion,
        profile.slow_start_after_idle,
    )


def write_profile(profile: Profile, path: Path) -> None:
    """As `loadtest.wan.profile` reads it."""
    lines = [
        f"[{profile.name}]",
        f'congestion = "{profile.congestion}"',
        f"slow_start_after_idle = {int(profile.slow_start_after_idle)}",
        *_lines(profile.default),
    ]
    for override in profile.overrides:
        lines.append(f"[[{profile.name}.links]]")
        lines += [f'source = "{override.source}"', f'destination = "{override.destination}"', *_lines(override.link)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plan_options(profile: Profile, workers: int) -> list[str]:
    """What `onesweep plan` is told of these links: the slowest and the farthest of each kind."""
    nodes = node_names(workers)[1:]
    ups, downs = [profile.link(n, ROUTER) for n in nodes], [profile.link(ROUTER, n) for n in nodes]
    delay = max(link.delay_ms for link in (*ups, *downs))
    return ["--up-mbps", _rate(ups), "--down-mbps", _rate(downs), "--latency-ms", f"{delay:g}"]


def _rate(links: list[Link]) -> str:
    return f"{min(link.rate_mbps or 1e5 for link in links):g}"


def _lines(link: Link) -> list[str]:
    return [f"{name} = {value}" for name, value in asdict(link).items() if value is not None]
