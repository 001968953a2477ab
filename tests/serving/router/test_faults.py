"""Hosts without a replica that die or come back. With real processes."""

import os
import signal
import threading
from collections.abc import Iterator

import grpc
import pytest

from serving.cli.deployment import Deployment
from serving.client.client import Client, Result, RouterError
from tests.conftest import PATIENCE_S, refused, until, wait_ready
from tests.serving.conftest import sessions

pytestmark = pytest.mark.slow

PROMPT = "The road went "
LONG = {"mode": "ar", "max_bytes": 450, "seed": 1}


@pytest.fixture
def client(victim: Deployment) -> Iterator[Client]:
    with Client(victim.topology.router) as opened:
        yield opened


class Request(threading.Thread):
    """A long request under way: `begun` is set by its first piece."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client, self.begun = client, threading.Event()
        self.result: Result | None = None
        self.error: RouterError | None = None
        self.start()
        assert self.begun.wait(PATIENCE_S)

    def run(self) -> None:
        try:
            for item in self.client.stream(PROMPT, **LONG):
                if isinstance(item, Result):
                    self.result = item
                self.begun.set()
        except RouterError as error:
            self.error = error
        self.begun.set()


def test_a_killed_host_fails_its_requests_and_may_return(victim: Deployment, client: Client) -> None:
    text = client.generate(PROMPT, max_bytes=40, seed=3).text
    request = Request(client)
    os.kill(victim.processes["host-2"], signal.SIGKILL)
    request.join(PATIENCE_S)
    assert request.error.code is grpc.StatusCode.UNAVAILABLE
    assert "host-2" in str(request.error)
    until(lambda: sessions(victim) == 0)

    with refused(grpc.StatusCode.UNAVAILABLE, r"host-2 at 127\.0\.0\.1:\d+.*waited 1\.0 s"):
        client.generate(PROMPT, max_bytes=40, seed=3)
    assert client.generate(PROMPT, mode="local", max_bytes=5).sweeps == 0, "a mode without hosts is still served"

    victim.revive("host-2")
    wait_ready(victim.topology.router)
    assert client.generate(PROMPT, max_bytes=40, seed=3).text == text
