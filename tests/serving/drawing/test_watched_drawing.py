"""What an operator sees of drawing: figures and spans that add up to the answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client, RequestRefused
from onesweep.serving.client.result import DrawnPictures
from onesweep.serving.router.topology import local_topology
from tests.conftest import until
from tests.serving.router.test_records import scrape
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

LEVELS, PICTURES = 4, 2


@pytest.fixture(scope="module")
def watched(spans: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three hosts and a router as processes, with everything on."""
    bundle = tiny_picture_bundle(tmp_path_factory.mktemp("watched"))
    topology = local_topology(3, 3, bundle, free_port_block(4) + 1)
    options = ["--metrics", "127.0.0.1:0", "--traces", f"file:{spans}"]
    with temporary_deployment(
        topology, bundle, host_options=options, router_options=[*options, "--trace-share", "1"]
    ) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def drawn(watched: Deployment) -> dict[str, DrawnPictures]:
    """By mode; and a request that is refused."""
    with Client(watched.topology.router) as client:
        with pytest.raises(RequestRefused):
            client.draw("nothing", mode="steps")
        settings = {"pictures": PICTURES, "levels": LEVELS}
        return {mode: client.draw("one", mode=mode, **settings) for mode in ("chain", "steps", "local")}


def test_figures_of_drawing_are_those_of_its_answers(watched: Deployment, drawn: dict[str, DrawnPictures]) -> None:
    until(lambda: ("onesweep_router_requests_total", "OK", "draw-local") in scrape(watched, "router"))
    router = scrape(watched, "router")
    for mode, result in drawn.items():
        expected = {
            "onesweep_router_output_bytes_total": PICTURES * TINY.height * TINY.width,
            "onesweep_router_sweeps_total": result.sweeps,
            "onesweep_router_hops_total": result.hops,
            "onesweep_router_wire_bytes_total": result.wire_bytes_total,
            "onesweep_router_request_seconds_count": 1,
        }
        assert {name: router[name, f"draw-{mode}"] for name in expected} == expected, mode
        assert router["onesweep_router_requests_total", "OK", f"draw-{mode}"] == 1
    assert router["onesweep_router_requests_total", "INVALID_ARGUMENT", "draw-steps"] == 1
    for name in ("host-1", "host-2", "host-3"):
        host = scrape(watched, name)
        assert host["onesweep_stage_hop_compute_seconds_count", "chain"] == 1
        assert host["onesweep_stage_hop_compute_seconds_count", "steps"] == LEVELS + 1


def test_a_drawing_has_a_span_for_each_hop(watched: Deployment, drawn: dict[str, DrawnPictures], spans: Path) -> None:
    def spans_of(result: DrawnPictures, count: int) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in spans.read_text().splitlines()]
        own = [span for span in found if span["attributes"]["onesweep.request"] == result.request]
        return own if len(own) >= count else []

    for mode in ("chain", "steps"):
        result = drawn[mode]
        own = until(lambda result=result: spans_of(result, 2 + 3 * result.sweeps))
        (request,) = [span for span in own if span["name"] == "request"]
        assert request["attributes"]["onesweep.mode"] == f"draw-{mode}"
        assert len({span["context"]["trace_id"] for span in own}) == 1
        hops = [span["resource"]["attributes"]["service.instance.id"] for span in own if span["name"] == "hop"]
        assert sorted(hops) == sorted(["host-1", "host-2", "host-3"] * result.sweeps)
