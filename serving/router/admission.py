"""Admission: quotas of each key, and a fair share of the router's places.

A request over a quota is refused at once, before any host works. When all places are taken some requests may wait, for
a short time; the next free place goes to the key that holds the fewest, and when the queue is full the newest request
of the key with the most in it makes room. So who floods the router waits, and is refused, for himself.

Batch requests give way: a quarter of the places is never theirs, and a free place goes to an interactive request that
waits, unless fewer than an eighth are with batch requests.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from asyncio_throttle.throttler import Throttler

from serving.router.settings import AdmissionSettings
from stages.clock import monotonic
from stages.wire.status import StatusError, exhausted, unavailable
from stages.wire.tokens import Key

# One place of so many is kept for keys that hold none, where there is more than one key.
RESERVED_SHARE = 8
INTERACTIVE_SHARE, BATCH_SHARE = 4, 8  # one place of so many
DAY_S = 86_400
LEAST_RETRY_MS, MOST_RETRY_MS = 1000, 60_000
# Weight of a new request in the mean of how long they take.
NEW_SHARE = 0.2


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    turn: asyncio.Future[None]
    batch: bool


@dataclass
class Usage:
    """Use of one key, so far and now."""

    held: int = 0
    most: int = 0  # that it may hold
    # When it was last given a place, counted in places given.
    turn: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    # Requests that may start now, by the key's rate; at most a second's worth, and at least one.
    allowance: float = 1.0
    topped_up_s: float = 0.0
    day: int = 0
    bytes_today: int = 0


@dataclass
class AdmittedRequest:
    """An admitted request."""

    # That were read or generated so far.
    spent_bytes: int = 0


class Admission:
    """The router's places. Lives on the event loop."""

    def __init__(self, settings: AdmissionSettings | None = None, reserves: bool = False) -> None:
        """:param reserves: whether there may be more than one key."""
        self.settings = settings or AdmissionSettings()
        # In flight, and how many of them are batch requests.
        self.requests = self.batches = 0
        self._usage: dict[str, Usage] = {}
        self._turns = 0
        # How long requests take, about.
        self._mean_s = 0.0
        self._pace = Throttler(rate_limit=self.settings.requests_per_s, period=1.0)
        limit = self.settings.request_limit
        self._reserved = max(limit // RESERVED_SHARE, 1) if reserves and limit > 1 else 0
        # Most places of a key that has no limit of its own: it may fill them with requests that take an hour each.
        self._share = max(limit // 2, 1) if reserves else limit
        self._batch_most = max(limit - max(limit // INTERACTIVE_SHARE, 1), 1)
        self._batch_least = limit // BATCH_SHARE  # none of a few: interactive requests would wait for one of two
        # Nobody enters any more.
        self.stopping = False

    @asynccontextmanager
    async def enter(
        self, key: Key, max_bytes: int, left_s: float = math.inf, batch: bool = False
    ) -> AsyncIterator[AdmittedRequest]:
        """A place for one request, for the length of a `with` block.

        :param max_bytes: its prompt, and what it may come to generate; counted in full until it ends.
        :param left_s: until its deadline: one that would wait beyond it is refused at once.
        :param batch: it gives way to others.

        Raises StatusError: RESOURCE_EXHAUSTED says which limit was met and when to come back.
        """
        if self.stopping:
            raise unavailable("the router is stopping: ask another one, or this one later")
        usage = self._usage.setdefault(key.name, Usage())
        usage.most = key.concurrent or self._share
        # waiting for one's own quota helps nobody: the caller knows best when to come back
        self._check_quotas(key, usage, max_bytes)
        admitted, day = AdmittedRequest(), usage.day
        usage.bytes_today += max_bytes
        try:
            await self._take_place(key, usage, min(self.settings.queue_wait_s, left_s), batch)
            begin = monotonic()
            try:
                async with self._pace:
                    yield admitted
            finally:
                took_s = monotonic() - begin
                self._mean_s += NEW_SHARE * (took_s - self._mean_s) if self._mean_s else took_s
                self._leave(usage, batch)
        finally:
            if usage.day == day:
                usage.bytes_today += admitted.spent_bytes - max_bytes

    @property
    def waiting(self) -> int:
        return sum(len(usage.waiting) for usage in self._usage.values())

    def _check_quotas(self, key: Key, usage: Usage, max_bytes: int) -> None:
        """Raises StatusError, or takes one request off the rate's allowance."""
        if key.concurrent is not None and usage.held + len(usage.waiting) >= key.concurrent:
            said = f"key {key.name} has {key.concurrent} requests under way, its limit"
            raise exhausted(said, self._retry_ms(1))
        day, into_s = divmod(time.time(), DAY_S)
        if usage.day != day:
            usage.day, usage.bytes_today = int(day), 0
        if key.bytes_per_day is not None and usage.bytes_today + max_bytes > key.bytes_per_day:
            said = (
                f"key {key.name} may use {key.bytes_per_day} bytes a day, prompts included: "
                f"{max(key.bytes_per_day - usage.bytes_today, 0)} are left until midnight UTC"
            )
            raise exhausted(f"{said}, and {max_bytes} were asked for", math.ceil((DAY_S - into_s) * 1000))
        if key.rate is None:
            return
        now_s, most = monotonic(), max(key.rate, 1.0)
        usage.allowance = min(most, usage.allowance + (now_s - usage.topped_up_s) * key.rate)
        usage.topped_up_s = now_s
        if usage.allowance < 1.0:
            wait_ms = math.ceil((1.0 - usage.allowance) / key.rate * 1000)
            raise exhausted(f"key {key.name} may start {key.rate:g} requests a second", wait_ms)
        usage.allowance -= 1.0

    async def _take_place(self, key: Key, usage: Usage, wait_s: float, batch: bool) -> None:
        if self._may_take(usage, batch) and not any(each.batch <= batch for each in usage.waiting):
            self._give_place(usage, batch)
            return
        full = f"{self.requests} requests are under way, the limit"
        if self.requests < self.settings.request_limit:
            full = f"key {key.name} has {usage.held} requests under way, and the places left are kept for others"
            if batch and self.batches >= self._batch_most:
                full = f"{self.batches} batch requests are under way, and the places left are for interactive ones"
        place = self._place_in_queue(usage, batch)
        expected_s = self._mean_s * place / self.settings.request_limit
        if self.settings.queue_limit == 0 or expected_s > wait_s:
            raise exhausted(full, self._retry_ms(place))
        # A wait evens out the moments in which requests come together: a few may, and none longer than its deadline.
        if self.waiting >= self.settings.queue_limit:
            self._make_room(usage, exhausted(f"{full}, and {self.waiting} more wait", self._retry_ms(place)), batch)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        usage.waiting.append(waiting := Waiting(turn, batch))
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            if not _is_given(turn):
                said = f"{full} (waited {wait_s:.3g} s)"
                raise exhausted(said, self._retry_ms(place)) from None
        except BaseException:
            if _is_given(turn):  # in the very moment in which its client went
                self._leave(usage, batch)
            raise
        finally:
            if waiting in usage.waiting:
                usage.waiting.remove(waiting)

    def _place_in_queue(self, usage: Usage, batch: bool) -> int:
        """Position of a key's next request: the first is served next."""

        def before(other: Usage) -> int:
            return sum(each.batch <= batch for each in other.waiting)

        own = before(usage) + 1
        ahead = (min(before(u), own) for u in self._usage.values() if u is not usage and u.held <= usage.held)
        return own + sum(ahead)

    def _make_room(self, usage: Usage, refusal: StatusError, batch: bool) -> None:
        """Refuse the newest request of the key that has the most waiting, batch requests first."""
        gives_way = any(each.batch for other in self._usage.values() for each in other.waiting)

        def pool(other: Usage) -> list[Waiting]:
            return [each for each in other.waiting if each.batch or not (batch or gives_way)]

        longest = max(self._usage.values(), key=lambda other: len(pool(other)))
        if (batch or not gives_way) and len(pool(longest)) <= len(pool(usage)) + 1:
            raise refusal
        longest.waiting.remove(last := pool(longest)[-1])
        if not last.turn.done():  # else its client went in this very moment, and there is room
            last.turn.set_exception(refusal)

    def _may_take(self, usage: Usage, batch: bool) -> bool:
        free = self.settings.request_limit - self.requests
        fits = free > (self._reserved if usage.held else 0) and usage.held < usage.most
        return fits and not (batch and self.batches >= self._batch_most)

    def _give_place(self, usage: Usage, batch: bool) -> None:
        self.requests, self.batches = self.requests + 1, self.batches + batch
        self._turns += 1
        usage.held, usage.turn = usage.held + 1, self._turns

    def _leave(self, usage: Usage, batch: bool) -> None:
        """Give free places away: to the key that holds the fewest, and of these to the one that had to wait longest."""
        self.requests, self.batches = self.requests - 1, self.batches - batch
        usage.held -= 1
        while True:
            owed = self.batches < self._batch_least
            queues = [
                (each.batch != owed, usage.held, usage.turn, at, usage, each)
                for usage in self._usage.values()
                for at, each in enumerate(usage.waiting)
                if self._may_take(usage, each.batch)
            ]
            if not queues:
                return
            *_, usage, first = min(queues, key=lambda queue: queue[:4])
            usage.waiting.remove(first)
            if not first.turn.done():  # else its client went, or waited long enough, in this very moment
                first.turn.set_result(None)
                self._give_place(usage, first.batch)

    def _retry_ms(self, place: int) -> int:
        """When the request at this place of a queue would get its turn, about."""
        expected_ms = self._mean_s * place / self.settings.request_limit * 1000
        return int(min(max(expected_ms, LEAST_RETRY_MS), MOST_RETRY_MS))


def _is_given(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
