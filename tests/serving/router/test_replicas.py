"""Two hosts for every block share the requests. Faults of theirs: tests/loadtest."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.cli.deployment import Deployment, temporary_deployment
from serving.client.client import Client, Result
from tests.conftest import PATIENCE_S, until
from tests.serving.releases import all_ready, doubled

pytestmark = pytest.mark.slow

PROMPT = b"The sea was calm. The sea was "
REQUEST: dict[str, Any] = {"mode": "ar", "max_bytes": 200, "codec": "int8"}


@pytest.fixture(scope="module")
def doubles(bundles: Path) -> Iterator[Deployment]:
    topology = doubled(bundles / "scored")
    with temporary_deployment(topology, bundles / "scored") as running:
        yield running


class Streaming:
    """A request in a thread of its own that has begun to write."""

    def __init__(self, client: Client, request: dict[str, Any]) -> None:
        self.output, self.result = b"", None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(client, request))
        self._thread.start()
        assert self._begun.wait(PATIENCE_S)

    def _run(self, client: Client, request: dict[str, Any]) -> None:
        try:
            for item in client.stream(PROMPT, seed=3, **request):
                if isinstance(item, Result):
                    self.result = item
                else:
                    self.output += item
                    self._begun.set()
        finally:
            self._begun.set()

    def end(self) -> Result:
        self._thread.join(PATIENCE_S)
        assert isinstance(self.result, Result)
        assert self.result.output == self.output
        return self.result


def test_hosts_take_turns(caller: Client) -> None:
    until(partial(all_ready, caller))
    used: set[str] = set()

    def every_host_was_used() -> bool:
        streams = [Streaming(caller, REQUEST) for _ in range(6)]
        used.update(host.name for stream in streams for host in stream.end().hosts)
        return used == {"a-1", "a-2", "b-1", "b-2"}

    until(every_host_was_used)  # a loaded machine may show one replica as far away for a while
