"""Plain sockets and nothing of the product: run inside a node, prints what it measured as JSON.

echo PORT | ping ADDRESS PORT COUNT | collect PORT COUNT | send ADDRESS PORT COUNT
"""

import contextlib
import json
import os
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


def collect(port: str, count: str) -> list[float]:
    """Times of arrival of `count` packets, by the kernel, in microseconds."""
    receiver, arrivals = bound(int(port)), []
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    receiver.settimeout(10)
    for _ in range(int(count)):
        _, ancillary, _, _ = receiver.recvmsg(2048, 64)
        seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
        arrivals.append(seconds % 10_000 * 1e6 + nanoseconds / 1e3)
    return arrivals


def send(address: str, port: str, count: str) -> None:
    """`count` packets of full size at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, int(port)))
        for _ in range(int(count)):
            sender.send(bytes(FULL))


def main() -> None:
    programs: dict[str, Any] = {f.__name__: f for f in (echo, ping, collect, send)}
    # The link is measured, not how long this program waits for a core that others compute on.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    result = programs[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
