"""A request's record: its name in logs, metrics and on hosts, and the numbers reported at its end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import grpc

from serving.modes import DRAWING_MODES, MODES, metric_mode
from serving.router.accounting import JITTER_S, Account, RequestContext
from serving.v1 import router_pb2
from stages.clock import monotonic
from stages.host.metrics import MAX_LINKS, LinkTable
from stages.telemetry.prometheus import Histogram, MetricFamily, MetricValues
from stages.wire.status import REQUEST_KEY, StatusError

log = logging.getLogger(__name__)

# Name for any mode that does not exist: no client's invention becomes a label or part of a log.
UNKNOWN_MODE = "unknown"


class RequestRecord(RequestContext, AbstractContextManager["RequestRecord"]):
    """One request in logs and metrics, used in a `with` block and closed however the block ends."""

    def __init__(self, mode: str, due_at: float, counters: RouterCounters) -> None:
        """:param mode: an existing mode, or UNKNOWN_MODE.
        :param due_at: its deadline, by the monotonic clock."""
        self.mode, self.due_at = mode, due_at
        self.name = secrets.token_hex(8)
        self.metadata = ((REQUEST_KEY, self.name),)
        self._begin = monotonic()
        self.account = Account(self)
        self.summary: router_pb2.Summary | router_pb2.DrawSummary | None = None  # once the request is done
        self.code = grpc.StatusCode.OK
        self._reason = ""
        self._counters = counters

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.due_at - monotonic()

    @property
    def age_ms(self) -> float:
        return (monotonic() - self._begin) * 1000

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        account, ms = self.account, self.age_ms
        self._counters.ended(self)
        log.info(
            "request %s %s %s: %d bytes, %d sweeps, %.1f ms%s",
            *(self.name, self.mode, self.code.name, account.output_bytes, account.sweeps, ms),
            f" ({self._reason})" if self._reason else "",
            extra={
                "request": self.name,
                "mode": self.mode,
                "code": self.code.name,
                "ms": round(ms, 3),
                "sweeps": account.sweeps,
                "bytes": account.output_bytes,
            },
        )

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StatusError):
            self.code = error.code
            # an error about a wrong field may quote it, and clients' content is never logged
            self._reason = "" if error.code is grpc.StatusCode.INVALID_ARGUMENT else error.message
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            late = monotonic() >= self.due_at - JITTER_S
            self.code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        else:
            self.code = grpc.StatusCode.UNKNOWN


# The router's metrics: definitions, counting and reading.

# Request costs summed by mode: middle of the metric's name, help text, the account's number.
COSTS: tuple[tuple[str, str, Callable[[Account], float]], ...] = (
    ("output_bytes", "Text written, pixels drawn.", lambda account: account.output_bytes),
    ("output_tokens", "Output in the model's tokens.", lambda account: account.output_tokens),
    ("prompt_tokens", "Prompt tokens.", lambda account: account.prompt_tokens),
    ("cached_tokens", "Prompt tokens found in the prefix cache.", lambda account: account.cached_tokens),
    ("sweeps", "Trips through all hosts.", lambda account: account.sweeps),
    ("hops", "Messages from machine to machine.", lambda account: account.hops),
    ("wire_bytes", "Bytes of these messages.", lambda account: account.wire_bytes_total),
    ("compute_seconds", "Compute time of hosts and router.", lambda account: account.total_compute_ms / 1000),
    ("drafted_tokens", "Draft tokens.", lambda account: account.drafted),
    ("accepted_tokens", "Draft tokens accepted.", lambda account: account.accepted),
    ("reached_tokens", "Draft tokens verified: accepted or first rejected.", lambda account: account.reached),
    ("replays", "Work moved to other hosts.", lambda account: account.replays),
)

PREFIX = "onesweep_router_"
_family = partial(MetricFamily.under, PREFIX)
ROUTER_METRICS = (
    _family("info", "gauge", "1, for its labels.", "version", "release"),
    _family("ready", "gauge", "Whether requests can be served."),
    _family("certificate_expiry_timestamp_seconds", "gauge", "Expiry of its certificate, Unix time."),
    _family("requests_in_flight", "gauge", "Requests being served."),
    _family("request_limit", "gauge", "Requests in flight at which the next is refused."),
    _family("requests_total", "counter", "Ended requests, by gRPC code.", "mode", "code"),
    _family("request_seconds", "histogram", "Latency of requests that ended OK.", "mode"),
    _family("first_byte_seconds", "histogram", "Time to the first byte of these.", "mode"),
    *(_family(f"{name}_total", "counter", help, "mode") for name, help, _ in COSTS),
    _family("audited_sweeps_total", "counter", "Sweeps that other hosts computed again."),
    _family("faulty_hosts_total", "counter", "Hosts that audits found faulty."),
    _family("host_ready", "gauge", "Whether the router can use the host.", "host"),
    _family("host_rtt_seconds", "gauge", "Round trip of the last keep-warm message.", "host"),
    _family("handover_seconds", "histogram", "Time from sending a hop to its own ack.", "host"),
    _family("sent_bytes_total", "counter", "Bytes of the hops sent.", "host"),
)


class ModeCounters:
    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.latency_s, self.first_byte_s = Histogram(), Histogram()
        self.costs: Counter[str] = Counter()


class RouterCounters:
    """A router's counters. `auto` counts as a mode of its own here, whichever mode it chooses."""

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self.modes = {mode: ModeCounters() for mode in (*MODES, *map(metric_mode, DRAWING_MODES), UNKNOWN_MODE)}

    def ended(self, record: RequestRecord) -> None:
        """Count a request and its costs, however it ended."""
        counters = self.modes[record.mode]
        counters.codes[record.code.name] += 1
        counters.costs.update({name: of(record.account) for name, _, of in COSTS})
        if record.summary is not None:
            counters.latency_s.add(record.summary.latency_ms / 1000)
            if isinstance(record.summary, router_pb2.Summary):
                counters.first_byte_s.add(record.summary.first_byte_ms / 1000)

    def read(self, status: router_pb2.StatusResponse) -> MetricValues:
        """Values for a scrape. `status`: the current state of router and hosts."""
        modes = {mode: counters for mode, counters in self.modes.items() if counters.codes}  # modes that had requests
        links, hosts = self.links.keep([host.name for host in status.hosts]), status.hosts[:MAX_LINKS]
        codes: dict[tuple[str, ...], float] = {
            (mode, code): count for mode, counters in modes.items() for code, count in counters.codes.items()
        }
        values: MetricValues = {
            "info": {(status.version, status.release): 1},
            "ready": {(): status.ready},
            "certificate_expiry_timestamp_seconds": {(): until_s} if (until_s := status.certificate_until_s) else {},
            "requests_in_flight": {(): status.requests},
            "request_limit": {(): status.request_limit},
            "requests_total": codes,
            "request_seconds": {(mode,): counters.latency_s for mode, counters in modes.items()},
            "first_byte_seconds": {(mode,): counters.first_byte_s for mode, counters in modes.items()},
            **{f"{cost}_total": {(mode,): each.costs[cost] for mode, each in modes.items()} for cost, _, _ in COSTS},
            "audited_sweeps_total": {(): status.audits.audited},
            "faulty_hosts_total": {(): status.audits.faulty_hosts},
            "host_ready": {(host.name,): host.ready for host in hosts},
            "host_rtt_seconds": {(host.name,): host.rtt_ms / 1000 for host in hosts if host.rtt_ms},
            "handover_seconds": {(name,): link.handover_s for name, link in links.items()},
            "sent_bytes_total": {(name,): link.sent_bytes for name, link in links.items()},
        }
        return {PREFIX + name: rows for name, rows in values.items()}
