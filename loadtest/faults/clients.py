"""Users beside the router that ask until they are answered, and what the router says of its hosts meanwhile.

Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from loadtest.workload.caller import Caller, RouterState
from loadtest.workload.prompts import NOVEL
from serving.drawing import DRAWING_MODES
from stages.errors import ServiceError

OK = "OK"
LATE = "LATE"  # no whole answer within the request's patience, however often it was tried
# Statuses after which the same request may be sent again.
AGAIN = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "ABORTED"}
PAUSE_S = 0.25  # before another call, where a refusal names no time
HEALTH_S = 0.5
SETTLE_S = 60.0  # how long after the last answer hosts may be lost, or hold sessions


PROMPTS = 3  # of each mode
# Settings of a request, by its mode.
REQUESTS: dict[str, dict[str, Any]] = {
    "sweep": {"max_bytes": 96},
    "chunked": {"max_bytes": 96, "chunk": 16},
    "resample": {"max_bytes": 64, "candidates": 16},
    "ar": {"max_bytes": 48},
    "ar-speculative": {"max_bytes": 64},
    "local": {"max_bytes": 48},
    "auto": {"max_bytes": 48},  # without a budget it takes the best setting, whatever the links are like
}
PROMPT_BYTES = 48
ROOM_BYTES = PROMPT_BYTES + 96 + 16
# Of a request for pictures. Guidance and solver are the router's defaults.
DRAWINGS: dict[str, dict[str, Any]] = {mode: {"pictures": 2, "levels": 12} for mode in DRAWING_MODES}


@dataclass(frozen=True)
class SeededRequest:
    """A request that has one answer: a text, or pictures."""

    mode: str
    prompt: str  # or the class to draw
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    draws: bool = False

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of `Client.stream` or `Client.draw`."""
        return {
            "classes" if self.draws else "prompt": self.prompt,
            "mode": self.mode,
            "seed": self.seed,
            **self.settings,
        }


def seeded_requests(
    modes: Collection[str], first_seed: int, context_length: int, classes: Sequence[str] = ()
) -> tuple[SeededRequest, ...]:
    """Requests of all modes in turn, each with a seed of its own; shorter where the context has no room.

    :param classes: that are drawn, and take turns; empty where text is written.
    """
    scale = min(1.0, context_length / ROOM_BYTES)
    cases: list[SeededRequest] = []
    for turn, (mode, settings) in itertools.product(range(PROMPTS), (DRAWINGS if classes else REQUESTS).items()):
        number = len(cases)
        prompt, seed = NOVEL.text(number)[: int(PROMPT_BYTES * scale)], first_seed + 100 * turn + number
        if mode in modes and classes:
            cases.append(SeededRequest(mode, classes[number % len(classes)], seed, settings, draws=True))
        elif mode in modes:
            shorter = {**settings, "max_bytes": max(1, int(settings["max_bytes"] * scale))}
            cases.append(SeededRequest(mode, prompt, seed, shorter))
    return tuple(cases)


@dataclass(frozen=True)
class Try:
    """One call that brought no whole answer."""

    code: str
    message: str
    retry_after_ms: int | None = None
    output: bytes = b""  # the text, or pixels, until then

    @property
    def refused(self) -> bool:
        """True of a refusal that names a time to come back."""
        return self.code == "RESOURCE_EXHAUSTED" and self.retry_after_ms is not None


@dataclass(frozen=True)
class Answer:
    """A request from its first call to its end."""

    case: int
    begin_s: float
    end_s: float
    status: str  # OK, LATE, or the name of a gRPC status that another call would not change
    output: bytes = b""  # of the last call
    arrivals_s: list[float] = field(default_factory=list)  # when pieces of the answer came, in all calls
    tries: list[Try] = field(default_factory=list)  # calls before the last one, and the last one too where it failed
    replays: int = 0  # times that the router moved the work to other hosts


class Clients:
    """Users that take the cases in turn."""

    def __init__(self, caller: Caller, cases: Sequence[SeededRequest], at_once: int, patience_s: float) -> None:
        self.caller, self.cases, self.patience_s = caller, cases, patience_s
        self.answers = list[Answer]()
        self.health = list[RouterState]()
        self._numbers, self._stopped = itertools.cycle(range(len(cases))), threading.Event()
        self._threads = ThreadPoolExecutor(at_once + 1)
        self._watching = self._threads.submit(self._watch)
        self._asking = [self._threads.submit(self._ask_on) for _ in range(at_once)]

    def sound_since(self, moment_s: float) -> bool:
        """True when the router's last word is from after that moment, and every host and link can be used."""
        return bool(self.health) and self.health[-1].at_s > moment_s and not self.health[-1].problems

    def misses(self, host: str) -> bool:
        """True when the router's last word is that it cannot use a host."""
        return bool(self.health) and host in self.health[-1].problems

    def check_alive(self) -> None:
        """Raises ServiceError when the process has ended."""
        if (code := self.caller.process.poll()) is not None:
            raise ServiceError(f"the clients' process ended with exit code {code}")

    def wait(self) -> None:
        """Ask no more. Wait for answers under way, and for all hosts to be there with nothing left of a request."""
        self._stopped.set()
        for each in (self._watching, *self._asking):
            each.result()
        deadline = time.monotonic() + SETTLE_S
        while ((health := self.caller.state()).sessions or health.problems) and time.monotonic() < deadline:
            time.sleep(HEALTH_S)
        self.health.append(health)

    def close(self) -> None:
        self._stopped.set()
        self.caller.close()
        self._threads.shutdown()

    def _watch(self) -> None:
        while not self._stopped.wait(HEALTH_S):
            self.health.append(self.caller.state())

    def _ask_on(self) -> None:
        while not self._stopped.is_set():
            self.answers.append(self._ask(next(self._numbers)))

    def _ask(self, number: int) -> Answer:
        """One request, with as many calls as it takes."""
        begin_s, arrivals_s, tries = time.monotonic(), list[float](), list[Try]()
        output, status, replays = b"", LATE, 0
        while (left_s := begin_s + self.patience_s - time.monotonic()) > 0:
            found = self.caller.submit({**self.cases[number].call, "timeout_s": left_s}).result()
            arrivals_s += found["arrivals_s"]
            if "error" not in found:
                account = found["account"]
                output, status, replays = bytes.fromhex(account["output_hex"]), OK, account["replays"]
                break
            output, code, retry_ms = bytes.fromhex(found["output_hex"]), found["code"], found["retry_after_ms"]
            tries.append(Try(code, found["error"], retry_ms, output))
            if code not in AGAIN:
                status = LATE if code == "DEADLINE_EXCEEDED" else code
                break
            time.sleep(PAUSE_S if retry_ms is None else retry_ms / 1000)
        return Answer(number, begin_s, time.monotonic(), status, output, arrivals_s, tries, replays)
