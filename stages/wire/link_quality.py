"""Knowledge of links: their kinds between joined machines; round trips, rate and settings for the doctor."""

import json
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stages.clock import monotonic
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay
from stages.wire.links import RELAYED

SETTINGS = Path("/proc/sys/net/ipv4")
EXCHANGES = 9  # of small messages, and of states: a busy host delays some of them, but not all
TRANSFERS = 3
MAX_PROBE_BYTES = 1 << 20
PROBE_TIMEOUT_S = 20.0
LINKS_NAME = "links.json"  # in a run's directory: the rendezvous' record for other processes on the router's machine


@dataclass(frozen=True)
class LinkRecord:
    """The links of a run, as recorded by its rendezvous for other processes on its machine."""

    proxy: str = ""  # address of the proxy that dials machines
    kinds: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by the two machines of a link
    ports: Mapping[str, str] = field(default_factory=dict)  # an address at which each machine listens
    advice: tuple[str, ...] = ()
    relayed_bytes: Mapping[frozenset[str], int] = field(default_factory=dict)  # by the two machines of a link

    @classmethod
    def read(cls, directory: Path | None) -> Self:
        """The record in the directory of a run; an empty one if there is none."""
        try:
            record = json.loads((directory / LINKS_NAME).read_text(encoding="utf-8")) if directory else {}
            kinds = {(here, there): kind for here, there, kind in record.get("links", ())}
            relayed_bytes = {frozenset(pair): size for *pair, size in record.get("relayed_bytes", ())}
            advice = tuple(record.get("advice", ()))
            return cls(record.get("proxy", ""), kinds, record.get("ports", {}), advice, relayed_bytes)
        except (OSError, ValueError):
            return cls()

    def advice_on(self, links: Iterable[tuple[str, str]], trips_ms: Mapping[str, float]) -> list[str]:
        """Changes that would help, a line for each pair of machines that are linked only over the router.

        :param links: links of the ring.
        :param trips_ms: from the router to each machine. The farther machine is about as far from the other machine as
            from the router, so the detour over the router costs the nearer machine's trip."""
        lines = [*self.advice]
        relayed = {tuple(sorted(pair)) for pair in links if self.kinds.get(pair) == RELAYED}
        for pair in sorted(relayed):
            ports = [f"TCP {self.ports[name].rpartition(':')[2]} on {name}" for name in pair if name in self.ports]
            saved_ms = min(trips_ms[name] for name in pair)
            remedy = f"open {' or '.join(ports) or 'a port'} to save about {saved_ms:.0f} ms a trip"
            lines.append(f"{' and '.join(pair)} relay through the router: {remedy}")
        return lines


def kernel_now() -> stage_pb2.Kernel:
    """TCP settings of this machine, or of the network namespace that this process is in."""
    return stage_pb2.Kernel(
        system=f"{platform.system()} {platform.release()}",
        congestion_control=_setting("tcp_congestion_control"),
        slow_start_after_idle=_setting("tcp_slow_start_after_idle"),
    )


async def measure_link(relay: Relay, state_bytes: int, rate_bytes: int, receive: bool = False) -> stage_pb2.LinkQuality:
    """Round trips and rate of a link. The quickest state counts, as a delay of the link also delays that one.

    :param state_bytes: size of the largest usual state.
    :param rate_bytes: sent once to open the congestion window, then several times for the rate: the best counts.
    :param receive: measure the rate from the other side to this one.
    Raises AioRpcError.
    """
    await _exchange(relay, 0)
    pings, states, rates = list[float](), list[float](), list[float]()
    for _ in range(EXCHANGES):  # alternate, so that other load delays both alike
        pings.append(await _exchange(relay, 0))
        states.append(await _exchange(relay, state_bytes))
    for _ in range(TRANSFERS):
        elapsed_ms = await _exchange(relay, 0, rate_bytes) if receive else await _exchange(relay, rate_bytes)
        rates.append(rate_bytes * 8 / 1000 / max(elapsed_ms - min(pings), 0.001))
    return stage_pb2.LinkQuality(
        address=relay.address,
        rtt_ms=statistics.median(pings),
        rtt_min_ms=min(pings),
        state_ms=min(states),
        rate_mbps=max(rates),
    )


async def _exchange(relay: Relay, size: int, reply_bytes: int = 0) -> float:
    """Milliseconds for one message and its answer."""
    request = stage_pb2.WarmRequest(padding=bytes(size), reply_bytes=reply_bytes)
    begin = monotonic()
    await relay.stub.Warm(request, timeout=PROBE_TIMEOUT_S)
    return (monotonic() - begin) * 1000


def _setting(name: str) -> str:
    try:
        return (SETTINGS / name).read_text().strip()
    except OSError:
        return ""
