"""From registrations, or a topology that changes, to the hosts of a ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from serving.router.topology import MAX_HOSTS, HostEntry, Topology, check_host_name, read_topology
from stages.errors import InputError, ServiceError
from stages.wire.channel import check_target
from stages.wire.flags import open_registry
from stages.wire.registry import Registration, RegistrySettings
from stages.wire.secret_files import stamp_of
from stages.wire.tls import Security

if TYPE_CHECKING:
    from stages.wire.etcd import EtcdRegistry

log = logging.getLogger(__name__)

FOLLOW_S = 1.0


def entries_of(registrations: Iterable[Registration]) -> list[HostEntry]:
    """Hosts as a topology has them."""
    return [HostEntry(host.name, host.address, host.blocks, host.address) for host in registrations]


async def follow_hosts(
    registry: EtcdRegistry, blocks: int, security: Security, set_hosts: Callable[[Sequence[HostEntry]], None]
) -> None:
    """Tell `set_hosts` which hosts there are, now and whenever that changes; for ever.

    :param blocks: of a whole model.

    Hosts that cannot be of one ring with the others are left out. Where the rest makes no ring (InputError), it stays
    as it was.
    """
    known: Sequence[HostEntry] = ()
    async with aclosing(registry.follow()) as changes:
        async for registrations in changes:
            entries = entries_of(registrations)
            shown = ", ".join(f"{entry.name} ({entry.span})" for entry in entries)
            log.info("registered hosts: %s", shown or "none")
            try:
                hosts = Topology(tuple(fitting(entries, known, blocks, security))).hosts
                set_hosts(hosts)
                known = hosts
            except InputError as error:
                log.warning("the hosts stay as they were: %s", error)


async def follow_topology(path: Path, blocks: int, set_hosts: Callable[[Sequence[HostEntry]], None]) -> None:
    """Tell `set_hosts` the hosts of a topology file whenever it changes; for ever.

    :param blocks: of a whole model. A file that makes no ring of so many changes nothing, and the log says why.
    """
    before = None
    while True:
        await asyncio.sleep(FOLLOW_S)
        if (stamp := stamp_of(path)) == before:
            continue
        before = stamp
        try:
            topology = read_topology(path)
            if topology.blocks != blocks:
                raise InputError(f"{path} has {topology.blocks} blocks, this router serves {blocks}: start it anew")
            set_hosts(topology.hosts)
        except InputError as error:
            log.warning("the hosts stay as they were: %s", error)


def fitting(
    entries: Sequence[HostEntry], known: Collection[HostEntry], blocks: int, security: Security
) -> list[HostEntry]:
    """Hosts that can form one ring; the log names the others. All that can be dialled, where they make no ring.

    :param entries: in the order of their blocks.
    :param known: hosts of the ring so far: they go before others where there are too many.
    """
    found = list[HostEntry]()
    for entry in sorted(entries, key=lambda entry: entry not in known):
        try:
            check_host_name(entry.name)
            check_target(entry.address, security)
            if len(found) == MAX_HOSTS:
                raise InputError(f"a ring has at most {MAX_HOSTS} hosts")
            found.append(entry)
        except InputError as error:
            log.warning("host %s is left out: %s", entry.name, error)
    able = [entry for entry in entries if entry in found]
    due, begins = {0}, {blocks}
    for entry in able:
        if entry.blocks[0] in due and entry.blocks[-1] < blocks:
            due.add(entry.blocks[-1] + 1)
    for entry in reversed(able):
        if entry.blocks[-1] + 1 in begins:
            begins.add(entry.blocks[0])
    if blocks not in due:
        return able
    whole = [entry for entry in able if entry.blocks[0] in due and entry.blocks[-1] + 1 in begins]
    for entry in able:
        if entry not in whole:
            log.warning("host %s is left out: no sweep can pass its blocks %s", entry.name, entry.span)
    return whole


def await_topology(settings: RegistrySettings, router: str, within_s: float | None = None) -> Topology:
    """The first set of registered hosts that makes a whole ring; waits for it. Raises OnesweepError."""

    async def first() -> Topology:
        registry, reason = open_registry(settings), "the registry has not said which hosts there are"
        await registry.check()
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

    return asyncio.run(first())
