"""Settings of a block host, from which the flags of `onesweep host` derive. Help imports this module: no torch here."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.device import AUTO
from stages.limits import MAX_THREADS
from stages.settings import setting
from stages.telemetry.observability import ObservabilitySettings
from stages.wire.channel import DRAIN_S, KEEP_WARM_S, check_name
from stages.wire.tls import LOOPBACK_ONLY, Security

if TYPE_CHECKING:
    from stages.wire.pipes import AwaitedPipes

# Passes on the addresses of next hosts whenever they change; runs forever.
FollowNext = Callable[[Callable[[Sequence[str]], None]], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class HostSettings:
    """Limits of one stage server."""

    name: str
    # Pictures under way also use part of it.
    session_mb: int = setting(256, "memory for KV caches", above=0)
    # For the prefix cache, in addition to the memory of sessions.
    prefix_mb: int = setting(256, "memory for earlier prompts, 0 = off", minimum=0, rare=True)
    lease_s: float = setting(60.0, "free an unused session after", above=0, rare=True)
    # The host refuses one more.
    queue_limit: int = setting(64, "hops in flight", above=0, rare=True)
    # Limits messages of hops under way, until the next host has them; one more is refused. Their decoded contents take
    # up to four times as much in addition.
    queue_mb: int = setting(256, "memory for their messages", above=0, rare=True)
    batch: int = setting(64, "hops that share a pass; 1 = none", above=0, rare=True)
    # A name for `device_for`; caches are on this device, too.
    device: str = setting(
        AUTO,
        "where hosts compute and keep their caches",
        shown="auto: a GPU that computes the model, else the CPU",
        metavar="cpu|cuda[:N]",
    )
    # Pause between messages that keep an idle link's congestion window open.
    keep_warm_s: float = setting(KEEP_WARM_S, "pace on idle links, 0 = off", minimum=0, maximum=60, rare=True)
    # How long to wait for the next host's ack of a hop.
    hop_timeout_s: float = setting(5.0, "wait for the next host", above=0, rare=True)

    def __post_init__(self) -> None:
        check_name(self.name, "host name")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings that hosts and routers share."""

    threads: int | None = setting(None, "processor threads (all cores)", above=0, maximum=MAX_THREADS)
    security: Security = LOOPBACK_ONLY
    # The directory of releases deployed to this server; None: it accepts none.
    releases: Path | None = setting(None, "directory for deployed releases (none: accepts none)", metavar="DIR")
    # For probes, which have no certificate.
    health: str | None = setting(None, "also answer health checks at this address, in plain text", metavar="HOST:PORT")
    seeing: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    # How long a stopping server continues with the requests that it has begun.
    drain_s: float = setting(DRAIN_S, "time for running requests to finish", above=0, rare=True)
    signers: Path | None = setting(None, "file of public keys: accept only releases signed with one (any)", rare=True)


@dataclass(frozen=True)
class StageSettings(ServerSettings):
    checkpoint: Path
    blocks: tuple[int, ...]  # empty: the host waits for a stage
    listen: str
    next: tuple[str, ...]  # addresses of the hosts that may come after this one
    host: HostSettings
    # None: anyone who can dial it, or who has a certificate.
    tokens: Path | None = setting(None, "access tokens for callers on loopback: `up` makes them")
    follow_next: FollowNext | None = None
    parts: int | None = None  # blocks of the topology, if there is one
    model: Path | None = None  # a copy of the model on this machine, from which it takes its stage
    pipes: "AwaitedPipes | None" = None  # of a joined machine: others open them to this server
