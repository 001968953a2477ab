"""Counts of a host's work: buckets, families, and that the set of links has an end."""

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from serving.router.records import ROUTER_METRICS, RouterCounters
from serving.v1 import router_pb2
from stages.errors import InputError
from stages.host.metrics import MAX_LINKS, OTHERS, STAGE_METRICS, HostCounters, LinkTable
from stages.host.parts import Parts
from stages.model.draft_tree import Draft
from stages.model.vocabulary import BYTES
from stages.telemetry import prometheus as exposition
from stages.telemetry.observability import ObservabilitySettings, Telemetry
from stages.telemetry.prometheus import MetricsServer
from stages.v1 import stage_pb2
from stages.wire.messages import PROTOCOL, next_read
from stages.wire.status import exhausted, not_found
from stages.wire.tls import Expiry, ending
from tests.conftest import PATIENCE_S
from tests.stages.hosts import event_of, open_host, send
from tests.stages.raw_client import ROUTER
from tests.stages.slow_runner import watched


@pytest.mark.parametrize(
    ("read", "families"),
    [
        (HostCounters(LinkTable()).read(stage_pb2.DescribeResponse()), STAGE_METRICS),
        (RouterCounters(LinkTable()).read(router_pb2.StatusResponse()), ROUTER_METRICS),
    ],
)
def test_every_family_is_read_and_every_name_follows_the_conventions(read: Any, families: Any) -> None:
    assert list(read) == [family.name for family in families]
    for family in families:
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert all(len(labels) == len(family.labels) for labels in read[family.name])


def test_closed_links_are_counted_together() -> None:
    counters = HostCounters(LinkTable())
    for port in range(2 * MAX_LINKS):
        counters.links.link(f"10.0.0.1:{port}").sent(1)
    host = stage_pb2.DescribeResponse()
    host.links.add(address="10.0.0.1:3")
    sent = counters.read(host)["onesweep_stage_link_sent_bytes_total"]
    assert set(sent) == {("10.0.0.1:3",), (OTHERS,)}
    counters.links.link("10.0.0.2:1").sent(5)
    assert counters.links.links["10.0.0.2:1"].sent_bytes == 5


def scrape(families: Any, read: Callable[[], Any], loop: asyncio.AbstractEventLoop | None = None) -> str:
    """A real server's answer, asked for while its event loop runs."""

    async def main() -> str:
        server = MetricsServer("127.0.0.1:0", families, read, loop or asyncio.get_running_loop())
        try:
            url = f"http://127.0.0.1:{server.port}/metrics"
            return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=PATIENCE_S).read().decode())
        finally:
            await server.close()

    return asyncio.run(main())


def test_a_server_exports_host_and_process_metrics() -> None:
    counters = HostCounters(LinkTable())
    counters.refusals[exhausted("full", 1).code.name] += 1
    host = stage_pb2.DescribeResponse(name="paris", blocks=[0, 1], ready=True)
    host.links.add(address="127.0.0.1:1", rtt_ms=20)
    host.links.add(address="127.0.0.1:2", problem="lost")
    text = scrape(STAGE_METRICS, lambda: counters.read(host))
    for line in (
        'onesweep_stage_info{backend="",blocks="0,1",name="paris",version=""} 1.0',
        'onesweep_stage_refused_total{code="RESOURCE_EXHAUSTED"} 1.0',
        'onesweep_stage_link_up{address="127.0.0.1:1"} 1.0',
        'onesweep_stage_link_up{address="127.0.0.1:2"} 0.0',
        'onesweep_stage_link_rtt_seconds{address="127.0.0.1:1"} 0.02',
    ):
        assert line in text.splitlines()
    assert "process_resident_memory_bytes" in text


def test_a_busy_event_loop_fails_the_scrape_with_a_message(monkeypatch, caplog, capfd) -> None:
    monkeypatch.setattr(exposition, "READ_S", 0.1)
    idle = asyncio.new_event_loop()  # never runs what it is given
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape([], dict, idle)
    idle.run_until_complete(asyncio.sleep(0))
    idle.close()
    assert caught.value.code == 503
    assert "a scrape failed: the event loop did not answer within 0.1 s" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


async def test_a_silent_connection_is_closed(monkeypatch, capfd) -> None:
    monkeypatch.setattr(exposition._Handler, "timeout", 0.1)

    server = MetricsServer("127.0.0.1:0", [], dict, asyncio.get_running_loop())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
    finally:
        await server.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("address", "insecure", "sentence"),
    [
        ("127.0.0.1:70000", False, "--metrics '127.0.0.1:70000' must be HOST:PORT"),
        ("0.0.0.0:9101", False, "--metrics 0.0.0.0:9101 could be read by anyone from other machines"),
    ],
)
def test_an_invalid_or_public_metrics_address_is_refused(address: str, insecure: bool, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace(".", r"\.")):
        Telemetry(ObservabilitySettings(metrics=address), insecure)


# A host's own story: what it counts and logs of a hop that fails


async def test_a_fault_is_counted_and_logged_with_the_request_s_name(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    watched(parts, 0).fails = lambda *_: True
    digest = parts.plan.models["chain"].digest
    hop = stage_pb2.Hop(router=ROUTER, session="s", capacity=40, digest=digest, left_s=60, request="cafe0123")
    hop.sweep.CopyFrom(stage_pb2.Sweep(clean=b"A secret prompt", slots=4, steps=1, codec="int8"))
    with caplog.at_level(logging.INFO):
        async with open_host(parts) as host:
            send(host, hop)
            await event_of(host)
            await host.end(["s"])
            hop.sweep.start = 15  # the hosts have read the prompt
            rejected = host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[stage_pb2.Hop(), hop])).rejections
            codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED)
            assert [each.code for each in rejected] == [code.value[0] for code in codes]
            for hop.session in ("s", "of a host that restarted"):  # the first is over: another hop was under way
                host._fault(hop, not_found("no such session"))
    assert host.counters.faults == {"INTERNAL": 1, "NOT_FOUND": 1}
    assert host.counters.refusals == {"INVALID_ARGUMENT": 1}
    assert host.counters.models["chain"].received_bytes > 0
    assert sum(host.counters.models["chain"].compute_s.counts) == 0  # a hop that failed took no time that counts
    read = host.counters.read(stage_pb2.DescribeResponse())
    assert read["onesweep_stage_faults_total"] == {("INTERNAL",): 1, ("NOT_FOUND",): 1}
    named = [record for record in caplog.records if getattr(record, "request", "") == "cafe0123"]
    assert [record.levelname for record in named] == ["ERROR", "WARNING", "INFO", "WARNING"]
    assert "request cafe0123 ended" in caplog.text
    assert "secret" not in caplog.text


def test_the_next_step_keeps_the_request_name() -> None:
    hop = stage_pb2.Hop(request="cafe")
    hop.read.sample.remaining = 2
    assert next_read(hop, b"x", BYTES, 0, Draft()).request == hop.request


# Certificates
def test_the_expiry_of_a_renewed_certificate_is_read_again(new_pki: Callable[[str], Any]) -> None:
    pki = new_pki("own")
    tls = pki.issue("host", "paris")
    expiry = Expiry(tls)
    first = expiry.until_s()
    assert first == tls.read().certificate.until.timestamp()
    pki.expire(tls)  # it is refused: the last valid one still counts
    assert expiry.until_s() == first
    renewed = pki.issue("host", "paris", force=True)
    assert expiry.until_s() == renewed.read().certificate.until.timestamp() >= first
    assert Expiry(None).until_s() == 0
    assert f"its certificate ends on {tls.read().certificate.until:%Y-%m-%d}: run `onesweep certs" in ending(first)
    assert "restart `onesweep join`" in ending(first), "such a machine renews its own, and its key is not here"
    assert ending(first + 3 * 86400) == ending(0) == ""
