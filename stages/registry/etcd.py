"""A registry in etcd: an entry under a lease for each host, `PREFIX/NAME`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from stages.errors import InputError, ServiceError
from stages.registry.base import Registration, Registry
from stages.registry.entry import read_entry, write_entry
from stages.registry.gateway import MAX_ENTRIES, Gateway, RegistryDown, Snapshot
from stages.registry.settings import RegistrySettings

log = logging.getLogger(__name__)

LEASE_S = 6
RENEWALS = 3
"""In the time of a lease: two may fail."""
RETRY_S = 0.5
WATCH_S = 10.0
PAUSE_S = 0.1
"""Before a reading, whatever the watch says; RETRY_S where it says nothing."""
MAX_SHOWN = 80


class EtcdRegistry(Registry):
    """Lives on an event loop; etcd is asked on threads."""

    def __init__(self, settings: RegistrySettings, lease_s: int = LEASE_S) -> None:
        """:param lease_s: how long a host that fell silent stays registered."""
        self.settings, self.lease_s = settings, lease_s

    async def check(self) -> None:
        try:
            await asyncio.to_thread(Gateway(self.settings).snapshot)
        except RegistryDown as down:
            raise ServiceError(
                f"no registry answers at {self.settings.url} ({down}): start etcd there, or put --registry right"
            ) from None

    async def register(self, registration: Registration) -> None:
        place = _Place(Gateway(self.settings), registration, self.lease_s)
        health = _Health(self.settings.url, f"{registration.name} registers again when it is back")
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="register")
        try:
            while True:
                try:
                    await loop.run_in_executor(thread, place.keep)
                    health.up()
                except RegistryDown as down:
                    health.down(down)
                await asyncio.sleep(self.lease_s / RENEWALS)
        finally:
            leaving = thread.submit(place.leave)
            thread.shutdown(wait=False)
            await asyncio.wrap_future(leaving)

    async def follow(self) -> AsyncGenerator[tuple[Registration, ...], None]:
        gateway, believed = Gateway(self.settings), _Believed()
        health = _Health(self.settings.url, "the hosts stay those that were known")
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="follow")
        known: dict[str, Registration] | None = None
        revision, kept_until = 0, 0.0
        try:
            while True:
                try:
                    snapshot = await loop.run_in_executor(thread, gateway.snapshot)
                except RegistryDown as down:
                    health.down(down)
                    await asyncio.sleep(RETRY_S)
                    continue
                if health.up() or snapshot.revision < revision:
                    kept_until = loop.time() + self.lease_s  # what came back may have forgotten the hosts: not we
                revision, kept_s = snapshot.revision, kept_until - loop.time()
                found = believed.hosts(snapshot)
                if known is not None and kept_s > 0:
                    addresses = {host.address for host in found.values()}
                    found = {name: host for name, host in known.items() if host.address not in addresses} | found
                if found != known:
                    known = found
                    yield tuple(sorted(found.values(), key=lambda host: (host.blocks, host.name)))
                wait_s = min(kept_s, WATCH_S) if kept_s > 0 else WATCH_S
                is_news = await loop.run_in_executor(thread, gateway.wait, revision, wait_s)
                await asyncio.sleep(PAUSE_S if is_news else RETRY_S)
        finally:
            gateway.interrupt()
            thread.shutdown(wait=False)


class _Place:
    """A host's entry, and the lease that it stands under. Blocks."""

    def __init__(self, gateway: Gateway, registration: Registration, lease_s: int) -> None:
        self.gateway, self.registration, self.lease_s = gateway, registration, lease_s
        self.lease: int | None = None
        self.begun = False
        self.usurper: int | None = None

    def keep(self) -> None:
        """Renew the lease, and see that the entry stands under it. Raises RegistryDown."""
        name = self.registration.name
        if self.lease is None or not self.gateway.renew(self.lease):
            self.lease = self.gateway.grant(self.lease_s)
        holder = self.gateway.holder(name)
        if holder is None or not self.begun:  # what an earlier life of this host left behind is taken over
            self.gateway.put(name, write_entry(self.registration), self.lease)
            self.begun = True
        elif holder not in (self.lease, self.usurper):
            self.usurper = holder
            log.error("another host registered as %s: this one is not found any more; give each its own --name", name)

    def leave(self) -> None:
        """Take the entry away; where etcd does not answer, the lease runs out."""
        if self.lease is None:
            return
        try:
            self.gateway.revoke(self.lease)
        except RegistryDown as down:
            log.warning("%s stays registered for at most %d s: %s", self.registration.name, self.lease_s, down)


class _Believed:
    """Turns what stands in etcd into hosts; says once of each bad entry why it is passed over."""

    def __init__(self) -> None:
        self._refused: dict[str, int] = {}
        self._said_incomplete = False

    def hosts(self, snapshot: Snapshot) -> dict[str, Registration]:
        """By name. Of two hosts with one address the entry written last is believed."""
        if not snapshot.complete and not self._said_incomplete:
            log.warning("the registry has more than %d entries: the others are passed over", MAX_ENTRIES)
        self._said_incomplete = not snapshot.complete
        by_address: dict[str, Registration] = {}
        before, self._refused = self._refused, {}
        for entry in sorted(snapshot.entries, key=lambda entry: entry.revision):
            try:
                registration = read_entry(entry.name, entry.value)
                by_address[registration.address] = registration
            except InputError as error:
                self._refused[entry.name] = entry.revision
                if before.get(entry.name) != entry.revision:
                    log.warning("registry: entry %.*r is passed over: %s", MAX_SHOWN, entry.name, error)
        return {host.name: host for host in by_address.values()}


class _Health:
    """Says once that a registry is down, and once that it is back."""

    def __init__(self, url: str, consequence: str) -> None:
        self._url, self._consequence, self._is_down = url, consequence, False

    def down(self, reason: RegistryDown) -> None:
        if not self._is_down:
            log.warning("registry %s is down (%s): %s", self._url, reason, self._consequence)
        self._is_down = True

    def up(self) -> bool:
        """Whether it was down until now."""
        was_down, self._is_down = self._is_down, False
        if was_down:
            log.info("registry %s is back", self._url)
        return was_down
