"""Metrics and logs of a real deployment: they add up to the answers."""

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client, RequestRefused, Result
from serving.router.records import ROUTER_METRICS, UNKNOWN_MODE
from serving.router.topology import local_topology
from stages.host.metrics import STAGE_METRICS
from tests.conftest import PATIENCE_S, until
from tests.test_deploy import series_of

SECRET = "Xyzzy"
PROMPT = f"The sea was calm. {SECRET} was "
REQUESTS: list[dict[str, Any]] = [
    {"mode": "sweep", "max_bytes": 40, "seed": 1},
    {"mode": "chunked", "max_bytes": 40, "seed": 2, "chunk": 9},
    {"mode": "ar", "max_bytes": 12, "seed": 3},
    {"mode": "ar-speculative", "max_bytes": 24, "seed": 4, "draft": 5},
    {"mode": "resample", "max_bytes": 24, "seed": 5, "chunk": 10, "candidates": 6, "scorer": "scorer"},
    {"mode": "local", "max_bytes": 12, "seed": 7},
]
Values = dict[tuple[str, ...], float]
"""By sample name and label values, in the order of the labels' names."""


@pytest.fixture(scope="module")
def watched(bundles: Path) -> Iterator[Deployment]:
    """Three hosts and a router as processes, with everything on."""
    topology = local_topology(3, 3, bundles / "scored", free_port_block(4) + 1)
    options = ["--metrics", "127.0.0.1:0", "--set", "log_format=json"]
    with temporary_deployment(topology, bundles / "scored", host_options=options, router_options=options) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def asked(watched: Deployment) -> list[Result]:
    with Client(watched.topology.router) as client:
        return [client.generate(PROMPT, **request) for request in REQUESTS]


def log_lines(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    """Its own: gRPC's core writes to stderr as well."""
    lines = (deployment.directory / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def scrape(deployment: Deployment, name: str) -> Values:
    log = (deployment.directory / f"{name}.log").read_text()
    found = re.search(r"http://[0-9.:]+/metrics", log)
    text = urllib.request.urlopen(found[0], timeout=PATIENCE_S).read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(values: Values, name: str) -> float:
    return sum(value for key, value in values.items() if key[0] == name)


# Metrics


def test_metrics_of_the_router_match_its_answers(watched: Deployment, asked: list[Result]) -> None:
    def scraped() -> Values | None:
        found = scrape(watched, "router")
        return found if total(found, "onesweep_router_request_seconds_count") >= len(asked) else None

    router: Values = until(scraped)
    for r in asked:
        expected = {
            "onesweep_router_output_bytes_total": r.output_bytes,
            "onesweep_router_sweeps_total": r.sweeps,
            "onesweep_router_hops_total": r.hops,
            "onesweep_router_wire_bytes_total": r.wire_bytes_total,
            "onesweep_router_output_tokens_total": r.output_tokens,
            "onesweep_router_prompt_tokens_total": r.prompt_tokens,
            "onesweep_router_cached_tokens_total": r.cached_tokens,
            "onesweep_router_drafted_tokens_total": r.drafted,
            "onesweep_router_accepted_tokens_total": r.accepted,
            "onesweep_router_reached_tokens_total": r.reached,
            "onesweep_router_request_seconds_count": 1,
        }
        assert {name: router[name, r.mode] for name in expected} == expected
        assert router["onesweep_router_requests_total", "OK", r.mode] == 1
        assert router["onesweep_router_compute_seconds_total", r.mode] == pytest.approx(r.compute_ms / 1000, abs=1e-6)
        assert router["onesweep_router_request_seconds_sum", r.mode] == pytest.approx(r.latency_ms / 1000, abs=1e-6)
        first_byte = router["onesweep_router_first_byte_seconds_sum", r.mode]
        assert first_byte == pytest.approx(r.first_byte_ms / 1000, abs=1e-6)
    assert total(router, "onesweep_router_host_ready") == 3
    assert router["onesweep_router_ready",] == 1


def test_metrics_of_the_hosts_add_up_to_the_answers(watched: Deployment, asked: list[Result]) -> None:
    scraped = {name: scrape(watched, name) for name in ("host-1", "host-2", "host-3", "router")}
    hosts = [values for name, values in scraped.items() if name != "router"]
    shares = {share.name: [0.0, 0.0] for result in asked for share in result.hosts}
    for result in asked:
        for share in result.hosts:
            shares[share.name][0] += share.compute_ms / 1000
            shares[share.name][1] += share.queue_ms / 1000
    for name, (compute_s, queue_s) in shares.items():
        # each share of an answer was rounded to a microsecond
        assert total(scraped[name], "onesweep_stage_hop_compute_seconds_sum") == pytest.approx(compute_s, abs=1e-5)
        assert total(scraped[name], "onesweep_stage_hop_queue_seconds_sum") == pytest.approx(queue_s, abs=1e-5)
        hops = total(scraped[name], "onesweep_stage_hop_compute_seconds_count")
        assert hops == sum(result.sweeps for result in asked)
        assert scraped[name]["onesweep_stage_hop_compute_seconds_count", "chain"] == 6  # one sweep, five chunks
    received = sum(total(values, "onesweep_stage_received_bytes_total") for values in hosts)
    results = sum(total(values, "onesweep_stage_result_bytes_total") for values in hosts)
    assert received + results == sum(result.wire_bytes_total for result in asked)
    sent = sum(total(values, "onesweep_stage_link_sent_bytes_total") for values in hosts)
    assert sent + total(scraped["router"], "onesweep_router_sent_bytes_total") == received
    handed = sum(total(values, "onesweep_stage_link_handover_seconds_count") for values in hosts)
    handed += total(scraped["router"], "onesweep_router_handover_seconds_count")
    # a result is a hop, but not handed over; and not every hop has an ack of its own
    assert 0 < handed <= sum(result.hops - result.sweeps for result in asked)
    assert all(total(values, "onesweep_stage_link_up") == 1 for values in hosts)
    assert all(values["onesweep_stage_ready",] == 1 for values in hosts)


def test_every_scraped_metric_is_documented(watched: Deployment, asked: list[Result]) -> None:
    for name, families in (("host-1", STAGE_METRICS), ("router", ROUTER_METRICS)):
        own = {key[0] for key in scrape(watched, name) if key[0].startswith("onesweep_")}
        known = {series for family in families for series in series_of(family)}
        assert own <= known
        silent = {family.name for family in families if not own & set(series_of(family))}
        without_tls = {family.name for family in families if "certificate" in family.name}
        assert silent <= {"onesweep_stage_refused_total", "onesweep_stage_faults_total", *without_tls}


def test_failed_requests_are_counted_by_code_under_known_modes(watched: Deployment, asked: list[Result]) -> None:
    with Client(watched.topology.router) as client:
        for settings in ({"mode": "made-up"}, {"mode": "sweep", "max_bytes": 4000}):
            with pytest.raises(RequestRefused) as caught:
                client.generate(PROMPT, **settings)
            assert re.fullmatch("[0-9a-f]{16}", caught.value.request)
        with contextlib.closing(client.stream(PROMPT, mode="ar", max_bytes=400)) as pieces:
            assert next(pieces)  # and then its client goes away
    codes = [("INVALID_ARGUMENT", UNKNOWN_MODE), ("INVALID_ARGUMENT", "sweep"), ("CANCELLED", "ar")]
    until(lambda: all(scrape(watched, "router").get(("onesweep_router_requests_total", *code)) == 1 for code in codes))
    values = scrape(watched, "router")
    assert not any("made-up" in key for key in values)
    assert [line["mode"] for line in log_lines(watched, "router") if line.get("code") == "CANCELLED"] == ["ar"]


# Logs and names


def test_every_request_is_logged_without_its_prompt(watched: Deployment, asked: list[Result]) -> None:
    names = ["router", *(host.name for host in watched.topology.hosts)]
    lines = {name: log_lines(watched, name) for name in names}
    for name, entries in lines.items():
        assert all({"time", "level", "logger", "name", "message"} <= entry.keys() for entry in entries)
        assert {entry["name"] for entry in entries} == {name}
    ended = {line["request"]: line for line in lines["router"] if "request" in line}
    for result in asked:
        line = ended[result.request]
        assert (line["mode"], line["code"], line["level"]) == (result.mode, "OK", "INFO")
        assert (line["sweeps"], line["bytes"]) == (result.sweeps, result.output_bytes)
        assert line["ms"] >= result.latency_ms
    with Client(watched.topology.router) as client, pytest.raises(RequestRefused):
        client.generate("x", mode=f"{SECRET}")
    assert not any(SECRET in path.read_text() for path in watched.directory.glob("*.log"))
