"""Rings of two hosts for every block, of which one is lost in the middle of a request."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client
from stages.host.host import Host
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of
from stages.wire.status import StatusError
from tests.conftest import wait_ready
from tests.serving.releases import doubled


@pytest.fixture(scope="module")
def pairs(bundles: Path, module_servers: Any) -> Iterator[tuple[Client, Client]]:
    """Routers over two hosts for every block, the second of which audits every sweep."""
    bundle = bundles / "scored"
    topology = doubled(bundle)
    other = replace(topology, router=f"127.0.0.1:{free_port_block(1)}")
    module_servers.hosts(topology, bundle)
    module_servers.router(topology, bundle, ring={"hop_timeout_s": 10.0})
    module_servers.router(other, bundle, ring={"hop_timeout_s": 10.0, "audit_share": 1.0})
    for each in (topology, other):
        wait_ready(each.router)
    with Client(topology.router) as plain, Client(other.router) as audited:
        yield plain, audited


@dataclass
class Loss:
    """A host that takes no hops any more, and what all of them took."""

    lost: str = ""
    hops: dict[str, list[stage_pb2.Hop]] = field(default_factory=lambda: defaultdict(list))

    @property
    def before(self) -> list[list[stage_pb2.Hop]]:
        """What it had taken, try by try: a machine that stalls may cost a request more tries than the loss does."""
        return self._tries(self.lost)

    @property
    def instead(self) -> list[list[stage_pb2.Hop]]:
        """What the other host of its pair took, try by try."""
        pair, number = self.lost.split("-")
        return self._tries(f"{pair}-{3 - int(number)}")

    def _tries(self, host: str) -> list[list[stage_pb2.Hop]]:
        tries = defaultdict[str, list[stage_pb2.Hop]](list)
        for hop in self.hops[host]:
            tries[hop.session].append(hop)
        return list(tries.values())


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loss]:
    """Have the first host of a pair that is sent a certain hop take none from then on. `pair`: begins their names."""

    def at(
        pair: str, is_due: Callable[[stage_pb2.Hop], bool], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    ) -> Loss:
        loss, accept = Loss(), Host.accept

        def looked_at(host: Host, hop: stage_pb2.Hop, received_bytes: int, sender: str = "") -> Any:
            name = host.settings.name
            if name == loss.lost or (not loss.lost and name.startswith(pair) and is_due(hop)):
                loss.lost = name
                raise StatusError(code, "gone", 100)
            loss.hops[name].append(copy_of(hop))
            return accept(host, hop, received_bytes, sender)

        monkeypatch.setattr(Host, "accept", looked_at)
        return loss

    return at
