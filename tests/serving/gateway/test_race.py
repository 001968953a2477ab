"""Trips: every sweep of a request is reported as it returns, on request."""

import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from serving.cli.deployment import Deployment
from serving.client.client import AsyncClient, Result
from serving.v1 import router_pb2
from tests.conftest import until
from tests.serving.conftest import sessions

PROMPT = "It was late when "
RACE: dict[str, Any] = {"prompt": PROMPT, "max_bytes": 24, "seed": 7}


@pytest.mark.parametrize("whole", [False, True])
async def test_trips_add_up_to_the_result(deployment: Deployment, whole: bool) -> None:
    async with AsyncClient(deployment.topology.router) as client:
        asked = client.events(PROMPT, mode="chunked", chunk=8, max_bytes=24, seed=7, trips=True, whole=whole)
        async with aclosing(asked):
            events = [event async for event in asked]
    trips = [event for event in events if isinstance(event, router_pb2.Trip)]
    result = events[-1]
    assert isinstance(result, Result)
    assert [trip.number for trip in trips] == [0, 1, 2]
    assert [[host.name for host in trip.hosts] for trip in trips] == [["host-1", "host-2", "host-3"]] * 3
    assert sum(trip.wire_bytes for trip in trips) == result.wire_bytes_total
    assert 0 <= trips[0].begin_ms < trips[0].end_ms
    assert all(trip.begin_ms < trip.end_ms for trip in trips)
    assert [trip.end_ms for trip in trips[:-1]] == [trip.begin_ms for trip in trips[1:]]
    computed = sum(host.compute_ms for trip in trips for host in trip.hosts)
    assert computed == pytest.approx(sum(host.compute_ms for host in result.hosts), abs=0.01)


def race_events(answer: httpx.Response) -> list[dict[str, Any]]:
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_failed_entrant_does_not_stop_the_others(http: httpx.Client) -> None:
    entrants = ["resample:scorer", "local:copy", "local"]
    events = race_events(http.post("/api/race", json={**RACE, "entrants": entrants}))
    errors = {event["lane"]: (event["status"], event["error"]) for event in events if "error" in event}
    assert {lane: status for lane, (status, _) in errors.items()} == dict.fromkeys(entrants[:2], 400)
    assert [event["lane"] for event in events if "result" in event] == ["local"]


def test_ending_a_race_frees_hosts(http: httpx.Client, deployment: Deployment, completed: Callable[[], int]) -> None:
    before, length = completed(), 480
    asked = {**RACE, "max_bytes": length, "entrants": ["ar", "ar-speculative"]}
    with http.stream("POST", "/api/race", json=asked) as answer:
        for line in answer.iter_lines():
            if '"trip"' in line:
                break
    until(lambda: sessions(deployment) == 0)
    assert completed() - before < 3 * length, "the rest was not computed"


def test_the_hosts_are_listed_with_their_entrants(http: httpx.Client, deployment: Deployment) -> None:
    shown = http.get("/api/hosts").json()
    assert shown["ready"]
    assert [host["name"] for host in shown["hosts"]] == [host.name for host in deployment.topology.hosts]
    assert all(isinstance(host["session_bytes"], int) for host in shown["hosts"])
    assert "resample:ar" in shown["entrants"]
    assert "resample:scorer" not in shown["entrants"], "the hosts have no such scorer"
