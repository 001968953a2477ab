"""Settings of a router, from which the flags of `onesweep router` derive. Help imports them: no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from serving.router.topology import Topology
from stages.errors import InputError
from stages.host.settings import pause
from stages.settings import setting
from stages.telemetry.observability import ObservabilitySettings
from stages.wire.channel import DRAIN_S, KEEP_WARM_S
from stages.wire.registry import RegistrySettings
from stages.wire.tls import LOOPBACK_ONLY, Security

MAX_PIECES = 16  # as prefill.MAX_PREFILL_CHUNKS, which this module must not import


def _waiting(text: str) -> int:
    if (count := int(text)) < 0:
        raise InputError(f"--max-waiting must be 0 or more, not {count}")
    return count


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) <= 1:
        raise InputError(f"--audit must be 0 (off) to 1 (every answer), not {share}")
    return share


# argparse says "invalid int value: 'x'" by these names.
_waiting.__name__ = "int"
_share.__name__ = "float"


@dataclass(frozen=True)
class AdmissionSettings:
    """Limits of a router."""

    request_limit: int = setting(64, "requests in flight", name="--max-requests", above=0)
    # Pace at which admitted requests start.
    requests_per_s: int = setting(1000, "requests started a second", name="--max-rate", above=0, metavar="R")
    # 0 = refuse at once.
    queue_limit: int = setting(16, "waiting requests", name="--max-waiting", type=_waiting, metavar="N")
    # A request that would wait longer is refused at once.
    queue_wait_s: float = setting(2.0, "longest wait", name="--max-wait-s", above=0, metavar="S")


@dataclass(frozen=True)
class RingSettings:
    """Settings of a ring."""

    # How long to wait for a host's receipt, or description, and for hosts that are lost to come back.
    hop_timeout_s: float = setting(5.0, "wait for a host", above=0)
    # Pause between messages that keep an idle link's congestion window open.
    keep_warm_s: float = setting(
        KEEP_WARM_S, "pace on idle links, 0 = off", name="--keep-warm-ms", shown="150", metavar="MS", type=pause
    )
    audit_share: float = setting(0.0, "answers to audit, 0 to 1", name="--audit", type=_share, metavar="SHARE")
    # Hops that a long step is sent in at most; 1 only shows what pieces are worth.
    pieces: int = MAX_PIECES
    # Hosts may keep the beginnings of prompts; False only shows what that is worth.
    memory: bool = True


@dataclass(frozen=True)
class RouterSettings:
    """Settings of `onesweep router`."""

    topology: Topology
    listen: str
    # None = no mode `local`.
    checkpoint: Path | None = setting(None, "bundle with the local model, for mode `local`", metavar="DIR")
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    ring: RingSettings = field(default_factory=RingSettings)
    threads: int | None = setting(None, "processor threads (default: all cores)", above=0)
    security: Security = LOOPBACK_ONLY
    # None = anybody may ask, on a loopback address or with `anybody`.
    tokens: Path | None = setting(None, "who may ask, from `onesweep token`")
    routers: int = setting(1, "routers for these tokens: each grants its share of a quota", above=0)
    anybody: bool = setting(False, "serve other machines without tokens: they may all ask")
    # None = nothing can be deployed.
    shelf: Path | None = setting(None, "keep what is deployed there (none: takes nothing)", metavar="DIR")
    signers: Path | None = setting(None, "deploy only what a public key in it has signed", shown="anything")
    frontier: Path | None = setting(None, "what mode `auto` chooses from (the bundle's frontier.json)")
    # For probes, which have no certificate.
    health: str | None = setting(None, "answer health checks there too, in plain text", metavar="HOST:PORT")
    # Where hosts register; None = they are those of the topology.
    registry: RegistrySettings | None = None
    seeing: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    # Time for requests under way.
    drain_s: float = setting(DRAIN_S, "time for running requests to end", above=0)
