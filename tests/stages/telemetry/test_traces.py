"""Spans under those of other processes, in a file, and what `traces` may name."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from stages.errors import InputError
from stages.host.metrics import record_hop
from stages.telemetry.traces import Tracer, check_target, traceparent_of
from stages.v1 import stage_pb2
from stages.wire.status import invalid
from tests.conftest import PATIENCE_S

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def ended_job(traceparent: str, result: Any = None) -> Any:
    hop = stage_pb2.Hop(request="cafe", traceparent=traceparent, sweep=stage_pb2.Sweep(clean=b"secret"))
    session, request = SimpleNamespace(kind="chain"), SimpleNamespace(number=3)
    times = {"accepted_at": time.perf_counter() - 0.5, "queue_ms": 100.0, "compute_ms": 400.0}
    return SimpleNamespace(hop=hop, work=request, session=session, result=result, received_bytes=7, **times)


def test_spans_of_two_processes_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    router, host = (Tracer(f"file:{path}", f"onesweep-{name}", name) for name in ("router", "stage"))
    request = router.begin("request")
    sweep = router.begin("sweep", request)
    record_hop(host, ended_job(traceparent_of(sweep)))
    record_hop(host, ended_job(traceparent_of(sweep), invalid("no")))
    named = traceparent_of(sweep)
    for unsampled in (named[:-1] + "0", "", "nonsense", named.upper(), f"01{named[2:]}x", f"00-{'0' * 32}{named[35:]}"):
        record_hop(host, ended_job(unsampled))
    sweep.end()
    request.end()
    router.close()
    host.close()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert "secret" not in path.read_text()
    by_name = {span["name"]: span for span in spans}
    hops = [span for span in spans if span["name"] == "hop"]
    assert len(spans) == 4
    assert {span["context"]["trace_id"] for span in spans} == {by_name["request"]["context"]["trace_id"]}
    assert by_name["request"]["parent_id"] is None
    assert by_name["sweep"]["parent_id"] == by_name["request"]["context"]["span_id"]
    assert {hop["parent_id"] for hop in hops} == {by_name["sweep"]["context"]["span_id"]}
    assert [hop["status"]["status_code"] for hop in hops] == ["UNSET", "ERROR"]
    assert hops[0]["attributes"]["onesweep.number"] == 3
    assert hops[0]["resource"]["attributes"]["service.name"] == "onesweep-stage"
    assert path.stat().st_mode & 0o777 == 0o600


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What a collector is told."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # for the web, not for a collector
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracer = Tracer(f"127.0.0.1:{port}", "onesweep-stage", "paris")
        record_hop(tracer, ended_job(f"00-{TRACE}-{SPAN}-01"))
        tracer.close()
    finally:
        server.stop(None).wait(PATIENCE_S)
    ((resource,),) = [request.resource_spans for request in collector.requests]
    ((span,),) = [scope.spans for scope in resource.scope_spans]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("hop", TRACE, SPAN)
    assert span.end_time_unix_nano - span.start_time_unix_nano > 0.4e9
    assert ("service.instance.id", "paris") in {(a.key, a.value.string_value) for a in resource.resource.attributes}


def test_a_collector_that_is_not_there_does_not_keep_a_server_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer("127.0.0.1:1", "onesweep-router", "router")
    tracer.begin("request").end()
    tracer.close()
    assert "Failed to export traces to 127.0.0.1:1" in caplog.text


@pytest.mark.parametrize("target", ["127.0.0.1:4317", "https://collector.example:4317", "file:spans", "[::1]:4317"])
def test_targets(target: str) -> None:
    check_target(target, insecure=False)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("file:", "names no file: give file:PATH"),
        ("nowhere", "traces 'nowhere' must be HOST:PORT"),
        ("https://nowhere", "traces 'nowhere' must be HOST:PORT"),
        ("http://127.0.0.1:4317", "must be HOST:PORT"),
        ("10.8.0.1:4317", "traces 10.8.0.1:4317 is another machine and traffic is not encrypted"),
    ],
)
def test_targets_that_are_refused(target: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace(".", r"\.")):
        check_target(target, insecure=False)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InputError, match=r"pip install 'onesweep\[traces\]'"):
        Tracer("127.0.0.1:4317", "onesweep-router", "router")
