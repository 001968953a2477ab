"""Profiles: a name for the links of a whole network, read from TOML."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loadtest.wan.link import Link, ProfileError, check_number

SHIPPED = Path(__file__).with_name("profiles.toml")
DEFAULT_CONGESTION = "cubic"
MAX_HOSTS = 64
ROUTER = "router"

LINK_KEYS = {field.name for field in fields(Link)}
PROFILE_KEYS = {"description", "congestion", "slow_start_after_idle", "links"} | LINK_KEYS
OVERRIDE_KEYS = {"between", "source", "destination"} | LINK_KEYS


@dataclass(frozen=True)
class Override:
    """One directed link that differs from the profile's other links."""

    source: str
    destination: str
    link: Link


@dataclass(frozen=True)
class Profile:
    """The links of a network and how its nodes' TCP is set."""

    name: str
    description: str
    default: Link
    overrides: tuple[Override, ...] = ()
    """The last one that fits counts."""
    congestion: str = DEFAULT_CONGESTION
    """Congestion control of every node; the kernel must have it."""
    slow_start_after_idle: bool = True
    """Linux' default: a connection that was idle for a retransmission timeout starts with a small window again."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion):
            raise ProfileError(f"congestion must be a name such as {DEFAULT_CONGESTION!r}, not {self.congestion!r}")

    def link(self, source: str, destination: str) -> Link:
        """The link from one node to another."""
        for override in reversed(self.overrides):
            if (override.source, override.destination) == (source, destination):
                return override.link
        return self.default

    def check_hosts(self, hosts: int) -> None:
        """Raises ProfileError unless a lab of `hosts` hosts has every node that the profile names."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise ProfileError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        nodes = node_names(hosts)
        for override in self.overrides:
            for name in (override.source, override.destination):
                if name not in nodes:
                    raise ProfileError(
                        f"profile {self.name!r} has a link of {name}, which a lab of {hosts} hosts does not have: "
                        f"take {name.removeprefix('host-')} hosts or more, or another profile"
                    )

    def as_record(self) -> dict[str, Any]:
        """JSON values that `from_record` reads."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Profile:
        """The inverse of `as_record`. Raises KeyError, TypeError or ProfileError for anything else."""
        overrides = tuple(Override(o["source"], o["destination"], Link(**o["link"])) for o in record["overrides"])
        return cls(**{**record, "default": Link(**record["default"]), "overrides": overrides})


def node_names(hosts: int) -> tuple[str, ...]:
    """`router`, `host-1`, ..."""
    return (ROUTER, *(f"host-{i + 1}" for i in range(hosts)))


def read_profiles(path: Path | None = None) -> dict[str, Profile]:
    """The shipped profiles, and those of a file, which win. Raises ProfileError that names the file and the key."""
    profiles = _read(SHIPPED)
    if path is not None:
        profiles.update(_read(path))
    return profiles


def profile_named(name: str, path: Path | None = None) -> Profile:
    """One of `read_profiles`. Raises ProfileError that lists them."""
    profiles = read_profiles(path)
    if name not in profiles:
        raise ProfileError(f"no profile {name!r}; there are {', '.join(sorted(profiles))}")
    return profiles[name]


def _read(path: Path) -> dict[str, Profile]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read the profiles {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not TOML: {error}") from None
    try:
        return {name: _profile(name, table) for name, table in tables.items()}
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _profile(name: str, table: object) -> Profile:
    where = f"profile {name!r}"
    settings = _section(table, PROFILE_KEYS, where)
    description = settings.get("description", "")
    if not isinstance(description, str):
        raise ProfileError(f"{where}: description must be text in quotes, not {description!r}")
    congestion = settings.get("congestion", DEFAULT_CONGESTION)
    if not isinstance(congestion, str):
        raise ProfileError(f"{where}: congestion must be text in quotes, not {congestion!r}")
    slow_start = settings.get("slow_start_after_idle", 1)
    if slow_start not in (0, 1):
        raise ProfileError(f"{where}: slow_start_after_idle must be 0 or 1, not {slow_start!r}")
    entries = settings.get("links", [])
    if not isinstance(entries, list):
        raise ProfileError(f"{where}: links must be sections [[{name}.links]]")
    values = {key: value for key, value in settings.items() if key in LINK_KEYS}
    overrides = [o for i, entry in enumerate(entries) for o in _overrides(entry, values, f"{where}, link {i + 1}")]
    try:
        return Profile(name, description, Link(**values), tuple(overrides), congestion, bool(slow_start))
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _overrides(entry: object, defaults: dict[str, Any], where: str) -> list[Override]:
    """One or two directed links; what an entry does not say is as in the rest of its profile."""
    settings = _section(entry, OVERRIDE_KEYS, where)
    values = {key: value for key, value in settings.items() if key in LINK_KEYS}
    # A queue replaces a queue, whatever the units of the two.
    replaced = {"queue_ms", "queue_kb"} if {"queue_ms", "queue_kb"} & values.keys() else set()
    kept = {key: value for key, value in defaults.items() if key not in replaced}
    try:
        link = Link(**{**kept, **values})
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None
    return [Override(source, destination, link) for source, destination in _ends(settings, where)]


def _ends(settings: dict[str, Any], where: str) -> list[tuple[str, str]]:
    both = settings.get("between")
    one = [settings[key] for key in ("source", "destination") if key in settings]
    if (both is None) == (not one) or (one and len(one) != 2):
        raise ProfileError(f'{where}: say between = ["router", "host-1"], or source = and destination =')
    ends = both if one == [] else one
    if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
        raise ProfileError(f"{where}: a link has two different ends, not {ends!r}")
    for name in ends:
        if not isinstance(name, str) or name not in node_names(MAX_HOSTS):
            raise ProfileError(f"{where}: there is no node {name!r}; nodes are {ROUTER}, host-1 to host-{MAX_HOSTS}")
    first, second = ends
    return [(first, second)] if one else [(first, second), (second, first)]


def _section(table: object, known: set[str], where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ProfileError(f"{where} must be a section")
    unknown = sorted(set(table) - known)
    if unknown:
        raise ProfileError(f"{where} has an unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for key in sorted(LINK_KEYS & table.keys()):
        try:
            check_number(key, table[key])
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from None
    return table
