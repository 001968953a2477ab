"""Round trips over the lab's links on plain sockets, compared with the profile."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from onesweep.loadtest.lab.lab import Lab
from onesweep.loadtest.latency.floor import Course, Pair
from onesweep.loadtest.report.table import Table, number, number_column, text_column
from onesweep.stages.errors import OnesweepError

ECHO = [sys.executable, "-P", "-m", "onesweep.loadtest.latency.links"]
PORT = 7600  # no server of a deployment listens there
ROUND_TRIPS = 10  # seconds over far links, and a median that one repeated packet does not move
TIMEOUT_S = 120.0  # a lossy link repeats a packet only after a second

LINKS: Table[dict[str, Any]] = Table(
    (
        ("link", lambda row: f"{row['source']} - {row['destination']}"),
        text_column("profile"),
        number_column("nominal ms", "nominal_ms", 2),
        number_column("p50 ms", "p50_ms", 2),
        number_column("least ms", "least_ms", 2),
        number_column("most ms", "most_ms", 2),
        ("over nominal ms", lambda row: number(row["p50_ms"] - row["nominal_ms"], 2)),
    ),
    text_columns=2,
)


def ring_pairs(course: Course) -> list[Pair]:
    """Every pair of nodes that a ring uses, once."""
    pairs = course.sweep_path()
    if len(course.hosts) > 1:
        pairs.append((course.hosts[-1], course.hosts[0]))
    return list({tuple(sorted(pair)): pair for pair in pairs}.values())


def measure_links(lab: Lab, course: Course) -> list[dict[str, Any]]:
    """Round trips between the nodes of the ring. Raises OnesweepError when one does not reach the other."""
    pairs = ring_pairs(course)
    with contextlib.ExitStack() as servers:
        for node in sorted({destination for _, destination in pairs}):
            servers.enter_context(_echo_server(lab, node))
        return [_measure(lab, course, *pair) for pair in pairs]


def _measure(lab: Lab, course: Course, source: str, destination: str) -> dict[str, Any]:
    ping = lab.command(source, [*ECHO, "ping", lab.address(destination), str(PORT), str(ROUND_TRIPS)])
    try:
        done = subprocess.run(ping, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OnesweepError(f"{source} gets no answer from {destination} over the emulated links") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OnesweepError(f"{source} does not reach {destination} over the emulated links: {last}")
    times: list[float] = json.loads(done.stdout)
    return {
        "profile": lab.profile.name,
        "source": source,
        "destination": destination,
        # both one-way delays: 64 bytes add next to nothing
        "nominal_ms": course.link(source, destination).delay_ms + course.link(destination, source).delay_ms,
        "p50_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
    }


@contextlib.contextmanager
def _echo_server(lab: Lab, node: str) -> Iterator[None]:
    command = lab.command(node, [*ECHO, "serve", lab.address(node), str(PORT)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise OnesweepError(f"cannot listen in {node} of the emulated network")
            yield
        finally:
            server.kill()


# Plain sockets: a server that sends back what it gets, and a client that times the round trips. No gRPC, so that a
# difference from the profile is the lab's and not the servers'.

SIZE = 64  # bytes of a message: one small packet
DISCARDED = 3  # addresses are resolved with the first, and windows open
CONNECT_S = 10.0


def serve_echo(host: str, port: int) -> None:
    """Answer connections for ever; says `listening` when it does."""
    with socket.create_server((host, port)) as server:
        try:
            os.write(sys.stdout.fileno(), b"listening\n")  # unbuffered: nothing is left to be written at the end
        except BrokenPipeError:
            return  # the parent has ended
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while piece := connection.recv(SIZE):
            connection.sendall(piece)


def round_trips_ms(host: str, port: int, count: int) -> list[float]:
    """`count` round trips on one connection, after a few that are thrown away."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection, connection.makefile("rb") as answers:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(DISCARDED + count):
            begin = time.perf_counter()
            connection.sendall(bytes(SIZE))
            if len(answers.read(SIZE)) < SIZE:
                raise ConnectionResetError("the other end closed the connection")
            times.append((time.perf_counter() - begin) * 1000)
        return times[DISCARDED:]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve_echo(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(round_trips_ms(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
