"""A host's metrics: their families, the counters, and the values for a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stages.host.plan import MODEL_KINDS
from stages.telemetry.prometheus import COUNTS, Histogram, MetricFamily, MetricValues
from stages.v1 import stage_pb2
from stages.wire.hop_stream import LinkObserver
from stages.wire.status import StatusError

if TYPE_CHECKING:
    from stages.host.scheduler import ScheduledHop

MAX_LINKS = 64  # links with counters of their own. Routers choose the addresses, so the number must be bounded.
OTHERS = "others"  # the label of the links beyond these

PREFIX = "onesweep_stage_"
_family = partial(MetricFamily.under, PREFIX)
STAGE_METRICS = (
    _family("info", "gauge", "1, for its labels.", "name", "version", "backend", "blocks"),
    _family("ready", "gauge", "Whether this host accepts work."),
    _family("certificate_expiry_timestamp_seconds", "gauge", "Expiry of its certificate, Unix time."),
    _family("hop_queue_seconds", "histogram", "Time of a hop on this host, without compute.", "model"),
    _family("hop_compute_seconds", "histogram", "Compute time of a hop: its share of its passes.", "model"),
    _family("received_bytes_total", "counter", "Bytes of the hops processed.", "model"),
    _family("result_bytes_total", "counter", "Bytes of the results for routers.", "model"),
    _family("pass_hops", "histogram", "Hops in a pass."),
    _family("pass_rows", "histogram", "Positions computed in a pass."),
    _family("refused_total", "counter", "Refused hops of running requests, by gRPC code.", "code"),
    _family("faults_total", "counter", "Requests that failed after acceptance, by gRPC code.", "code"),
    _family("queued_hops", "gauge", "Hops in flight."),
    _family("queue_limit_hops", "gauge", "Hops in flight at which the next is refused."),
    _family("sessions", "gauge", "Open sessions."),
    _family("session_bytes", "gauge", "Memory of their KV caches."),
    _family("session_limit_bytes", "gauge", "Limit on the memory of all KV caches."),
    _family("prefix_bytes", "gauge", "Memory of the prefix cache."),
    _family("prefix_limit_bytes", "gauge", "Limit on the memory of the prefix cache."),
    _family("prefix_hits_total", "counter", "Sessions that began with a cached prefix."),
    _family("prefix_positions_total", "counter", "Positions taken from the prefix cache."),
    _family("link_up", "gauge", "Whether the host there accepts work.", "address"),
    _family("link_rtt_seconds", "gauge", "Round trip, fastest of the last few.", "address"),
    _family("link_handover_seconds", "histogram", "Time from sending a hop to its own ack.", "address"),
    _family("link_sent_bytes_total", "counter", "Bytes of the hops sent.", "address"),
)


class LinkCounters(LinkObserver):
    def __init__(self) -> None:
        self.sent_bytes = 0
        self.handover_s = Histogram()

    def sent(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes

    def handed_over(self, seconds: float) -> None:
        self.handover_s.add(seconds)


class LinkTable:
    """Counters of each link, the first MAX_LINKS by address."""

    def __init__(self) -> None:
        self.links: dict[str, LinkCounters] = {}

    def link(self, address: str) -> LinkCounters:
        name = address if address in self.links or len(self.links) < MAX_LINKS else OTHERS
        return self.links.setdefault(name, LinkCounters())

    def keep(self, names: Collection[str]) -> dict[str, LinkCounters]:
        """The counters of these links; all others are dropped to make room for new links."""
        self.links = {name: link for name, link in self.links.items() if name in names or name == OTHERS}
        return self.links


class ModelCounters:
    """Time and bytes of the hops of one model."""

    def __init__(self) -> None:
        self.queue_s, self.compute_s = Histogram(), Histogram()
        self.received_bytes = self.result_bytes = 0


class HostCounters:
    """Counters of a host. `taken` is called on the compute thread, all else on the event loop."""

    def __init__(self, links: LinkTable) -> None:
        self.models = {kind: ModelCounters() for kind in MODEL_KINDS}
        self.links, self.completed = links, 0
        self.pass_hops, self.pass_rows = Histogram(COUNTS), Histogram(COUNTS)
        self.refusals: Counter[str] = Counter()  # by code, like faults
        self.faults: Counter[str] = Counter()

    def taken(self, jobs: Sequence[ScheduledHop]) -> None:
        if jobs:
            self.pass_hops.add(len(jobs))
            self.pass_rows.add(sum(job.work.rows for job in jobs))

    def ended(self, job: ScheduledHop) -> None:
        model = self.models[job.session.kind]
        model.received_bytes += job.received_bytes
        if isinstance(job.result, StatusError):
            return
        self.completed += 1
        model.queue_s.add(job.queue_ms / 1000)
        model.compute_s.add(job.compute_ms / 1000)
        event = job.work.result or job.result  # `work.result` if the hop's outcome begins the next step
        if isinstance(event, stage_pb2.Event):
            model.result_bytes += event.ByteSize()

    def read(self, host: stage_pb2.DescribeResponse) -> MetricValues:
        """Values for a scrape. `host`: the state that is read rather than counted."""
        models, counters = self.models, host.counters
        links = self.links.keep([link.address for link in host.links])
        described = {link.address: link for link in host.links[:MAX_LINKS]}
        blocks = ",".join(map(str, host.blocks))
        values: MetricValues = {
            "info": {(host.name, host.version, host.backend, blocks): 1},
            "ready": {(): host.ready},
            "certificate_expiry_timestamp_seconds": {(): until_s} if (until_s := host.certificate_until_s) else {},
            "hop_queue_seconds": {(kind,): model.queue_s for kind, model in models.items()},
            "hop_compute_seconds": {(kind,): model.compute_s for kind, model in models.items()},
            "received_bytes_total": {(kind,): model.received_bytes for kind, model in models.items()},
            "result_bytes_total": {(kind,): model.result_bytes for kind, model in models.items()},
            "pass_hops": {(): self.pass_hops},
            "pass_rows": {(): self.pass_rows},
            "refused_total": {(code,): count for code, count in self.refusals.items()},
            "faults_total": {(code,): count for code, count in self.faults.items()},
            "queued_hops": {(): counters.queued},
            "queue_limit_hops": {(): counters.queue_limit},
            "sessions": {(): counters.sessions},
            "session_bytes": {(): counters.session_bytes},
            "session_limit_bytes": {(): counters.session_bytes_limit},
            "prefix_bytes": {(): counters.prefix_bytes},
            "prefix_limit_bytes": {(): counters.prefix_bytes_limit},
            "prefix_hits_total": {(): counters.prefix_hits},
            "prefix_positions_total": {(): counters.prefix_positions},
            "link_up": {(address,): link.rtt_ms > 0 and not link.problem for address, link in described.items()},
            "link_rtt_seconds": {(address,): link.rtt_ms / 1000 for address, link in described.items() if link.rtt_ms},
            "link_handover_seconds": {(name,): link.handover_s for name, link in links.items()},
            "link_sent_bytes_total": {(name,): link.sent_bytes for name, link in links.items()},
        }
        return {PREFIX + name: rows for name, rows in values.items()}
