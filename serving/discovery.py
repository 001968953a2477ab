"""From registrations to the hosts of a ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from serving.topology import HostEntry, Topology
from stages.errors import InputError, ServiceError
from stages.registry import Registration, Registry, RegistrySettings, open_registry

log = logging.getLogger(__name__)


def entries_of(registrations: Iterable[Registration]) -> list[HostEntry]:
    """Hosts as a topology has them."""
    return [HostEntry(host.name, host.address, host.blocks, host.address) for host in registrations]


async def follow_hosts(registry: Registry, set_hosts: Callable[[Sequence[HostEntry]], None]) -> None:
    """Tell `set_hosts` which hosts there are, now and whenever that changes; for ever.

    A set that `set_hosts` finds wrong (InputError) is passed over, and the ring stays as it was."""
    async with aclosing(registry.follow()) as changes:
        async for registrations in changes:
            shown = ", ".join(f"{host.name} ({_span(host)})" for host in registrations)
            log.info("registered hosts: %s", shown or "none")
            try:
                set_hosts(entries_of(registrations))
            except InputError as error:
                log.warning("the hosts stay as they were: %s", error)


def await_topology(settings: RegistrySettings, router: str, within_s: float | None = None) -> Topology:
    """The first set of registered hosts that makes a whole ring; waits for it. Raises OnesweepError."""
    return asyncio.run(_first_topology(open_registry(settings), router, within_s))


async def _first_topology(registry: Registry, router: str, within_s: float | None) -> Topology:
    await registry.check()
    reason = "the registry has not said which hosts there are"
    try:
        async with asyncio.timeout(within_s), aclosing(registry.follow()) as changes:
            async for registrations in changes:
                try:
                    return Topology(tuple(entries_of(registrations)), router)
                except InputError as error:
                    if str(error) != reason:
                        log.info("waiting for hosts: %s", error)
                    reason = str(error)
    except TimeoutError:
        raise ServiceError(f"no whole ring was registered within {within_s:.1f} s: {reason}") from None
    raise ServiceError("the registry has no more to say")


def _span(host: Registration) -> str:
    first, last = host.blocks[0], host.blocks[-1]
    return str(first) if first == last else f"{first}-{last}"
