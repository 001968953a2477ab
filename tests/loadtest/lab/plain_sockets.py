"""Plain sockets and nothing of the product: run inside a node, prints what it measured as JSON.

echo PORT | ping ADDRESS PORT COUNT | collect PORT COUNT | send ADDRESS PORT COUNT BURST PAUSE_S [SIZE]
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


def main() -> None:
    programs: dict[str, Any] = {f.__name__: f for f in (echo, ping, collect, send)}
    # The link is measured, not how long this program waits for a core that others compute on.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    result = programs[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
