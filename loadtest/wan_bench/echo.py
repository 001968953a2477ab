"""Plain sockets: a server that sends back what it gets, and a client that times the round trips."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

SIZE = 64
"""Bytes of a message: one small packet."""
DISCARDED = 3
CONNECT_S = 10.0


def serve(host: str, port: int) -> None:
    """Answer connections for ever; says `listening` when it does."""
    with socket.create_server((host, port)) as server:
        try:
            os.write(sys.stdout.fileno(), b"listening\n")  # unbuffered: nothing is left to be written at the end
        except BrokenPipeError:
            return  # whoever started it has gone
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def round_trips_ms(host: str, port: int, count: int) -> list[float]:
    """`count` round trips on one connection, after a few that are thrown away."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(DISCARDED + count):
            begin = time.perf_counter()
            connection.sendall(bytes(SIZE))
            _receive(connection)
            times.append((time.perf_counter() - begin) * 1000)
        return times[DISCARDED:]


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while piece := connection.recv(SIZE):
            connection.sendall(piece)


def _receive(connection: socket.socket) -> None:
    left = SIZE
    while left:
        piece = connection.recv(left)
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        left -= len(piece)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(round_trips_ms(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
