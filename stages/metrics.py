"""A host's metrics: what they are, what counts them, and how they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from stages.expiry import Expiry
from stages.figures import COUNTS, Buckets, Family, Figures
from stages.meter import HostMeter, LinkMeter
from stages.refusal import Refusal
from stages.security import Tls
from stages.sessions import KINDS
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    from stages.engine import Job

MAX_LINKS = 64
"""Links with figures of their own; an address can come from a router, so their number must have an end."""
OTHERS = "others"
"""What the links beyond these are called."""

STAGE_METRICS = (
    Family("onesweep_stage_info", "gauge", "1, for its labels.", ("name", "version", "backend", "blocks")),
    Family("onesweep_stage_ready", "gauge", "Whether this host can take work."),
    Family("onesweep_stage_certificate_expiry_timestamp_seconds", "gauge", "When its certificate ends, Unix time."),
    Family("onesweep_stage_hop_queue_seconds", "histogram", "A hop's time here without its arithmetic.", ("model",)),
    Family("onesweep_stage_hop_compute_seconds", "histogram", "A hop's share of the passes it was in.", ("model",)),
    Family("onesweep_stage_received_bytes_total", "counter", "Size of the hops that were worked on.", ("model",)),
    Family("onesweep_stage_result_bytes_total", "counter", "Size of the results for routers.", ("model",)),
    Family("onesweep_stage_pass_hops", "histogram", "Hops that shared a pass."),
    Family("onesweep_stage_pass_rows", "histogram", "Positions computed in a pass."),
    Family("onesweep_stage_refused_total", "counter", "Hops not accepted, by gRPC code.", ("code",)),
    Family("onesweep_stage_faults_total", "counter", "Requests given up after acceptance, by gRPC code.", ("code",)),
    Family("onesweep_stage_queued_hops", "gauge", "Hops under way."),
    Family("onesweep_stage_queue_limit_hops", "gauge", "Hops under way at which the next is refused."),
    Family("onesweep_stage_sessions", "gauge", "Open sessions."),
    Family("onesweep_stage_session_bytes", "gauge", "Memory of their KV caches."),
    Family("onesweep_stage_session_limit_bytes", "gauge", "What all KV caches together may take."),
    Family("onesweep_stage_link_up", "gauge", "Whether the host there can be handed work.", ("address",)),
    Family("onesweep_stage_link_rtt_seconds", "gauge", "Round trip, quickest of the last few.", ("address",)),
    Family("onesweep_stage_link_handover_seconds", "histogram", "A hop's way until its receipt.", ("address",)),
    Family("onesweep_stage_link_sent_bytes_total", "counter", "Size of the hops that left.", ("address",)),
)


class LinkFigures(LinkMeter):
    """Counts what one link carries."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.handover_s = Buckets()

    def sent(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes

    def handed_over(self, seconds: float) -> None:
        self.handover_s.add(seconds)


class LinkTable:
    """Figures of each link, the first MAX_LINKS apart."""

    def __init__(self) -> None:
        self.links: dict[str, LinkFigures] = {}

    def link(self, address: str) -> LinkFigures:
        name = address if address in self.links or len(self.links) < MAX_LINKS else OTHERS
        return self.links.setdefault(name, LinkFigures())

    def keep(self, names: Collection[str]) -> dict[str, LinkFigures]:
        """The figures of these links; those of others are forgotten, so that new links find room."""
        self.links = {name: figures for name, figures in self.links.items() if name in names or name == OTHERS}
        return self.links


class ModelFigures:
    """What the hops of one model took."""

    def __init__(self) -> None:
        self.queue_s, self.compute_s = Buckets(), Buckets()
        self.received_bytes = self.result_bytes = 0


class HostFigures(HostMeter):
    """Counts what a host does."""

    def __init__(self) -> None:
        self.models = {kind: ModelFigures() for kind in KINDS}
        self.pass_hops, self.pass_rows = Buckets(COUNTS), Buckets(COUNTS)
        self.refusals: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.links = LinkTable()

    def link(self, address: str) -> LinkMeter:
        return self.links.link(address)

    def taken(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self.pass_hops.add(len(jobs))
            self.pass_rows.add(sum(job.work.rows for job in jobs if job.work is not None))

    def ended(self, job: Job) -> None:
        figures = self.models[job.session.kind]
        figures.received_bytes += job.received_bytes
        if isinstance(job.result, Refusal):
            return
        figures.queue_s.add(job.queue_ms / 1000)
        figures.compute_s.add(job.compute_ms / 1000)
        if isinstance(job.result, stage_pb2.Event):
            figures.result_bytes += job.result.ByteSize()

    def refused(self, refusal: Refusal) -> None:
        self.refusals[refusal.code.name] += 1

    def faulted(self, refusal: Refusal) -> None:
        self.faults[refusal.code.name] += 1

    def reader(
        self, describe: Callable[[], stage_pb2.DescribeResponse], tls: Tls | None = None
    ) -> Callable[[], Figures]:
        """What a scrape reads. `describe`: the state of the host, for what is not counted but looked up."""
        expiry = Expiry(tls)
        return lambda: self._read(describe(), expiry)

    def _read(self, host: stage_pb2.DescribeResponse, expiry: Expiry) -> Figures:
        models, counters = self.models, host.counters
        links = self.links.keep([link.address for link in host.links])
        described = {link.address: link for link in host.links[:MAX_LINKS]}
        blocks = ",".join(map(str, host.blocks))
        return {
            "onesweep_stage_info": {(host.name, host.version, host.backend, blocks): 1},
            "onesweep_stage_ready": {(): host.ready},
            "onesweep_stage_certificate_expiry_timestamp_seconds": expiry.rows(),
            "onesweep_stage_hop_queue_seconds": {(kind,): model.queue_s for kind, model in models.items()},
            "onesweep_stage_hop_compute_seconds": {(kind,): model.compute_s for kind, model in models.items()},
            "onesweep_stage_received_bytes_total": {(kind,): model.received_bytes for kind, model in models.items()},
            "onesweep_stage_result_bytes_total": {(kind,): model.result_bytes for kind, model in models.items()},
            "onesweep_stage_pass_hops": {(): self.pass_hops},
            "onesweep_stage_pass_rows": {(): self.pass_rows},
            "onesweep_stage_refused_total": {(code,): count for code, count in self.refusals.items()},
            "onesweep_stage_faults_total": {(code,): count for code, count in self.faults.items()},
            "onesweep_stage_queued_hops": {(): counters.queued},
            "onesweep_stage_queue_limit_hops": {(): counters.queue_limit},
            "onesweep_stage_sessions": {(): counters.sessions},
            "onesweep_stage_session_bytes": {(): counters.session_bytes},
            "onesweep_stage_session_limit_bytes": {(): counters.session_bytes_limit},
            "onesweep_stage_link_up": {
                (address,): link.rtt_ms > 0 and not link.problem for address, link in described.items()
            },
            "onesweep_stage_link_rtt_seconds": {
                (address,): link.rtt_ms / 1000 for address, link in described.items() if link.rtt_ms
            },
            "onesweep_stage_link_handover_seconds": {(name,): link.handover_s for name, link in links.items()},
            "onesweep_stage_link_sent_bytes_total": {(name,): link.sent_bytes for name, link in links.items()},
        }
