"""The router's metrics: what they are, what counts them, and how they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from serving.accounting import Account
from serving.modes import MODES
from serving.ticket import UNKNOWN_MODE, Ticket
from serving.v1 import router_pb2
from stages.expiry import Expiry
from stages.figures import Buckets, Family, Figures
from stages.metrics import MAX_LINKS, LinkTable
from stages.security import Tls

ROUTER_METRICS = (
    Family("onesweep_router_info", "gauge", "1, for its labels.", ("version", "release")),
    Family("onesweep_router_ready", "gauge", "Whether requests can be served."),
    Family("onesweep_router_certificate_expiry_timestamp_seconds", "gauge", "When its certificate ends, Unix time."),
    Family("onesweep_router_requests_in_flight", "gauge", "Requests being served."),
    Family("onesweep_router_request_limit", "gauge", "Requests in flight at which the next is refused."),
    Family("onesweep_router_requests_total", "counter", "Ended requests, by gRPC code.", ("mode", "code")),
    Family("onesweep_router_request_seconds", "histogram", "Of those that ended OK, until the end.", ("mode",)),
    Family("onesweep_router_first_byte_seconds", "histogram", "Of those, until their first byte.", ("mode",)),
    Family("onesweep_router_output_bytes_total", "counter", "Text written.", ("mode",)),
    Family("onesweep_router_output_tokens_total", "counter", "The same, in the model's tokens.", ("mode",)),
    Family("onesweep_router_sweeps_total", "counter", "Trips along the hosts.", ("mode",)),
    Family("onesweep_router_hops_total", "counter", "Messages from machine to machine.", ("mode",)),
    Family("onesweep_router_wire_bytes_total", "counter", "Size of these messages.", ("mode",)),
    Family("onesweep_router_compute_seconds_total", "counter", "Arithmetic, hosts and router.", ("mode",)),
    Family("onesweep_router_drafted_tokens_total", "counter", "Tokens guessed.", ("mode",)),
    Family("onesweep_router_accepted_tokens_total", "counter", "Guesses found right.", ("mode",)),
    Family("onesweep_router_reached_tokens_total", "counter", "Guesses that counted: right or first wrong.", ("mode",)),
    Family("onesweep_router_replays_total", "counter", "Moves of work to other hosts.", ("mode",)),
    Family("onesweep_router_audited_sweeps_total", "counter", "Sweeps that other hosts computed again."),
    Family("onesweep_router_liars_total", "counter", "Hosts that an audit found to lie."),
    Family("onesweep_router_host_ready", "gauge", "Whether the router can use the host.", ("host",)),
    Family("onesweep_router_host_rtt_seconds", "gauge", "Round trip of the last keep-warm message.", ("host",)),
    Family("onesweep_router_handover_seconds", "histogram", "A hop's way until its receipt.", ("host",)),
    Family("onesweep_router_sent_bytes_total", "counter", "Size of the hops that left.", ("host",)),
)


class ModeFigures:
    """What the requests of one mode took."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.latency_s, self.first_byte_s = Buckets(), Buckets()
        self.output_bytes = self.output_tokens = self.sweeps = self.hops = self.wire_bytes = 0
        self.drafted = self.accepted = self.reached = self.replays = 0
        self.compute_s = 0.0

    def add(self, account: Account) -> None:
        """What a request took, however it ended."""
        self.output_bytes += account.output_bytes
        self.output_tokens += account.output_tokens
        self.sweeps += account.sweeps
        self.hops += account.hops
        self.wire_bytes += account.wire_bytes_total
        self.compute_s += (account.local_compute_ms + sum(account.compute_ms.values())) / 1000
        self.drafted += account.drafted
        self.accepted += account.accepted
        self.reached += account.reached
        self.replays += account.replays


class RouterFigures:
    """Counts what a router does. `auto` is a mode of its own here, whatever it takes."""

    def __init__(self) -> None:
        self.modes = {mode: ModeFigures() for mode in (*MODES, UNKNOWN_MODE)}
        self.links = LinkTable()

    def ended(self, ticket: Ticket) -> None:
        """Count a request."""
        figures = self.modes[ticket.mode]
        figures.codes[ticket.code.name] += 1
        figures.add(ticket.account)
        if ticket.summary is not None:
            figures.latency_s.add(ticket.summary.latency_ms / 1000)
            figures.first_byte_s.add(ticket.summary.first_byte_ms / 1000)

    def reader(self, status: Callable[[], router_pb2.StatusResponse], tls: Tls | None = None) -> Callable[[], Figures]:
        """What a scrape reads. `status`: the router and its hosts as they are now."""
        expiry = Expiry(tls)
        return lambda: self._read(status(), expiry)

    def _read(self, status: router_pb2.StatusResponse, expiry: Expiry) -> Figures:
        modes = {mode: figures for mode, figures in self.modes.items() if figures.codes}  # those that were asked for
        links, hosts = self.links.keep([host.name for host in status.hosts]), status.hosts[:MAX_LINKS]
        codes: dict[tuple[str, ...], float] = {
            (mode, code): count for mode, figures in modes.items() for code, count in figures.codes.items()
        }
        return {
            "onesweep_router_info": {(status.version, status.release): 1},
            "onesweep_router_ready": {(): status.ready},
            "onesweep_router_certificate_expiry_timestamp_seconds": expiry.rows(),
            "onesweep_router_requests_in_flight": {(): status.requests},
            "onesweep_router_request_limit": {(): status.request_limit},
            "onesweep_router_requests_total": codes,
            "onesweep_router_request_seconds": {(mode,): figures.latency_s for mode, figures in modes.items()},
            "onesweep_router_first_byte_seconds": {(mode,): figures.first_byte_s for mode, figures in modes.items()},
            "onesweep_router_output_bytes_total": {(mode,): figures.output_bytes for mode, figures in modes.items()},
            "onesweep_router_output_tokens_total": {(mode,): figures.output_tokens for mode, figures in modes.items()},
            "onesweep_router_sweeps_total": {(mode,): figures.sweeps for mode, figures in modes.items()},
            "onesweep_router_hops_total": {(mode,): figures.hops for mode, figures in modes.items()},
            "onesweep_router_wire_bytes_total": {(mode,): figures.wire_bytes for mode, figures in modes.items()},
            "onesweep_router_compute_seconds_total": {(mode,): figures.compute_s for mode, figures in modes.items()},
            "onesweep_router_drafted_tokens_total": {(mode,): figures.drafted for mode, figures in modes.items()},
            "onesweep_router_accepted_tokens_total": {(mode,): figures.accepted for mode, figures in modes.items()},
            "onesweep_router_reached_tokens_total": {(mode,): figures.reached for mode, figures in modes.items()},
            "onesweep_router_replays_total": {(mode,): figures.replays for mode, figures in modes.items()},
            "onesweep_router_audited_sweeps_total": {(): status.audits.audited},
            "onesweep_router_liars_total": {(): status.audits.liars},
            "onesweep_router_host_ready": {(host.name,): host.ready for host in hosts},
            "onesweep_router_host_rtt_seconds": {(host.name,): host.rtt_ms / 1000 for host in hosts if host.rtt_ms},
            "onesweep_router_handover_seconds": {(name,): link.handover_s for name, link in links.items()},
            "onesweep_router_sent_bytes_total": {(name,): link.sent_bytes for name, link in links.items()},
        }
