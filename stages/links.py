"""The hosts that may come after this one in a sweep: a warm connection to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from stages.errors import InputError
from stages.meter import HostMeter
from stages.refusal import Refusal, failed_precondition
from stages.relay import WARM_TIMEOUT_S, Relay
from stages.security import LOOPBACK_ONLY, Security
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)

RETRY_S = 0.2
CHECK_S = 0.5

Wiring = Callable[[str, stage_pb2.DescribeResponse], str]
"""Why the host at an address cannot follow; empty when it can."""


class Links:
    """Relays by address. Lives on the event loop."""

    def __init__(
        self,
        wiring: Wiring,
        state_bytes: int,
        message_bytes: int,
        hop_timeout_s: float,
        keep_warm_s: float,
        meter: HostMeter,
        security: Security = LOOPBACK_ONLY,
    ) -> None:
        """:param state_bytes: size of the largest usual hop, which opens a link's window.
        :param message_bytes: largest message that a hop may need.
        :param keep_warm_s: pause between messages that keep an idle link's window open; 0 = none."""
        self._wiring, self._state_bytes, self._meter, self._security = wiring, state_bytes, meter, security
        self._message_bytes, self._hop_timeout_s, self._keep_warm_s = message_bytes, hop_timeout_s, keep_warm_s
        self._relays: dict[str, Relay] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def relays(self) -> list[Relay]:
        return list(self._relays.values())

    @property
    def problem(self) -> str:
        """Why no host can follow; empty when one can, or none is needed."""
        problems = [relay.problem for relay in self._relays.values()]
        return "" if not all(problems) else next(iter(problems), "")

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Link to these hosts and no others."""
        for address in set(self._relays) - set(addresses):
            self._keepers.pop(address).cancel()
            closing = asyncio.create_task(self._relays.pop(address).close())
            closing.add_done_callback(lambda done: done.exception())
        for address in addresses:
            if address not in self._relays:
                try:
                    relay = Relay(address, self._message_bytes, self._hop_timeout_s, security=self._security)
                except InputError as error:  # learned at run time, and not to be dialled
                    log.warning("no link to %s: %s", address, error)
                    continue
                self._relays[address] = relay
                relay.meter = self._meter.link(address)
                relay.problem = f"the host at {address} was not reached yet"
                self._keepers[address] = asyncio.create_task(self._keep(relay))

    def to(self, address: str) -> Relay:
        """The link to a host; with an empty address, the only one. Raises Refusal."""
        if address in self._relays:
            return self._relays[address]
        if not address and len(self._relays) == 1:
            return next(iter(self._relays.values()))
        dialled = ", ".join(self._relays) or "no other host"
        raise failed_precondition(f"no link to {address or 'one next host only'}: --next names {dialled}")

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await asyncio.gather(*(relay.close() for relay in self._relays.values()))

    async def _keep(self, relay: Relay) -> None:
        """Keep a link checked and warm, for ever."""
        warmer: asyncio.Task[None] | None = None
        try:
            while True:
                problem = await self._problem(relay)
                if problem != relay.problem:
                    log.info("link to %s: %s", relay.address, problem or "warm")
                relay.problem = problem
                if not problem and warmer is None and self._keep_warm_s:
                    warmer = asyncio.create_task(relay.keep_warm(self._state_bytes, self._keep_warm_s))
                await asyncio.sleep(RETRY_S if problem else CHECK_S)
        finally:
            if warmer is not None:
                warmer.cancel()

    async def _problem(self, relay: Relay) -> str:
        """Why a link cannot be used; empty when it can."""
        if relay.rtt_ms is not None and not relay.problem:
            return ""  # the keep-warm messages arrive
        try:
            other = await relay.describe(timeout=min(self._hop_timeout_s, WARM_TIMEOUT_S))
            problem = self._wiring(relay.address, other)
            if not problem:
                await relay.warm(self._state_bytes)
        except Refusal as refusal:
            return refusal.message
        return problem
