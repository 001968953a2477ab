"""Admission: quotas per key, and a fair share of the router's places.

A request over a quota is refused at once, before any host works. When all places are taken, some requests may wait for
a short time; the next free place goes to the key that holds the fewest, and when the queue is full the newest request
of the key with the most in it is refused to make room. So a key that floods the router only delays itself.

Batch requests yield: a quarter of the places is closed to them, and a free place goes to a waiting interactive request
unless batch requests hold fewer than an eighth.

Nothing here waits or reads a clock: the service passes the time, and gets a call when a waiting request is answered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.router.settings import AdmissionSettings
from stages.wire.status import StatusError, exhausted, unavailable
from stages.wire.tokens import Key

# With more than one key, one place in this many is kept for keys that hold none.
RESERVED_SHARE = 8
INTERACTIVE_SHARE, BATCH_SHARE = 4, 8  # one place in this many
DAY_S = 86_400
MIN_RETRY_MS, MAX_RETRY_MS = 1000, 60_000
# Weight of a new request in the running mean of their durations.
NEW_SHARE = 0.2

# States of a request, the events in each, and the state that follows.
PLACE_STATES = {
    "asks": {"place is free": "admitted", "has to wait": "waits"},
    "waits": {"place is given": "admitted", "makes room": "refused", "waited too long": "refused", "leaves": "ended"},
    "admitted": {"leaves": "ended"},
    "refused": {"leaves": "ended"},
}


@dataclass(eq=False)
class PlaceRequest:
    """A request for a place, from asking to leaving."""

    key: Key
    max_bytes: int  # its prompt and the most that it may generate; counted in full until it ends
    left_s: float = math.inf  # until its deadline: a request that would wait longer is refused at once
    batch: bool = False  # it yields to other requests
    state: str = "asks"
    answered: Callable[[], object] = bool  # called when a waiting request is admitted or refused
    wait_s: float = 0.0  # longest wait
    refusal: StatusError | None = None  # set if it is not admitted
    begun_s: float | None = None
    day: int = 0  # the day whose quota it counts against
    spent_bytes: int = 0  # bytes read and generated so far

    def change(self, event: str) -> None:
        """Follow PLACE_STATES. Raises KeyError for an event that the state does not allow."""
        self.state = PLACE_STATES[self.state][event]


@dataclass
class Usage:
    """Use of one key, total and current."""

    held: int = 0
    most: int = 0  # places that it may hold
    turn: int = 0  # when it last got a place, counted in places given
    waiting: list[PlaceRequest] = field(default_factory=list)
    # When the key's rate again lets a second's worth of requests start at once, and at least one.
    free_at_s: float = 0.0
    day: int = 0
    bytes_today: int = 0


class Admission:
    """The router's places. Times are seconds on a monotonic clock."""

    def __init__(self, settings: AdmissionSettings | None = None, reserves: bool = False) -> None:
        """:param reserves: whether there may be more than one key."""
        self.settings = settings or AdmissionSettings()
        self.requests = self.batches = 0  # in flight, and the batch requests among them
        self._usage: dict[str, Usage] = {}
        self._turns = 0
        self._mean_s = 0.0  # running mean of a request's duration
        limit = self.settings.request_limit
        self._reserved = max(limit // RESERVED_SHARE, 1) if reserves and limit > 1 else 0
        # Most places of a key without a limit of its own, which could fill them with requests of an hour each.
        self._share = max(limit // 2, 1) if reserves else limit
        self._max_batches = max(limit - max(limit // INTERACTIVE_SHARE, 1), 1)
        self._min_batches = limit // BATCH_SHARE  # zero of a few places: else a batch request could hold one of two
        self.stopping = False  # no request is admitted any more

    def ask(self, request: PlaceRequest, now_s: float, unix_s: float) -> None:
        """Admit a request or queue it; call `begin` next, and `leave` in any case.

        :param unix_s: the time of day, for quotas.

        Raises StatusError: RESOURCE_EXHAUSTED says which limit was reached and when to retry."""
        if self.stopping:
            raise unavailable("the router is stopping: use another router, or try again later")
        if request.key.name not in self._usage:  # names come and go with tokens
            for name, each in list(self._usage.items()):
                if not (each.held or each.waiting or each.day == unix_s // DAY_S or each.free_at_s > now_s):
                    del self._usage[name]
        usage = self._usage.setdefault(request.key.name, Usage())
        usage.most = request.key.concurrent or self._share
        # a request over its own quota does not wait: the caller knows best when to retry
        self._check_quotas(request.key, usage, request.max_bytes, now_s, unix_s)
        if self._may_take(usage, request.batch) and not any(each.batch <= request.batch for each in usage.waiting):
            self._give_place(request, usage, "place is free")
        else:
            self._queue(request, usage)
        request.day = usage.day
        usage.bytes_today += request.max_bytes

    def begin(self, request: PlaceRequest, now_s: float) -> None:
        """Start a request that was answered or has waited long enough. Raises StatusError if it is refused."""
        if request.state == "waits":
            request.change("waited too long")
        if request.state == "refused":
            assert request.refusal is not None
            raise request.refusal
        request.begun_s = now_s

    def leave(self, request: PlaceRequest, now_s: float) -> None:
        """End a request; its client may leave at the very moment it gets its place, or its key be forgotten by now."""
        usage, had_place = self._usage.get(request.key.name, Usage()), request.state == "admitted"
        request.change("leaves")
        if request in usage.waiting:
            usage.waiting.remove(request)
        if usage.day == request.day:
            # not below zero: a clock that showed a wrong date for a moment has reset the count
            usage.bytes_today = max(usage.bytes_today + request.spent_bytes - request.max_bytes, 0)
        if request.begun_s is not None:
            took_s = now_s - request.begun_s
            self._mean_s += NEW_SHARE * (took_s - self._mean_s) if self._mean_s else took_s
        if had_place:
            self.requests, self.batches = self.requests - 1, self.batches - request.batch
            usage.held -= 1
            self._give_places()

    @property
    def waiting(self) -> int:
        return sum(len(usage.waiting) for usage in self._usage.values())

    def _check_quotas(self, key: Key, usage: Usage, max_bytes: int, now_s: float, unix_s: float) -> None:
        """Count one request to the key's rate. Raises StatusError for a request over a quota."""
        if key.concurrent is not None and usage.held + len(usage.waiting) >= key.concurrent:
            raise exhausted(f"key {key.name} has {key.concurrent} requests in flight, its limit", self._retry_ms(1))
        day, into_s = divmod(unix_s, DAY_S)
        if usage.day != day:
            usage.day, usage.bytes_today = int(day), 0
        if key.bytes_per_day is not None and usage.bytes_today + max_bytes > key.bytes_per_day:
            message = (
                f"key {key.name} may use {key.bytes_per_day} bytes per day, prompts included: "
                f"{max(key.bytes_per_day - usage.bytes_today, 0)} are left until midnight UTC"
            )
            raise exhausted(f"{message}, and the request may need {max_bytes}", math.ceil((DAY_S - into_s) * 1000))
        if key.rate is None:
            return
        free_at_s = max(usage.free_at_s, now_s) + 1 / key.rate
        if (wait_s := free_at_s - now_s - max(1.0, 1 / key.rate)) > 1e-6:  # less is rounding
            message = f"key {key.name} may start {key.rate:g} requests per second"
            raise exhausted(message, math.ceil(wait_s * 1000))
        usage.free_at_s = free_at_s

    def _queue(self, request: PlaceRequest, usage: Usage) -> None:
        key, batch, wait_s = request.key, request.batch, min(self.settings.queue_wait_s, request.left_s)
        full = f"{self.requests} requests are in flight, the limit"
        if self.requests < self.settings.request_limit:
            full = f"key {key.name} has {usage.held} requests in flight, and the remaining places are kept for others"
            if batch and self.batches >= self._max_batches:
                full = f"{self.batches} batch requests are in flight, and the remaining places are for interactive ones"
        place = self._place_in_queue(usage, batch)
        expected_s = self._mean_s * place / self.settings.request_limit
        if self.settings.queue_limit == 0 or expected_s > wait_s:
            raise exhausted(full, self._retry_ms(place))
        # Waiting smooths bursts: a few requests may wait, none longer than its deadline.
        if self.waiting >= self.settings.queue_limit:
            self._make_room(usage, exhausted(f"{full}, and {self.waiting} are waiting", self._retry_ms(place)), batch)
        request.change("has to wait")
        request.wait_s, message = wait_s, f"{full} (waited {wait_s:.3g} s)"
        request.refusal = exhausted(message, self._retry_ms(place))
        usage.waiting.append(request)

    def _place_in_queue(self, usage: Usage, batch: bool) -> int:
        """Queue position of a key's next request; the first is served next."""

        def before(other: Usage) -> int:
            return sum(each.batch <= batch for each in other.waiting)

        own = before(usage) + 1
        ahead = (min(before(u), own) for u in self._usage.values() if u is not usage and u.held <= usage.held)
        return own + sum(ahead)

    def _make_room(self, usage: Usage, refusal: StatusError, batch: bool) -> None:
        """Refuse the newest request of the key with the most waiting, batch requests first."""
        batch_waits = any(each.batch for other in self._usage.values() for each in other.waiting)

        def pool(other: Usage) -> list[PlaceRequest]:
            return [each for each in other.waiting if each.batch or not (batch or batch_waits)]

        longest = max(self._usage.values(), key=lambda other: len(pool(other)))
        if (batch or not batch_waits) and len(pool(longest)) <= len(pool(usage)) + 1:
            raise refusal
        longest.waiting.remove(last := pool(longest)[-1])
        last.change("makes room")
        last.refusal = refusal
        last.answered()

    def _may_take(self, usage: Usage, batch: bool) -> bool:
        free = self.settings.request_limit - self.requests
        fits = free > (self._reserved if usage.held else 0) and usage.held < usage.most
        return fits and not (batch and self.batches >= self._max_batches)

    def _give_place(self, request: PlaceRequest, usage: Usage, event: str) -> None:
        request.change(event)
        self.requests, self.batches = self.requests + 1, self.batches + request.batch
        self._turns += 1
        usage.held, usage.turn = usage.held + 1, self._turns
        request.answered()

    def _give_places(self) -> None:
        """Give free places to the key that holds the fewest, and among equals to the one that waited longest."""
        while True:
            serve_batch = self.batches < self._min_batches
            queues = [
                (each.batch != serve_batch, usage.held, usage.turn, at, usage, each)
                for usage in self._usage.values()
                for at, each in enumerate(usage.waiting)
                if self._may_take(usage, each.batch)
            ]
            if not queues:
                return
            *_, usage, first = min(queues, key=lambda queue: queue[:4])
            usage.waiting.remove(first)
            self._give_place(first, usage, "place is given")

    def _retry_ms(self, place: int) -> int:
        """Estimate of when the request at this place in the queue gets its turn."""
        expected_ms = self._mean_s * place / self.settings.request_limit * 1000
        return int(min(max(expected_ms, MIN_RETRY_MS), MAX_RETRY_MS))
