"""Targets `answers` and `answered`: hosts and routers that say anything, to those who believe them.

`answers` changes what passes between a router and its hosts, and between the hosts, while requests are served: every
kind of answer that a router or a host reads. `answered` does so before this process's own client.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import Awaitable

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from loadtest.fuzz.calls import MARGIN_S
from loadtest.fuzz.captures import Captures
from loadtest.fuzz.healthy import ASKED, PROMPT, SEED
from loadtest.fuzz.inputs import Inputs
from loadtest.fuzz.interposer import Hook, unchanged
from loadtest.fuzz.scene import ROUTER, STAGE, Scene
from loadtest.fuzz.target import Target, all_of
from serving.client import AsyncClient
from stages.errors import OnesweepError

SHARE = 0.3
"""Of the answers, changed."""
RARE = {"Warm": 0.03, "Describe": 0.15}
"""Of answers that come all the time."""
REQUEST_S = 1.5
SILENT_S = 30.0
"""Without an answer that could be changed: what was deceived comes round sooner."""
PAUSE_S = 0.2


def liar(inputs: dict[str, Inputs], rng: random.Random, count: list[int]) -> Hook:
    """Changes some answers: of the real one, if it is of a kind that has been captured."""

    def lie(method: str, data: bytes) -> bytes:
        if rng.random() > RARE.get(method, SHARE):
            return data
        count[0] += 1
        source = inputs[method]
        if rng.random() < 0.7:  # this very answer, so that names and numbers fit
            source.captures, kept = [data], source.captures
            try:
                return source.take(1)[0]
            except DecodeError:
                return data
            finally:
                source.captures = kept
        return source.take(1)[0]

    return lie


class LyingTarget(Target):
    """Asks, while answers are changed on their way."""

    async def ask_on(self, count: int, lies: list[int], at_once: int) -> None:
        """Until so many answers were changed; where none come any more it is given up."""
        before, changed_s = lies[0], time.monotonic()
        while lies[0] < count:
            await all_of((self._ask() for _ in range(len(ASKED))), at_once)
            if lies[0] > before:
                before, changed_s = lies[0], time.monotonic()
            elif time.monotonic() - changed_s > SILENT_S:
                self.tally.finding(f"nothing was answered for {SILENT_S:g} s")
                return
            else:
                await asyncio.sleep(PAUSE_S)

    @abstractmethod
    async def _ask(self) -> None: ...


class AnswersTarget(LyingTarget):
    name = "answers"
    batch_inputs = 100

    def __init__(self, scene: Scene, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.scene, self.rng = scene, rng
        self.client = AsyncClient(scene.deceived)
        kinds: dict[str, type[Message]] = {m.name: GetMessageClass(m.output_type) for m in STAGE.methods}
        self.inputs = {name: Inputs(kind, captures.answers[name], rng) for name, kind in kinds.items()}

    async def send(self, count: int) -> None:
        lies = [0]
        try:
            for way in self.scene.between:
                way.on_answer = liar(self.inputs, self.rng, lies)
            await self.ask_on(count, lies, at_once=8)
        finally:
            for way in self.scene.between:
                way.on_answer = unchanged
        self.tally.inputs += lies[0]

    async def close(self) -> None:
        await self.client.close()

    async def _ask(self) -> None:
        await ask(self, self.client.generate(PROMPT, seed=SEED, timeout_s=REQUEST_S, **self.rng.choice(ASKED)))


class AnsweredTarget(LyingTarget):
    name = "answered"

    def __init__(self, scene: Scene, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.scene, self.rng = scene, rng
        self.client = AsyncClient(scene.posing)
        kinds: dict[str, type[Message]] = {m.name: GetMessageClass(m.output_type) for m in ROUTER.methods}
        self.inputs = {name: Inputs(kind, captures.answers[name], rng) for name, kind in kinds.items()}

    async def send(self, count: int) -> None:
        lies = [0]
        self.scene.before_router.on_answer = liar(self.inputs, self.rng, lies)
        try:
            await self.ask_on(count, lies, at_once=4)
        finally:
            self.scene.before_router.on_answer = unchanged
        self.tally.inputs += lies[0]

    async def close(self) -> None:
        await self.client.close()

    async def _ask(self) -> None:
        if self.rng.random() < 0.5:
            await ask(self, self.client.status(REQUEST_S))
        else:
            await ask(self, self.client.generate(PROMPT, seed=SEED, timeout_s=REQUEST_S, mode="local", max_bytes=4))


async def ask(target: Target, call: Awaitable[object]) -> None:
    """Whatever is answered, a client hears of it as one of our errors, and in time."""
    try:
        async with asyncio.timeout(REQUEST_S + MARGIN_S):
            await call
        target.tally.answer("OK")
    except OnesweepError as error:
        target.tally.answer(type(error).__name__)
    except TimeoutError:
        target.tally.finding(f"a request outlives its deadline of {REQUEST_S:g} s")
    except Exception as error:
        target.tally.finding(f"the client raises {type(error).__name__}: {error}"[:200])
