"""Healthy requests beside the bad ones, which must get their own texts; and the messages of such requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from typing import Any

import grpc

from onesweep.loadtest.fuzz.testbed import ROUTER, STAGE, FuzzTestbed, Hook, unchanged
from onesweep.serving.client.client import AsyncClient, Client, RouterError
from onesweep.serving.router.request import Request
from onesweep.stages.v1 import stage_pb2

PROMPT = "The old man looked at the sea and said that"
# One request of each mode.
ASKED: tuple[dict[str, Any], ...] = (
    {"mode": "sweep", "max_tokens": 16},
    {"mode": "chunked", "max_tokens": 16, "chunk": 8},
    {"mode": "ar", "max_tokens": 8},
    {"mode": "ar-speculative", "max_tokens": 12},
    {"mode": "resample", "max_tokens": 8, "chunk": 8, "candidates": 4},
    {"mode": "verified", "max_tokens": 8},
    {"mode": "infill", "max_tokens": 4, "suffix": " of the village.", "candidates": 4},
    {"mode": "local", "max_tokens": 8},
)
SEED = 5
TIMEOUT_S = 60.0
PAUSE_S = 0.05
PATIENCE_S = 90.0  # how long one request may be refused
BUSY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


class Healthy:
    """A thread that asks for one text after the other, over gRPC and over HTTP, and compares."""

    def __init__(self, router: str, gateway: str) -> None:
        """Asks for the reference texts, with nobody else there. Raises OnesweepError."""
        self.router, self.gateway = router, gateway
        self.right: Counter[str] = Counter()
        self.told_to_wait = 0
        self.trouble: list[str] = []
        with Client(router) as client:
            self.texts = [client.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked).output for asked in ASKED]
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
                asked, text = ASKED[turn % len(ASKED)], self.texts[turn % len(ASKED)]
                # every fourth round goes through the gateway, which is fuzzed as well
                over_http = turn // len(ASKED) % 4 == 3
                self._ask(client, asked, text, over_http)
                turn += 1

    def _ask(self, client: Client, asked: dict[str, Any], text: bytes, over_http: bool) -> None:
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
        if output == text:
            self.right[way] += 1
        else:
            self.trouble.append(f"{way}: {output!r} instead of {text!r}")

    def _over_grpc(self, client: Client, asked: dict[str, Any]) -> bytes:
        return client.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked).output

    def _over_http(self, asked: dict[str, Any]) -> bytes:
        """Raises RouterError as a client of the router would."""
        own = {key: value for key, value in asked.items() if key != "max_tokens"}
        body = {"model": "onesweep", "prompt": PROMPT, "max_tokens": asked["max_tokens"], "seed": SEED, "onesweep": own}
        request = urllib.request.Request(
            f"http://{self.gateway}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                accounting = json.load(answer)["onesweep"]["accounting"][0]
        except urllib.error.HTTPError as error:
            code = {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}.get(error.code, "UNKNOWN")
            raise RouterError(f"HTTP {error.code}: {error.read()!r}", grpc.StatusCode[code]) from None
        except OSError as error:
            raise RouterError(f"the gateway fails: {error}", grpc.StatusCode.UNKNOWN) from None
        return bytes.fromhex(accounting["output_hex"])


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
        for asked in ASKED:
            await client.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked)
            request = Request(prompt=PROMPT, seed=SEED, **asked).message()
            captures.requests["Generate"].append(request.SerializeToString())
        for asked in ASKED:
            await posed.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked)
        await posed.status()
    await asyncio.sleep(SETTLE_S)
    for way in ways:
        way.on_request = way.on_answer = unchanged
    for data in captures.requests["Push"]:
        captures.hops += [hop.SerializeToString() for hop in stage_pb2.HopBatch.FromString(data).hops]
    methods = [method.name for service in (STAGE, ROUTER) for method in service.methods]
    for method in methods:  # no request brings about Run and Probe
        captures.requests[method] = captures.requests[method] or [b""]
    return captures
