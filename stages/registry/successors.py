"""From registrations to the hosts that come after one in a sweep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from stages.registry.base import Registration, Registry

log = logging.getLogger(__name__)


def successors(registrations: Iterable[Registration], own: Registration, parts: int) -> list[str]:
    """Addresses of the hosts that may come after `own`: they begin where it ends.

    Whether they have the same checkpoints is not looked at: these may be exchanged, and each link checks it.

    None for a host that holds all `parts` blocks: nothing comes after it."""
    if len(own.blocks) == parts:
        return []
    due = (own.blocks[-1] + 1) % parts
    return [other.address for other in registrations if other.blocks[0] == due and other.name != own.name]


async def follow_successors(
    registry: Registry, own: Registration, parts: int, set_addresses: Callable[[Sequence[str]], None]
) -> None:
    """Tell `set_addresses` who comes after `own`, now and whenever that changes; for ever."""
    known: list[str] | None = None
    async with aclosing(registry.follow()) as changes:
        async for registrations in changes:
            addresses = successors(registrations, own, parts)
            if addresses != known:
                log.info("%s: next hosts: %s", own.name, ", ".join(addresses) or "none")
                set_addresses(addresses)
                known = addresses
