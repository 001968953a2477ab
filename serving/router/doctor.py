"""`doctor`: measures every hop of a deployment, and says what to do about each bad one."""

import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import grpc.aio

from serving.router.host_link import clock_warning
from serving.router.topology import HostEntry, Topology
from stages.progress import aligned
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay
from stages.wire.link_quality import MAX_PROBE_BYTES, PROBE_TIMEOUT_S, kernel_now, measure_link
from stages.wire.status import StatusError, made_printable
from stages.wire.tls import Security

MESSAGE_BYTES = 4 << 20
STATE_BYTES = 18 << 10  # a sweep of 512 bytes in int8
SLOW_MBPS = 10.0
REACH_TIMEOUT_S = 5.0

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class MeasuredLink:
    """One link, as measured from its first end."""

    source: str
    target: str
    rtt_ms: float
    rtt_min_ms: float
    # Best time for a full-size state to travel there and its ack to come back.
    state_ms: float
    rate_mbps: float


@dataclass(frozen=True)
class Endpoint:
    """One end of links."""

    name: str
    address: str
    version: str
    system: str
    congestion_control: str
    slow_start_after_idle: str
    # Its clock minus the doctor's, accurate to half a round trip.
    clock_offset_ms: float = 0.0
    ready: bool = True
    backend: str = ""
    chain_digest: str = ""
    ar_digest: str = ""
    scorer_digest: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """One finding about a deployment."""

    is_bad: bool
    where: str
    message: str


@dataclass
class Report:
    """The doctor's measurements and findings."""

    machines: list[Endpoint] = field(default_factory=list)
    hops: list[MeasuredLink] = field(default_factory=list)
    findings: list[Diagnosis] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(finding.is_bad for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}

    def bad(self, where: str, message: str) -> None:
        self.findings.append(Diagnosis(True, where, message))

    def note(self, where: str, message: str) -> None:
        self.findings.append(Diagnosis(False, where, message))


async def examine(topology: Topology, security: Security) -> Report:
    """Measure every hop of a topology in turn, from this machine, which should be the router's.

    :param security: with the router's certificate if hosts use TLS.
    """
    report = Report([Endpoint("router", "(here)", version("onesweep"), *_settings(kernel_now()))])
    for host in topology.hosts:
        relay = Relay(host.address, MESSAGE_BYTES, REACH_TIMEOUT_S, host.name, security)
        try:
            await _examine_host(report, topology, host, relay)
        except StatusError as refusal:
            report.bad(host.name, refusal.message)
        finally:
            await relay.close()
    judge(report)
    return report


async def _examine_host(report: Report, topology: Topology, host: HostEntry, relay: Relay) -> None:
    info = await relay.describe(REACH_TIMEOUT_S)
    newest = info.releases[-1] if info.releases else stage_pb2.Release()
    if host.blocks[0] == 0:  # sweeps begin here
        quality = await _measured(relay, measure_link(relay, STATE_BYTES, MAX_PROBE_BYTES))
        report.hops.append(_hop("router", host.name, quality))
    begin = time.time()
    asked = stage_pb2.ProbeRequest(bytes=MAX_PROBE_BYTES)
    probe = await _measured(relay, relay.stub.Probe(asked, timeout=PROBE_TIMEOUT_S * 10))
    made_printable(probe)
    if relay.rtt_ms is None:
        await relay.warm(0)
    offset_ms = probe.unix_us / 1000 - begin * 1000 - (relay.rtt_ms or 0.0) / 2
    report.machines.append(
        Endpoint(
            host.name,
            host.address,
            info.version,
            *_settings(probe.kernel),
            offset_ms,
            info.ready,
            info.backend,
            newest.chain.digest,
            newest.ar.digest,
            newest.scorer.digest,
            tuple(info.blocks),
        )
    )
    names = {host.address: host.name for host in topology.hosts}
    for link in probe.links:
        target = names.get(link.address, link.address)
        if link.problem:
            report.bad(f"{host.name} -> {target}", link.problem)
        else:
            report.hops.append(_hop(host.name, target, link))
    if host.blocks[-1] == topology.blocks - 1:
        quality = await _measured(relay, measure_link(relay, STATE_BYTES, MAX_PROBE_BYTES, receive=True))
        report.hops.append(_hop(host.name, "router", quality))
    if not info.ready:
        report.bad(host.name, f"not ready: {info.not_ready_reason}")
    if tuple(info.blocks) != host.blocks:
        report.bad(host.name, f"holds blocks {list(info.blocks)}, the topology says {list(host.blocks)}: restart it")
    due = topology.successors(host)
    dialled = [link.address for link in info.links]
    if sorted(due) != sorted(dialled):
        shown = [",".join(addresses) or "(none)" for addresses in (dialled, due)]
        report.note(host.name, f"its next hosts are {shown[0]}, the topology says {shown[1]}")


async def _measured(relay: Relay, measuring: Awaitable[Measured]) -> Measured:
    try:
        return await measuring
    except grpc.aio.AioRpcError as error:
        details = error.details() or error.code().name
        raise StatusError(error.code(), f"{relay.host} could not be measured ({details}): try again") from None


def _settings(kernel: stage_pb2.Kernel) -> tuple[str, str, str]:
    return kernel.system, kernel.congestion_control, kernel.slow_start_after_idle


def _hop(source: str, target: str, quality: stage_pb2.LinkQuality) -> MeasuredLink:
    return MeasuredLink(source, target, quality.rtt_ms, quality.rtt_min_ms, quality.state_ms, quality.rate_mbps)


def judge(report: Report) -> None:
    """Add findings to a report from its measurements."""
    for hop in report.hops:
        _judge_hop(report, hop)
    ours = report.machines[0]
    for control in sorted({m.congestion_control for m in report.machines} - {"", "cubic", "bbr"}):
        where = ", ".join(m.name for m in report.machines if m.congestion_control == control)
        report.bad(where, f"congestion control {control}: set net.ipv4.tcp_congestion_control to cubic or bbr")
    for machine in report.machines:
        if machine.version != ours.version:
            report.bad(machine.name, f"runs onesweep {machine.version}, this machine {ours.version}: use one version")
        if warning := clock_warning(machine.clock_offset_ms / 1000, 0.0, 0.0):
            report.bad(machine.name, warning)
    hosts = report.machines[1:]
    _judge_backends(report, hosts)
    for kind in ("chain", "ar", "scorer"):
        digests = {getattr(machine, f"{kind}_digest") for machine in hosts}
        if len(digests) > 1:
            shown = ", ".join(f"{m.name} {getattr(m, f'{kind}_digest')[:12] or '(none)'}" for m in hosts)
            report.bad("checkpoint", f"the hosts have different {kind} checkpoints ({shown}): give all the same one")


def _judge_hop(report: Report, hop: MeasuredLink) -> None:
    where = f"{hop.source} -> {hop.target}"
    serial_ms = STATE_BYTES * 8 / 1000 / hop.rate_mbps
    if hop.rate_mbps < SLOW_MBPS:
        report.bad(
            where,
            f"{hop.rate_mbps:.1f} Mbit/s: a full state takes {serial_ms:.0f} ms; try --set codec=int4, or another link",
        )
    if hop.rtt_ms > 2 * hop.rtt_min_ms + 5:
        report.note(  # a busy host is not a sick one
            where,
            f"round trips vary from {hop.rtt_min_ms:.1f} to {hop.rtt_ms:.1f} ms (median): the link or host is busy; "
            "measure again while nothing else runs",
        )
    if hop.state_ms > 1.5 * hop.rtt_ms + serial_ms + 2:
        report.bad(
            where,
            f"a full state takes {hop.state_ms:.1f} ms instead of {hop.rtt_ms + serial_ms:.1f}: its first bytes "
            "wait for acknowledgements; set keep_warm_s above 0, or net.ipv4.tcp_slow_start_after_idle to 0",
        )


def _judge_backends(report: Report, hosts: Sequence[Endpoint]) -> None:
    if len({machine.backend for machine in hosts}) > 1:
        shown = ", ".join(f"{m.name} {m.backend}" for m in hosts)
        report.bad("device", f"the hosts compute differently ({shown}): rare ties may differ; use one kind")
    for blocks in sorted({machine.blocks for machine in hosts} - {()}):
        replicas = [machine for machine in hosts if machine.blocks == blocks]
        if len({machine.backend for machine in replicas}) > 1:
            report.bad(
                ", ".join(machine.name for machine in replicas),
                f"they hold the same blocks ({','.join(map(str, blocks))}) and compute differently: a text that one "
                "continues for another may change at a rare tie, and audits may blame one; give all the same "
                "--device, on GPUs of one kind",
            )


def report_text(report: Report) -> str:
    hops: list[Sequence[str]] = [("hop", "rtt ms", "min ms", "full state ms", "Mbit/s")]
    for hop in report.hops:
        times = (f"{each_ms:.1f}" for each_ms in (hop.rtt_ms, hop.rtt_min_ms, hop.state_ms))
        hops.append((f"{hop.source} -> {hop.target}", *times, f"{hop.rate_mbps:.0f}"))
    machines = [("machine", "clock ms", "congestion", "idle restart", "version", "chain", "ar", "scorer")]
    for m in report.machines:
        restart = {"1": "on", "0": "off"}.get(m.slow_start_after_idle, "?")
        chain, ar, scorer = (digest[:12] or "-" for digest in (m.chain_digest, m.ar_digest, m.scorer_digest))
        clock = f"{m.clock_offset_ms:.1f}"
        machines.append((m.name, clock, m.congestion_control or "?", restart, m.version, chain, ar, scorer))
    lines = [*aligned(hops, ruled=True), "", *aligned(machines, ruled=True), ""]
    for finding in sorted(report.findings, key=lambda f: not f.is_bad):
        lines.append(f"{'BAD ' if finding.is_bad else 'note'} {finding.where}: {finding.message}")
    lines.append("healthy" if report.healthy else "not healthy: see BAD above")
    return "\n".join(lines)
