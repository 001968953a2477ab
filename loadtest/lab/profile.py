"""Profiles: named sets of links of a whole network, read from TOML."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Self

from stages.errors import ConfigError, one_of
from stages.settings import Checked, from_toml, limits, read_toml

# A user's description of one directed link between two nodes.

MTU = 1500  # bytes of the largest IP packet on every link
DEFAULT_QUEUE_MS = 100.0


@dataclass(frozen=True)
class Link(Checked):
    """Delay, rate, queue and loss from one node to another. Raises ConfigError for impossible values."""

    delay_ms: float = field(default=0.0, metadata=limits(minimum=0, maximum=60_000))  # propagation, one way
    # Megabits (10^6) of IP packets per second; None for no limit.
    rate_mbps: float | None = field(default=None, metadata=limits(above=0, maximum=100_000))
    # Longest queue before packets are dropped; by default 100.
    queue_ms: float | None = field(default=None, metadata=limits(above=0))
    # Each packet's delay is drawn evenly from delay_ms +/- jitter_ms; order is kept.
    jitter_ms: float = field(default=0.0, metadata=limits(minimum=0))
    loss: float = field(default=0.0, metadata=limits(minimum=0, maximum=0.99))  # share lost before the queue

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter_ms > self.delay_ms:
            raise ConfigError(f"jitter_ms must be 0 to delay_ms ({self.delay_ms:g}), not {self.jitter_ms:g}")
        if self.queue_ms is not None and self.rate_mbps is None:
            raise ConfigError("queue_ms has no effect without rate_mbps: give both, or omit queue_ms")

    @property
    def queue_bytes(self) -> int | None:
        """Most bytes in the queue; None without a rate limit."""
        if self.rate_mbps is None:
            return None
        queue_ms = DEFAULT_QUEUE_MS if self.queue_ms is None else self.queue_ms
        return max(MTU, int(queue_ms * self.rate_mbps * 125))


SHIPPED = Path(__file__).with_name("profiles.toml")
MAX_HOSTS = 64
ROUTER = "router"


@dataclass(frozen=True)
class Profile:
    """The links of a network."""

    name: str
    default: Link
    links: dict[str, Link] = field(default_factory=dict)  # exceptions from the default, by their ends: "router host-2"
    gateways: Sequence[str] = ()  # hosts behind a gateway, which masquerades them and lets nothing in
    closed: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by node: the nodes whose connections it rejects

    def link(self, source: str, destination: str) -> Link:
        """The link from one node to another."""
        return self.links.get(f"{source} {destination}", self.default)

    def check_hosts(self, hosts: int) -> None:
        """Raises ConfigError unless a lab of `hosts` hosts has every node that the profile names."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise ConfigError(f"a lab must have 1 to {MAX_HOSTS} hosts, not {hosts}")
        nodes, others = node_names(hosts), chain(*self.closed.values())
        for name in (*" ".join(self.links).split(), *self.gateways, *self.closed, *others):
            if name not in nodes:
                raise ConfigError(
                    f"profile {self.name!r} names {name}, which a lab of {hosts} hosts does not have: "
                    f"use {name.removeprefix('host-')} hosts or more, or another profile"
                )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The inverse of `asdict`, by way of JSON. Raises KeyError, TypeError or ConfigError for anything else."""
        links = {ends: Link(**link) for ends, link in record["links"].items()}
        return cls(**{**record, "default": Link(**record["default"]), "links": links})


def node_names(hosts: int) -> tuple[str, ...]:
    """`router`, `host-1`, ..."""
    return (ROUTER, *(f"host-{i + 1}" for i in range(hosts)))


def profile_named(name: str, *others: str) -> Profile:
    """A shipped profile, or one from a file: FILE:NAME. Raises ConfigError that lists the file's and the others."""
    path, _, own = name.rpartition(":")
    profiles = read_profiles(Path(path) if path else SHIPPED)
    if own not in profiles:
        raise ConfigError(f"no profile {own!r}{one_of(own, [*others, *sorted(profiles)], 'available:')}")
    return profiles[own]


def read_profiles(path: Path = SHIPPED) -> dict[str, Profile]:
    """A file's profiles, by name. Raises ConfigError that names the file and the key."""
    tables = read_toml(path, "the profiles")
    return {name: _profile(name, table, f"{path}: profile {name!r}") for name, table in tables.items()}


@dataclass(frozen=True)
class _Entry(Link):
    """One of a profile's links, in the file's format."""

    between: tuple[str, ...] = ()  # both directions
    source: str = ""
    destination: str = ""

    def pairs(self, where: str) -> list[tuple[str, str]]:
        """One or two directed links. Raises ConfigError."""
        one = (self.source, self.destination)
        if bool(self.between) == any(one) or (any(one) and not all(one)):
            raise ConfigError(f'{where}: give between = ["router", "host-1"], or source and destination')
        ends = self.between or one
        if len(ends) != 2 or ends[0] == ends[1]:
            raise ConfigError(f"{where}: a link must have two different ends, not {list(ends)!r}")
        for name in ends:
            if name not in node_names(MAX_HOSTS):
                raise ConfigError(f"{where}: no node {name!r}; nodes are {ROUTER}, host-1 to host-{MAX_HOSTS}")
        first, second = ends
        return [(first, second)] if any(one) else [(first, second), (second, first)]


def _profile(name: str, table: object, where: str) -> Profile:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a section")
    rest = {**table}
    entries, gateways, closed = rest.pop("links", []), rest.pop("gateways", []), rest.pop("closed", {})
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: links must be sections [[{name}.links]]")
    default = from_toml(Link, rest, where)
    links = dict[str, Link]()
    for i, entry in enumerate(entries):  # a file states common values first, then exceptions
        place = f"{where}, link {i + 1}"
        # omitted values are those of the rest of the profile
        found = from_toml(_Entry, entry, place, _Entry(**vars(default)))
        link = Link(**{f.name: getattr(found, f.name) for f in fields(Link)})
        links |= {" ".join(pair): link for pair in found.pairs(place)}
    with suppress(TypeError, AttributeError):
        if {*gateways, *closed, *chain(*closed.values())} <= {*node_names(MAX_HOSTS)} and ROUTER not in gateways:
            return Profile(name, default, links, gateways, closed)
    raise ConfigError(f'{where}: write gateways = ["host-1"], and closed = {{ host-2 = ["router", "host-1"] }}')
