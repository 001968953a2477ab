"""Over a far link a worker is at its coordinator with the first connection that it makes."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from trainer.rounds.client import RoundsClient
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

ROUND_TRIPS_S = 0.5
"""Of connecting; longer than gRPC would wait before its second try, and its third."""


class Willing(rounds_pb2_grpc.RoundsServiceServicer):
    def Join(self, request: Any, context: Any) -> Any:
        return rounds_pb2.JoinResponse(lease="given")


class FarDoor:
    """Carries bytes between who connects and a server, and lets the first of them wait."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        time.sleep(ROUND_TRIPS_S)
        with contextlib.suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=_copy, args=(far, near), daemon=True).start()
            _copy(near, far)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def door() -> Iterator[FarDoor]:
    server = grpc.server(ThreadPoolExecutor(2))
    rounds_pb2_grpc.add_RoundsServiceServicer_to_server(Willing(), server)  # type: ignore[no-untyped-call]
    found = FarDoor(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    yield found
    found.close()
    server.stop(None).wait()


@pytest.mark.slow
def test_the_first_connection_is_not_given_up(door: FarDoor) -> None:
    link = RoundsClient(door.address)
    assert link.join(rounds_pb2.JoinRequest()).lease == "given"
    assert door.connections == 1
    link.close()
