"""Healthy requests beside the bad ones, which must get their own answers; and the messages of such requests."""

import asyncio
import base64
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from onesweep.loadtest.fuzz.testbed import ROUTER, STAGE, FuzzTestbed, Hook, unchanged
from onesweep.serving.client.client import AsyncClient, Client, RouterError
from onesweep.serving.drawing.request import DrawingRequest
from onesweep.serving.router.request import Request
from onesweep.stages.checkpoint.bundle import bundle_draws
from onesweep.stages.v1 import stage_pb2

PROMPT = "The old man looked at the sea and said that"
# One request of each mode, for a bundle that writes and for one that draws.
TEXTS: tuple[dict[str, Any], ...] = (
    {"mode": "sweep", "max_tokens": 16},
    {"mode": "chunked", "max_tokens": 16, "chunk": 8},
    {"mode": "ar", "max_tokens": 8},
    {"mode": "ar-speculative", "max_tokens": 12},
    {"mode": "resample", "max_tokens": 8, "chunk": 8, "candidates": 4},
    {"mode": "local", "max_tokens": 8},
)
PICTURES: tuple[dict[str, Any], ...] = (
    {"classes": "0", "mode": "chain", "levels": 6, "pictures": 2},
    {"classes": "1", "mode": "chain", "levels": 3, "codec": "fp32", "guidance": 1.0, "solver": "euler"},
    {"classes": "1", "mode": "steps", "levels": 3, "codec": "int8"},
    {"classes": "0", "mode": "steps", "levels": 3, "pictures": 2, "codec": "fp32", "solver": "euler"},
    {"classes": "0", "mode": "local", "levels": 3},
)
SEED = 5
TIMEOUT_S = 60.0
PAUSE_S = 0.05
PATIENCE_S = 90.0  # how long one request may be refused
BUSY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


def asked_of(checkpoint: Path) -> tuple[dict[str, Any], ...]:
    """The healthy requests for what a bundle makes."""
    return PICTURES if bundle_draws(checkpoint) else TEXTS


async def answer_to(client: AsyncClient, asked: dict[str, Any], timeout_s: float) -> bytes:
    """The text, or the pixels. Raises OnesweepError."""
    if "classes" not in asked:
        return (await client.generate(PROMPT, seed=SEED, timeout_s=timeout_s, **asked)).output
    preview = (lambda shown: None) if asked["mode"] == "chain" else None
    return (await client.draw(seed=SEED, timeout_s=timeout_s, preview=preview, **asked)).pixels.tobytes()


class Healthy:
    """A thread that makes one request after the other, over gRPC and over HTTP, and compares."""

    def __init__(self, testbed: FuzzTestbed, answers: Sequence[bytes] = ()) -> None:
        """Asks for the reference answers, with nobody else there, unless they are given. Raises OnesweepError."""
        self.router, self.gateway, self.asked = testbed.router, testbed.gateway, asked_of(testbed.checkpoint)
        self.right: Counter[str] = Counter()
        self.told_to_wait = 0
        self.took_s: list[float] = []  # of each right answer, the times between its calls included
        self.trouble: list[str] = []
        with Client(self.router) as client:
            self.answers = answers or [self._over_grpc(client, asked) for asked in self.asked]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="healthy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last one has its answer."""
        self._stop.set()
        self._thread.join(TIMEOUT_S + PATIENCE_S)
        if self._thread.is_alive():
            self.trouble.append("a healthy request never ended")
        if not self.right:
            self.trouble.append("no healthy request was answered")

    def _run(self) -> None:
        try:
            self._ask_on()
        except Exception as error:  # whatever it is, a thread's end would go unseen
            self.trouble.append(f"the thread ended: {type(error).__name__}: {error}")

    def _ask_on(self) -> None:
        turn = 0
        with Client(self.router) as client:
            while not turn or not self._stop.wait(PAUSE_S):
                rounds, number = divmod(turn, len(self.asked))
                # every fourth round goes through the gateway, which is fuzzed as well
                self._ask(client, self.asked[number], self.answers[number], over_http=rounds % 4 == 3)
                turn += 1

    def _ask(self, client: Client, asked: dict[str, Any], right: bytes, over_http: bool) -> None:
        way = f"{asked['mode']} over HTTP" if over_http else str(asked["mode"])
        begin = time.monotonic()
        while True:
            try:
                output = self._over_http(asked) if over_http else self._over_grpc(client, asked)
                break
            except RouterError as error:
                if error.code not in BUSY or time.monotonic() - begin > PATIENCE_S:
                    self.trouble.append(f"{way}: {error.code.name} {error}")
                    return
                self.told_to_wait += 1
                time.sleep(min((error.retry_after_ms or 200) / 1000, 1.0))
        if output == right:
            self.right[way] += 1
            self.took_s.append(time.monotonic() - begin)
        else:
            self.trouble.append(f"{way}: {output[:200]!r} instead of {right[:200]!r}")

    def _over_grpc(self, client: Client, asked: dict[str, Any]) -> bytes:
        if "classes" in asked:
            return client.draw(seed=SEED, timeout_s=TIMEOUT_S, **asked).pixels.tobytes()
        return client.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked).output

    def _over_http(self, asked: dict[str, Any]) -> bytes:
        """Raises RouterError as a client of the router would."""
        path, body = http_body(asked)
        request = urllib.request.Request(
            f"http://{self.gateway}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            code = {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}.get(error.code, "UNKNOWN")
            raise RouterError(f"HTTP {error.code}: {error.read()!r}", grpc.StatusCode[code]) from None
        except OSError as error:
            raise RouterError(f"the gateway fails: {error}", grpc.StatusCode.UNKNOWN) from None
        if "data" not in answer:
            return bytes.fromhex(answer["onesweep"]["accounting"][0]["output_hex"])
        return b"".join(pixels_of(base64.b64decode(each["b64_json"])) for each in answer["data"])


def http_body(asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request of this module over HTTP."""
    own = {key: value for key, value in asked.items() if key not in ("max_tokens", "classes", "pictures")}
    body = {"model": "onesweep", "seed": SEED, "onesweep": own}
    if "classes" in asked:
        return "/v1/images/generations", {**body, "prompt": asked["classes"], "n": asked.get("pictures", 1)}
    return "/v1/completions", {**body, "prompt": PROMPT, "max_tokens": asked["max_tokens"]}


def pixels_of(png: bytes) -> bytes:
    """(channels, height, width), as the router sends them."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        return b"".join(channel.tobytes() for channel in picture.split())


MOST_KEPT = 64  # messages of one kind: they come thousands of times, and are much alike
SETTLE_S = 1.2  # long enough for each host to be described and kept warm


class Captures:
    """Real requests and answers by method, and hops, as they passed the interposers."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, list[bytes]] = defaultdict(list)
        self.answers: defaultdict[str, list[bytes]] = defaultdict(list)
        self.hops: list[bytes] = []

    def keeping(self, kept: defaultdict[str, list[bytes]]) -> Hook:
        def keep(method: str, data: bytes) -> bytes:
            if len(kept[method]) < MOST_KEPT and data not in kept[method]:
                kept[method].append(data)
            return data

        return keep


async def record(testbed: FuzzTestbed) -> Captures:
    """Have every mode served over the interposers. Raises OnesweepError."""
    captures = Captures()
    ways = (*testbed.between, testbed.before_router)
    for way in ways:
        way.on_request, way.on_answer = captures.keeping(captures.requests), captures.keeping(captures.answers)
    async with AsyncClient(testbed.deceived) as client, AsyncClient(testbed.posing) as posed:
        for each in (client, posed):
            for asked in asked_of(testbed.checkpoint):
                await answer_to(each, asked, TIMEOUT_S)
        await posed.status()
    await asyncio.sleep(SETTLE_S)
    for way in ways:
        way.on_request = way.on_answer = unchanged
    # both kinds, whatever is served
    for asked in TEXTS:
        captures.requests["Generate"].append(Request(prompt=PROMPT, seed=SEED, **asked).message().SerializeToString())
    for asked in PICTURES:
        drawing = DrawingRequest(seed=SEED, **{**asked, "classes": (asked["classes"],)})
        captures.requests["Draw"].append(drawing.message(asked["mode"] == "chain").SerializeToString())
    for data in captures.requests["Push"]:
        captures.hops += [hop.SerializeToString() for hop in stage_pb2.HopBatch.FromString(data).hops]
    methods = [method.name for service in (STAGE, ROUTER) for method in service.methods]
    for method in methods:  # no request brings about Probe
        captures.requests[method] = captures.requests[method] or [b""]
    return captures
