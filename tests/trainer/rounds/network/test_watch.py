"""Watching a run whose coordinator goes away: it is looked for again, and what comes of that is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from stages.errors import ServiceError
from trainer.rounds.client import Link
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

RUNNING, STOPPING, FINISHED = (
    rounds_pb2.RUN_STATE_RUNNING,
    rounds_pb2.RUN_STATE_STOPPING,
    rounds_pb2.RUN_STATE_FINISHED,
)
Serve = Callable[..., grpc.Server]


class Shown(rounds_pb2_grpc.RoundsServiceServicer):
    """Tells everybody who watches the same states."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        for state in self.states:
            yield rounds_pb2.WatchUpdate(state=state)


@pytest.fixture
def address(unused_port: int) -> str:
    return f"127.0.0.1:{unused_port}"


@pytest.fixture
def serve(address: str) -> Iterator[Serve]:
    """`serve(*states)`: what a coordinator shows before its stream ends; there is one at a time."""
    servers = list[grpc.Server]()

    def start(*states: Any) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        rounds_pb2_grpc.add_RoundsServiceServicer_to_server(Shown(*states), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(None).wait()


def test_a_coordinator_that_is_started_again_is_found(address: str, serve: Serve) -> None:
    first, problems, link = serve(RUNNING, STOPPING), list[str](), Link(address)
    updates = link.watch(0.1, problems.append)
    assert [next(updates).state, next(updates).state] == [RUNNING, STOPPING]
    first.stop(None).wait()
    serve(RUNNING, FINISHED)
    assert [update.state for update in updates] == [RUNNING, FINISHED]
    # its end is told by itself, or only by nobody being there any more
    assert problems in ([f"the coordinator at {address} has stopped"], [f"no coordinator answers at {address}"])
    link.close()


def test_one_that_does_not_come_back_is_given_up(address: str, serve: Serve) -> None:
    first, link = serve(RUNNING, RUNNING), Link(address, patience_s=0.3)
    updates = link.watch(0.1)
    next(updates)
    first.stop(None).wait()
    with pytest.raises(ServiceError, match=f"no coordinator answers at {address}; gave up after 0 s"):
        list(updates)
    link.close()


def test_the_command_says_so_and_its_exit_code_tells(address: str, serve: Serve, onesweep: Callable[..., Any]) -> None:
    first = serve(RUNNING, STOPPING)
    found = onesweep("rounds", address, "--json", "--patience", 0)
    assert (found.code, found.message) == (1, f"the coordinator at {address} has stopped; gave up after 0 s")
    assert [json.loads(line)["state"] for line in found.out.splitlines()] == ["RUN_STATE_RUNNING", "RUN_STATE_STOPPING"]
    found = onesweep("rounds", address, "--patience", 0)
    assert found.out.endswith(f"the coordinator at {address} has stopped; looking for it for 0 s\n\n")
    first.stop(None).wait()
    serve(FINISHED)
    assert onesweep("rounds", address).code == 0
