"""Targets `answers` and `answered`: corrupt answers of hosts and routers, on their way to those that asked."""

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import Awaitable, Sequence

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from onesweep.loadtest.fuzz.base import MARGIN_S, FuzzTarget, all_of
from onesweep.loadtest.fuzz.healthy import Captures, answer_to, asked_of
from onesweep.loadtest.fuzz.inputs import Inputs
from onesweep.loadtest.fuzz.testbed import ROUTER, STAGE, FuzzTestbed, Hook, Interposer, unchanged
from onesweep.serving.client.client import AsyncClient
from onesweep.stages.errors import OnesweepError

SHARE = 0.3  # share of the answers that are changed
RARE = {"Warm": 0.03, "Describe": 0.15}  # shares of answers that come all the time
REQUEST_S = 1.5  # deadline of a request: long enough for a right answer, and most end there
SILENT_S = 30.0  # without an answer that could be changed: a deceived process recovers sooner
PAUSE_S = 0.2
AT_ONCE = 8  # requests of a round


def corrupter(inputs: dict[str, Inputs], rng: random.Random, count: list[int]) -> Hook:
    """Changes some answers: of the real one, if it is of a kind that has been captured."""

    def corrupt(method: str, data: bytes) -> bytes:
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

    return corrupt


class CorruptingTarget(FuzzTarget):
    """A target that asks while answers are changed on their way."""

    at_once: int  # requests

    def __init__(
        self,
        ways: Sequence[Interposer],
        service: ServiceDescriptor,
        address: str,
        captures: Captures,
        rng: random.Random,
    ) -> None:
        """:param ways: the interposers that change answers of `service`; :param address: of the server to ask."""
        super().__init__()
        self.ways, self.rng, self.client = ways, rng, AsyncClient(address)
        kinds: dict[str, type[Message]] = {m.name: GetMessageClass(m.output_type) for m in service.methods}
        self.inputs = {name: Inputs(kind, captures.answers[name], rng) for name, kind in kinds.items()}

    async def send(self, count: int) -> None:
        changes = [0]
        try:
            for way in self.ways:
                way.on_answer = corrupter(self.inputs, self.rng, changes)
            await self._ask_until(count, changes)
        finally:
            for way in self.ways:
                way.on_answer = unchanged
        self.tally.inputs += changes[0]

    async def close(self) -> None:
        await self.client.close()

    async def _ask_until(self, count: int, changes: list[int]) -> None:
        """Ask until `count` answers were changed, or none comes any more."""
        before, changed_s = changes[0], time.monotonic()
        while changes[0] < count:
            await all_of((ask(self, self._request()) for _ in range(AT_ONCE)), self.at_once)
            if changes[0] > before:
                before, changed_s = changes[0], time.monotonic()
            elif time.monotonic() - changed_s > SILENT_S:
                self.tally.finding(f"nothing was answered for {SILENT_S:g} s")
                return
            else:
                await asyncio.sleep(PAUSE_S)

    @abstractmethod
    def _request(self) -> Awaitable[object]: ...


class AnswersTarget(CorruptingTarget):
    """Answers between a router and its hosts, and between the hosts."""

    name, batch_inputs, at_once = "answers", 100, 8

    def __init__(self, testbed: FuzzTestbed, captures: Captures, rng: random.Random) -> None:
        super().__init__(testbed.between, STAGE, testbed.deceived, captures, rng)
        self.asked = asked_of(testbed.checkpoint)

    def _request(self) -> Awaitable[object]:
        return answer_to(self.client, self.rng.choice(self.asked), REQUEST_S)


class AnsweredTarget(CorruptingTarget):
    """Answers of a router to this process's own client."""

    name, at_once = "answered", 4

    def __init__(self, testbed: FuzzTestbed, captures: Captures, rng: random.Random) -> None:
        super().__init__([testbed.before_router], ROUTER, testbed.posing, captures, rng)
        # the quickest, which takes no host
        self.asked = next(asked for asked in asked_of(testbed.checkpoint) if asked["mode"] == "local")

    def _request(self) -> Awaitable[object]:
        if self.rng.random() < 0.5:
            return self.client.status(REQUEST_S)
        return answer_to(self.client, self.asked, REQUEST_S)


async def ask(target: FuzzTarget, call: Awaitable[object]) -> None:
    """A call of a client, which must raise one of our errors in time, whatever it is answered."""
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
