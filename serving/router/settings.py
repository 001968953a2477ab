"""Settings of a router, which define the flags of `onesweep router`. `--help` imports them: no torch here."""

from dataclasses import dataclass, field
from pathlib import Path

from serving.router.topology import Topology
from serving.router.topology_source import TopologySource
from stages.host.settings import ServerSettings
from stages.settings import setting
from stages.wire.channel import KEEP_WARM_S


@dataclass(frozen=True)
class AdmissionSettings:
    """Limits of a router."""

    request_limit: int = setting(64, "requests in flight", name="--max-requests", above=0)
    # Rate at which admitted requests start.
    requests_per_s: int = setting(1000, "requests started per second", above=0, rare=True)
    queue_limit: int = setting(16, "waiting requests; 0 = refuse at once", minimum=0, rare=True)
    # A request that would wait longer is refused at once.
    queue_wait_s: float = setting(2.0, "maximum wait", above=0, rare=True)


@dataclass(frozen=True)
class RingSettings:
    # How long to wait for a host's ack or description, and for lost hosts to come back.
    hop_timeout_s: float = setting(5.0, "wait for a host", above=0, rare=True)
    # Pause between the messages that keep an idle link's congestion window open.
    keep_warm_s: float = setting(KEEP_WARM_S, "pace on idle links, 0 = off", minimum=0, maximum=60, rare=True)
    audit_share: float = setting(0.0, "share of answers to audit", minimum=0, maximum=1, rare=True)


@dataclass(frozen=True)
class RouterSettings(ServerSettings):
    topology: Topology
    listen: str
    # None = no mode `local`.
    checkpoint: Path | None = setting(None, "bundle with the local model, for mode `local`", metavar="DIR")
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    ring: RingSettings = field(default_factory=RingSettings)
    # None = anyone may send requests, on a loopback address or with `anybody`.
    tokens: Path | None = setting(None, "access tokens, from `onesweep token`")
    routers: int = setting(1, "routers that share these tokens: each grants its share of a quota", above=0, rare=True)
    anybody: bool = setting(False, "serve other machines without tokens: anybody may send requests")
    frontier: Path | None = setting(None, "file: what mode `auto` chooses from (the bundle's frontier.json)", rare=True)
    source: TopologySource | None = None  # source of the topology, which may change while the router runs
