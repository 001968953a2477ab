"""Target `http`: bodies, headers, methods and framing that no client of the gateway should send."""

import asyncio
import contextlib
import json
import random
from typing import Any

from onesweep.loadtest.fuzz.base import FuzzTarget, all_of
from onesweep.loadtest.fuzz.healthy import PICTURES, PROMPT, SEED, TEXTS, http_body
from onesweep.loadtest.fuzz.inputs import damaged
from onesweep.loadtest.fuzz.testbed import FuzzTestbed

ANSWER_S = 20.0
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/api/race", "/v1/images/generations", "/api/race/pictures"),
    "/v1/responses",
)
PAGES = (
    *("/", "/hosts", "/api/hosts", "/v1/models", "/v1/models/onesweep-ar", "/healthz", "/readyz", "/static/race.js"),
    *("/openapi.json", "/static/../app.py", "/static/%2e%2e%2fapp.py", "/%00", "/%ff", "//", "/v1/models/%F0%9F", "*"),
    *("http://x/", "/" + "a" * 9000),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X" * 40, "g e t", "")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 2**31, 2**32, 2**53 + 1, 2**64 - 1, 2**64, -(2**63), 10**400, 1e308, 5e-324),
    *("", "x", "\x00", "\ud800", "\u202e", "é" * 300, "a" * 5000, "onesweep-ar", "onesweep-nope", "ar", "NaN"),
    *([], [None], [[]], {}, {"a": {}}, ["x"] * 300, [{"type": "text", "text": "x"}], {"include_usage": True}),
)
# Names that fields of the API have, and names that none has.
KEYS = ("x", "", "\x00", "prompt", "stream", "n", "stop", "echo", "size")
# JSON that parses to what no field may hold, or only just parses.
LITERALS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 20000, b'{"a":' * 3000, b'"\\ud800"'),
    *(b"\xff\xfe", b"//"),
)
HEADERS = (
    *(b"Authorization: Bearer " + b"x" * 5000, b"Host: evil.example", b"Origin: http://evil.example", b"X\xff: \xff"),
    *(b"X: " + b"y" * 70000, b"\r\n".join(b"X-%d: y" % n for n in range(500)), b"Content-Length: 5"),
    *(b"Content-Length: 99999999999999999999999", b"Content-Length: -1", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: gzip", b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade"),
    *(b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Content-Encoding: gzip"),
    b"Range: bytes=9-1",
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FRAMINGS = (
    CHUNKED + b"ffffffffffffffff\r\nx",
    CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"2;ext=" + b"a" * 9000 + b"\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"2\r\n{}\r\n0\r\nTrailer: x\r\n\r\n",
    CHUNKED + b"-2\r\n{}",
    HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 100,
    HEAD + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
    HEAD.replace(b"\r\n", b"\n") + b"\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
    *(b"GET /\r\n\r\n", b"\r\n" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HEAD),
)
# 500 and 502 are a gateway's, or a router's, own fault.
EXPECTED = {100, *range(200, 206), *range(301, 309), *range(400, 432), 501, 503, 504, 505}


class HttpTarget(FuzzTarget):
    """The gateway of the OpenAI API."""

    name = "http"

    def __init__(self, testbed: FuzzTestbed, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.host, _, port = testbed.gateway.rpartition(":")
        self.port = int(port)
        self.bodies = [each for asked in TEXTS for each in _bodies(asked)]
        self.bodies += [each for asked in PICTURES for each in _picture_bodies(asked)]

    async def send(self, count: int) -> None:
        self.tally.inputs += count
        await all_of([self._exchange(*self._input()) for _ in range(count)], at_once=12)

    def _input(self) -> tuple[bytes, bool, bool]:
        """A request, then flags: wait for its answer, and end the stream after it."""
        rng = self.rng
        patient, way = rng.random() > 0.1, rng.randrange(10)
        path, body = rng.choice(self.bodies)
        whole = json.dumps(body).encode()
        if way < 4:
            return self._request("POST", path, json.dumps(self._changed(body)).encode()), patient, False
        if way < 6:
            return self._request("POST", path, self._damaged(whole)), patient, False
        if way == 6:
            return self._request(rng.choice(METHODS), rng.choice((*PATHS, *PAGES)), b""), patient, False
        if way == 7:
            return self._request("POST", path, whole, self._odd_header()), patient, False
        ends = rng.random() < 0.95
        return damaged(rng, self._request("POST", path, whole)) if way == 8 else self._framing(), patient, ends

    def _changed(self, value: Any, depth: int = 0) -> Any:  # noqa: ANN401
        """The same JSON with something in it changed."""
        rng = self.rng
        if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.6):
            key = rng.choice(list(value))
            match rng.randrange(6):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return {**value, rng.choice(KEYS): rng.choice(VALUES)}
            return {**value, key: self._changed(value[key], depth + 1)}
        if isinstance(value, list) and value and rng.random() < 0.5:
            return [*value, self._changed(value[0], depth + 1)] * rng.choice((1, 1, 40))
        return rng.choice(VALUES)

    def _damaged(self, body: bytes) -> bytes:
        if self.rng.random() < 0.5:
            return damaged(self.rng, body)
        at = body.find(b":", self.rng.randrange(len(body))) + 1
        return body[:at] + self.rng.choice(LITERALS) + body[at:]

    def _odd_header(self) -> bytes:
        token = self.rng.randbytes(9).replace(b"\r", b"").replace(b"\n", b"")
        return self.rng.choice((b"Authorization: Bearer " + token, *HEADERS)) + b"\r\n"

    def _framing(self) -> bytes:
        # the begin of a TLS handshake
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.randbytes(100)
        return self.rng.choice((*FRAMINGS, hello, self.rng.randbytes(300)))

    def _request(self, method: str, path: str, body: bytes, more: bytes = b"") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n" + more + b"\r\n" + body

    async def _exchange(self, data: bytes, patient: bool, ends: bool) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._answer(data, patient, ends)
        except TimeoutError:
            self.tally.answer("HANG")
            self.tally.finding(f"no end of an answer within {ANSWER_S:g} s", data)
            return
        except OSError as error:
            # it may close the connection on what it will not read
            self.tally.answer("closed")
            if isinstance(error, ConnectionRefusedError):
                self.tally.finding("nobody listens any more", data)
            return
        words = answer.split(b" ", 2)
        status = int(words[1]) if len(words) > 2 and words[0].startswith(b"HTTP/1.") and words[1].isdigit() else 0
        self.tally.answer(str(status) if status else "left" if not patient else "closed")
        if status and status not in EXPECTED:
            self.tally.finding(f"status {status}: {answer.rpartition(bytes.fromhex('0d0a0d0a'))[2][:120]!r}", data)

    async def _answer(self, data: bytes, patient: bool, ends: bool) -> bytes:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
                if ends:
                    writer.write_eof()
            return await (reader.read() if patient else reader.read(1))
        finally:
            writer.close()


def _bodies(asked: dict[str, Any]) -> list[tuple[str, Any]]:
    own = {key: value for key, value in asked.items() if key != "max_tokens"} | {"timeout_s": 3.0}
    common = {"model": "onesweep", "max_tokens": 4, "seed": SEED, "temperature": 0.5, "onesweep": own}
    messages = [{"role": "user", "content": PROMPT}]
    chat = {**common, "messages": messages, "stream": True}
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    items = [*messages, call, {"type": "function_call_output", "call_id": "x", "output": "y"}]
    tools = {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}
    race = {"prompt": PROMPT, "entrants": ["sweep", str(asked["mode"])], "max_bytes": 4}
    return [
        (PATHS[0], {**common, "prompt": PROMPT, "n": 1, "stop": ["."], "stream": False}),
        (PATHS[1], chat),
        (PATHS[2], race),
        (PATHS[5], {"model": "onesweep", "max_output_tokens": 4, "input": items, **tools, "onesweep": own}),
    ]


def _picture_bodies(asked: dict[str, Any]) -> list[tuple[str, Any]]:
    path, body = http_body(asked)
    body["onesweep"] |= {"timeout_s": 3.0}
    race = {"prompt": asked["classes"], "entrants": ["chain", "steps", "local"], "seed": SEED, "levels": 3}
    return [(path, {**body, "size": "auto", "response_format": "b64_json"}), (PATHS[4], race)]
