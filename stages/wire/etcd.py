"""A registry in etcd: an entry `PREFIX/NAME` for each host, under a lease that the host renews.

etcd is asked over its HTTP gateway, on threads. `EtcdClient` reads the answers itself: the library's `post` would take
answers of any size, for any time.
"""

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import requests
import urllib3
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from stages.errors import InputError, ServiceError
from stages.wire.channel import parse_address
from stages.wire.registry import Registration, Registry, RegistrySettings, read_entry, write_entry

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
MAX_ENTRIES = 256
ANSWER_S = 10.0  # for all of an answer that comes in pieces
MAX_ANSWER_BYTES = 8 << 20
MAX_WORDS = 160
API = "/v3/"  # of etcd 3.4 and newer
LEASE_S = 6
RENEWALS = 3  # within the time of a lease: two may fail
RETRY_S = 0.5
WATCH_S = 10.0
PAUSE_S = 0.1  # before a reading after a change; RETRY_S where the watch saw none
MAX_SHOWN = 80

Answer = TypeVar("Answer")


class RegistryDown(Exception):
    """No member of the cluster did what was asked; the message has the answer of each."""


@dataclass(frozen=True)
class EtcdEntry:
    """One key under the prefix."""

    name: str
    value: bytes
    revision: int
    lease: int


@dataclass(frozen=True)
class EtcdSnapshot:
    """All entries at one revision of etcd."""

    entries: tuple[EtcdEntry, ...]
    revision: int
    complete: bool


class EtcdClient:
    """A blocking client of one cluster; it asks the member that answered last first."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.settings = settings
        self._clients = [_client(endpoint, settings) for endpoint in settings.endpoints]
        self._waiting: requests.Response | None = None
        self._interrupted = False

    def snapshot(self) -> EtcdSnapshot:
        """All entries under the prefix. Raises RegistryDown."""
        # All are read at every change: a follower of single changes that misses one, or meets a compaction, would keep
        # hosts that are gone. 256 entries of a few hundred bytes are cheap.
        request = {**self._all(), "limit": MAX_ENTRIES}

        def read(client: Etcd3Client) -> EtcdSnapshot:
            answer = _read(client, "kv/range", request)
            entries = tuple(_entry(item, len(self._key(""))) for item in answer.get("kvs", []))
            return EtcdSnapshot(entries, int(answer["header"]["revision"]), not answer.get("more"))

        return self._ask(read)

    def holder(self, name: str) -> int | None:
        """The lease of an entry; None where there is no entry. Raises RegistryDown."""

        def read(client: Etcd3Client) -> int | None:
            items = _read(client, "kv/range", {"key": _encoded(self._key(name))}).get("kvs", [])
            return int(items[0].get("lease", 0)) if items else None

        return self._ask(read)

    def grant(self, lease_s: int) -> int:
        """A new lease. Raises RegistryDown."""
        return self._ask(lambda client: int(_read(client, "lease/grant", {"TTL": lease_s, "ID": 0})["ID"]))

    def renew(self, lease: int) -> bool:
        """Renew a lease; False if it was gone. Raises RegistryDown."""

        def read(client: Etcd3Client) -> bool:
            answer = _read(client, "lease/keepalive", {"ID": lease})
            return int(answer["result"].get("TTL", 0)) > 0

        return self._ask(read)

    def revoke(self, lease: int) -> None:
        """End a lease, and with it its entries. Raises RegistryDown."""
        self._ask(lambda client: _read(client, "lease/revoke", {"ID": lease}))

    def put(self, name: str, value: bytes, lease: int) -> None:
        """Write an entry. Raises RegistryDown, also for a lease that has run out."""
        entry = {"key": _encoded(self._key(name)), "value": _encoded(value), "lease": lease}
        self._ask(lambda client: _read(client, "kv/put", entry))

    def wait(self, revision: int, timeout_s: float) -> bool:
        """Return when an entry changed after `revision`; False after `timeout_s`, or earlier for any reason."""
        # the watch only tells that there is a change: `snapshot` then reads everything
        client = self._clients[0]
        watch = {**self._all(), "start_revision": revision + 1}
        lines, deadline = 0, time.monotonic() + timeout_s
        with (
            suppress(Exception),  # the next snapshot raises what is wrong
            client.session.post(
                client.get_url("watch"),
                json={"create_request": watch},
                stream=True,
                timeout=(REQUEST_TIMEOUT_S, timeout_s),
            ) as response,
        ):
            self._waiting = response
            for chunk in () if self._interrupted else response.iter_content(4096):
                lines += chunk.count(b"\n")
                if lines > 1 or time.monotonic() > deadline:  # the first says that the watch was created
                    break
        self._waiting = None
        return lines > 1

    def interrupt(self) -> None:
        """End a `wait` of another thread, and all later ones."""
        self._interrupted = True
        if self._waiting is not None:
            with suppress(ValueError, RuntimeError, OSError):  # it is ending by itself
                self._waiting.raw.shutdown()

    def _key(self, name: str) -> str:
        return f"{self.settings.prefix}/{name}"

    def _all(self) -> dict[str, Any]:
        """The range of the keys under the prefix."""
        return {"key": _encoded(self._key("")), "range_end": _encoded(self.settings.prefix + "0")}  # "0" is after "/"

    def _ask(self, question: Callable[[Etcd3Client], Answer]) -> Answer:
        problems = []
        for client in tuple(self._clients):
            try:
                return question(client)
            except Exception as error:  # the libraries below let many through, and an answer can be anything
                problems.append(f"{client.host}:{client.port} {_words(error)}")
                self._clients.append(self._clients.pop(0))
        raise RegistryDown("; ".join(problems))


def _client(endpoint: str, settings: RegistrySettings) -> Etcd3Client:
    host, port = parse_address(endpoint)
    session = requests.Session()
    session.trust_env = False  # etcd is dialled directly, whatever proxy the shell has for the web
    session.max_redirects = 0
    if settings.ca is not None:
        session.verify = str(settings.ca)
    if settings.cert is not None and settings.key is not None:
        session.cert = (str(settings.cert), str(settings.key))
    protocol = "https" if settings.tls else "http"
    return Etcd3Client(host, port, protocol, timeout=REQUEST_TIMEOUT_S, api_path=API, session=session)


def _read(client: Etcd3Client, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """An answer of at most MAX_ANSWER_BYTES within ANSWER_S."""
    deadline = time.monotonic() + ANSWER_S
    with client.session.post(client.get_url(path), json=request, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        body = bytearray()
        while piece := response.raw.read1(1 << 16):
            body += piece
            if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                raise ValueError("the answer is too long")
    if response.status_code != requests.codes["ok"]:
        raise Etcd3Exception(body.decode(errors="replace"))
    answer: dict[str, Any] = json.loads(body)
    return answer


def _entry(item: dict[str, Any], key_bytes: int) -> EtcdEntry:
    name = base64.b64decode(item["key"])[key_bytes:].decode(errors="replace")
    value = base64.b64decode(item.get("value", ""))
    return EtcdEntry(name, value, int(item["mod_revision"]), int(item.get("lease", 0)))


def _encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _words(error: Exception) -> str:
    """The end of a sentence that begins with the member's address."""
    detail = str(getattr(error, "detail_text", None) or error)
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return f"did not answer within {REQUEST_TIMEOUT_S:.0f} s"
    if isinstance(error, requests.ConnectionError):
        if "refused" in detail:
            return "refuses connections"
        cause = detail.partition("(Caused by ")[2] or detail
        return f"cannot be reached ({cause[:MAX_WORDS]!r})"
    if isinstance(error, Etcd3Exception) and '"error"' in detail:
        with suppress(ValueError, LookupError, TypeError):
            return f"refused: {json.loads(detail)['error'][:MAX_WORDS]!r}"
    return "does not answer as etcd 3.4 or newer does"


class EtcdRegistry(Registry):
    """The registry on an event loop; its calls of etcd run on threads."""

    def __init__(self, settings: RegistrySettings, lease_s: int = LEASE_S) -> None:
        """:param lease_s: time that a silent host stays registered."""
        self.settings, self.lease_s = settings, lease_s

    async def check(self) -> None:
        try:
            await asyncio.to_thread(EtcdClient(self.settings).snapshot)
        except RegistryDown as down:
            raise ServiceError(
                f"no registry answers at {self.settings.url} ({down}): start etcd there, or put --registry right"
            ) from None

    async def register(self, registration: Registration) -> None:
        place = _Place(EtcdClient(self.settings), registration, self.lease_s)
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
        gateway, valid = EtcdClient(self.settings), _Entries()
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
                    # an etcd that came back may lack hosts that still run: they register again within a lease
                    kept_until = loop.time() + self.lease_s
                revision, kept_s = snapshot.revision, kept_until - loop.time()
                found = valid.hosts(snapshot)
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
    """A host's entry and its lease. Blocks."""

    def __init__(self, gateway: EtcdClient, registration: Registration, lease_s: int) -> None:
        self.gateway, self.registration, self.lease_s = gateway, registration, lease_s
        self.lease: int | None = None
        self.begun = False
        self.usurper: int | None = None

    def keep(self) -> None:
        """Renew the lease and check that the entry has it. Raises RegistryDown."""
        name = self.registration.name
        if self.lease is None or not self.gateway.renew(self.lease):
            self.lease = self.gateway.grant(self.lease_s)
        holder = self.gateway.holder(name)
        if holder is None or not self.begun:  # an entry from before a restart of this host is taken over
            self.gateway.put(name, write_entry(self.registration), self.lease)
            self.begun = True
        elif holder not in (self.lease, self.usurper):
            # The newest holder is right: a host that was killed and starts again must get its name before its old
            # lease has run out. The older one keeps serving.
            self.usurper = holder
            log.error("another host registered as %s: this one is not found any more; give each its own --name", name)

    def leave(self) -> None:
        """Remove the entry; where etcd does not answer, the lease runs out."""
        if self.lease is None:
            return
        try:
            self.gateway.revoke(self.lease)
        except RegistryDown as down:
            log.warning("%s stays registered for at most %d s: %s", self.registration.name, self.lease_s, down)


class _Entries:
    """Turns entries into hosts; logs once why a bad entry is ignored."""

    def __init__(self) -> None:
        self._refused: dict[str, int] = {}
        self._logged_incomplete = False

    def hosts(self, snapshot: EtcdSnapshot) -> dict[str, Registration]:
        """Hosts by name. Of two entries with one address the later one counts."""
        if not snapshot.complete and not self._logged_incomplete:
            log.warning("the registry has more than %d entries: the others are passed over", MAX_ENTRIES)
        self._logged_incomplete = not snapshot.complete
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
    """Logs once that a registry is down, and once that it is back."""

    def __init__(self, url: str, consequence: str) -> None:
        self._url, self._consequence, self._is_down = url, consequence, False

    def down(self, reason: RegistryDown) -> None:
        if not self._is_down:
            log.warning("registry %s is down (%s): %s", self._url, reason, self._consequence)
        self._is_down = True

    def up(self) -> bool:
        """True if it was down until now."""
        was_down, self._is_down = self._is_down, False
        if was_down:
            log.info("registry %s is back", self._url)
        return was_down
