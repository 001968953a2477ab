"""Plain sockets and nothing of the product: run inside a node, prints what it measured as JSON.

echo PORT | ping ADDRESS PORT COUNT | collect PORT COUNT | send ADDRESS PORT COUNT BURST PAUSE_S [SIZE]
serve PORT | pull ADDRESS PORT FLOWS WARM_S SECONDS
"""

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any

SO_TIMESTAMPNS = 35
FULL = 1472
"""Bytes of payload in a UDP packet of 1500 bytes."""


def bound(port: int) -> socket.socket:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, 33, 16_000_000)  # SO_RCVBUFFORCE: what is lost is lost on the link
    receiver.bind(("0.0.0.0", port))
    print("ready", flush=True)
    return receiver


def echo(port: str) -> None:
    receiver = bound(int(port))
    while True:
        data, sender = receiver.recvfrom(2048)
        receiver.sendto(data, sender)


def ping(address: str, port: str, count: str) -> list[float]:
    """Round trips of small packets, in milliseconds."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, int(port)))
        sender.settimeout(2)
        for i in range(int(count)):
            start = time.perf_counter()
            sender.send(struct.pack("I", i))
            try:
                while struct.unpack("I", sender.recv(2048))[0] != i:
                    pass
            except TimeoutError:  # lost
                continue
            trips.append((time.perf_counter() - start) * 1000)
            time.sleep(0.01)
    return trips


def collect(port: str, count: str, quiet_s: str = "3") -> list[tuple[int, float]]:
    """Number and time of arrival (by the kernel, in microseconds) of up to `count` packets, until it is quiet."""
    receiver, arrivals = bound(int(port)), []
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    receiver.settimeout(10)
    while len(arrivals) < int(count):
        try:
            data, ancillary, _, _ = receiver.recvmsg(2048, 64)
        except TimeoutError:
            break
        receiver.settimeout(float(quiet_s))
        seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
        arrivals.append((struct.unpack_from("I", data)[0], seconds % 10_000 * 1e6 + nanoseconds / 1e3))
    return arrivals


def send(address: str, port: str, count: str, burst: str, pause_s: str, size: str = str(FULL)) -> None:
    """`count` numbered packets, `burst` at once, then a pause."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, int(port)))
        for i in range(int(count)):
            if i and i % int(burst) == 0:
                time.sleep(float(pause_s))
            sender.send(struct.pack("I", i).ljust(int(size), b"\0"))


def serve(port: str) -> None:
    """Send as much as TCP takes to whoever connects."""
    with socket.create_server(("0.0.0.0", int(port))) as server:
        print("ready", flush=True)
        server.setblocking(False)
        connections: list[socket.socket] = []
        zeros = bytes(65536)
        while True:
            readable, writable, _ = select.select([server], connections, [])
            if readable:
                connection, _ = server.accept()
                connection.setblocking(False)
                connections.append(connection)
            for connection in writable:
                try:
                    connection.send(zeros)
                except BlockingIOError:
                    pass
                except OSError:
                    connections.remove(connection)


def pull(address: str, port: str, flows: str, warm_s: str, seconds: str) -> float:
    """Megabits of payload a second over `flows` connections, after `warm_s`."""
    connections = [socket.create_connection((address, int(port))) for _ in range(int(flows))]
    begin = time.perf_counter() + float(warm_s)
    end, received, counted_from = begin + float(seconds), 0, 0.0
    while (now := time.perf_counter()) < end:
        if now < begin:
            received, counted_from = 0, now
        for connection in select.select(connections, [], [], 1)[0]:
            received += len(connection.recv(1 << 20))
    return received * 8e-6 / (now - counted_from)


def main() -> None:
    programs: dict[str, Any] = {f.__name__: f for f in (echo, ping, collect, send, serve, pull)}
    if sys.argv[1] not in ("serve", "pull"):
        # The link is measured, not how long this program waits for a core that others compute on.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    result = programs[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
