"""A registry in etcd: an entry `PREFIX/NAME` for each host, under a lease that the host renews.

etcd is asked over its HTTP gateway, on threads.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar

from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease

from stages.errors import InputError, ServiceError
from stages.threads import in_thread
from stages.wire.channel import parse_address
from stages.wire.registry import Registration, RegistrySettings, read_entry, write_entry

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0  # to connect, and between two pieces of an answer
ANSWER_S = 5.0  # for all of it
MAX_ENTRIES = 256
MAX_ANSWER_BYTES = 8 << 20  # more than so many entries of the longest make
PIECE_BYTES = 64 << 10
API = "/v3/"  # of etcd 3.4 and newer
LEASE_S = 6
RENEWALS = 3  # within the time of a lease: two may fail
# Between two readings of all entries. A follower of single changes that misses one, or meets a compaction, would keep
# hosts that are gone; 256 entries of a few hundred bytes are cheap.
READ_S = 1.0
MAX_SHOWN, MAX_WORDS = 80, 160

P = ParamSpec("P")
Answer = TypeVar("Answer")


class RegistryDown(Exception):
    """No member of the cluster did what was asked; the message has the answer of each."""


@dataclass(frozen=True)
class EtcdEntry:
    """One key under the prefix."""

    name: str
    value: bytes
    revision: int


class EtcdMember(Etcd3Client):
    """One member of a cluster, with an end to the answers that it gives."""

    def post(self, url: str, *args: Any, json: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401 - as the library has it
        """The answer to a question: every method of the library asks by this one."""
        body, deadline = bytearray(), time.monotonic() + ANSWER_S
        with self.session.post(url, json=json, timeout=self.timeout, stream=True) as response:
            while piece := response.raw.read1(PIECE_BYTES):
                body += piece
                if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                    raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB or {ANSWER_S:.0f} s")
        if response.status_code != HTTPStatus.OK:
            raise Etcd3Exception(body.decode(errors="replace"))
        return _checked(body)


def _checked(body: bytearray) -> dict[str, Any]:
    """Other servers answer with JSON, too: etcd's has a header even where it has no keys."""
    answer: dict[str, Any] = json.loads(body)
    if "header" not in answer.get("result", answer):
        raise ValueError("an answer without a header")
    return answer


class EtcdClient:
    """A blocking client of one cluster; it asks the member that answered last first."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._prefix = settings.prefix
        self._members = [_member(endpoint, settings) for endpoint in settings.endpoints]

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def snapshot(self) -> list[EtcdEntry]:
        """The entries under the prefix, the last changed last: the first MAX_ENTRIES. Raises RegistryDown."""
        prefix, end = self.key(""), f"{self._prefix}0"  # "0" is after "/"

        def read(member: Etcd3Client) -> list[EtcdEntry]:
            order: dict[str, Any] = {"sort_order": "ascend", "sort_target": "mod"}
            found = member.get(prefix, metadata=True, range_end=end, limit=MAX_ENTRIES, **order)
            names = [entry["key"].decode(errors="replace").removeprefix(prefix) for _, entry in found]
            pairs = zip(names, found, strict=True)
            return [EtcdEntry(name, value, int(entry["mod_revision"])) for name, (value, entry) in pairs]

        return self.ask(read)

    def ask(self, question: Callable[[Etcd3Client], Answer]) -> Answer:
        """The first answer that a member gives. Raises RegistryDown."""
        problems = []
        for member in tuple(self._members):
            try:
                return question(member)
            except Exception as error:  # the libraries below let many through, and an answer can be anything
                problems.append(f"{member.host}:{member.port} {_words(error)}")
                self._members.append(self._members.pop(0))
        raise RegistryDown("; ".join(problems))


def _member(endpoint: str, settings: RegistrySettings) -> EtcdMember:
    host, port = parse_address(endpoint)
    ca, cert, key = (str(path) if path else None for path in (settings.ca, settings.cert, settings.key))
    protocol = "https" if settings.tls else "http"
    member = EtcdMember(host, port, protocol, ca, key, cert, timeout=REQUEST_TIMEOUT_S, api_path=API)
    member.session.trust_env = False  # etcd is dialled directly, whatever proxy the shell has for the web
    member.session.max_redirects = 0
    return member


def _words(error: Exception) -> str:
    """The end of a sentence that begins with the member's address."""
    detail = str(getattr(error, "detail_text", None) or error)
    if "refused" in detail:
        return "refuses connections"
    cause = detail.partition("(Caused by ")[2] or detail
    return f"does not answer as etcd 3.4 or newer does ({type(error).__name__}: {cause[:MAX_WORDS]!r})"


class EtcdRegistry:
    """A place where hosts register and routers find them."""

    def __init__(self, settings: RegistrySettings, lease_s: int = LEASE_S) -> None:
        """:param lease_s: time that a silent host stays registered."""
        self.settings, self.lease_s = settings, lease_s

    async def check(self) -> None:
        """Raises ServiceError when the registry does not answer."""
        try:
            await in_thread(EtcdClient(self.settings).snapshot)
        except RegistryDown as down:
            raise ServiceError(
                f"no registry answers at {self.settings.url} ({down}): start etcd there, or put --registry right"
            ) from None

    async def register(self, registration: Registration) -> None:
        """Keep a host registered until this is cancelled, then remove it. Retries while the registry is down."""
        client, name = EtcdClient(self.settings), registration.name
        place = _Place(client.key(name), registration, self.lease_s)
        watched = _Watched(self.settings.url, f"{name} registers again when it is back")
        try:
            while True:
                await watched.ask(client.ask, place.keep)
                await asyncio.sleep(self.lease_s / RENEWALS)
        finally:
            try:
                await in_thread(client.ask, place.leave)
            except RegistryDown as down:
                log.warning("%s stays registered for at most %d s: %s", name, self.lease_s, down)

    async def follow(self) -> AsyncGenerator[tuple[Registration, ...], None]:
        """All hosts in the order of their blocks, now and after each change. An outage of the registry is no change."""
        client, valid = EtcdClient(self.settings), _Entries()
        watched, loop = _Watched(self.settings.url, "the hosts stay those that were known"), asyncio.get_running_loop()
        known: dict[str, Registration] | None = None
        while True:
            if (entries := await watched.ask(client.snapshot)) is not None:
                found = valid.hosts(entries)
                # an etcd that came back may lack hosts that still run: they register again within a lease
                if known is not None and loop.time() < watched.back_at + self.lease_s:
                    addresses = {host.address for host in found.values()}
                    found = {name: host for name, host in known.items() if host.address not in addresses} | found
                if found != known:
                    known = found
                    yield tuple(sorted(found.values(), key=lambda host: (host.blocks, host.name)))
            await asyncio.sleep(READ_S)


class _Place:
    """A host's entry and its lease, at whatever member answers."""

    def __init__(self, key: str, registration: Registration, lease_s: int) -> None:
        self.key, self.registration, self.lease_s = key, registration, lease_s
        self.lease: int | None = None
        self.begun = False
        self.usurper: int | None = None

    def keep(self, member: Etcd3Client) -> None:
        """Renew the lease and check that the entry has it."""
        if self.lease is None or Lease(self.lease, member).refresh() <= 0:
            self.lease = member.lease(self.lease_s).id
        found = member.get(self.key, metadata=True)
        holder = int(found[0][1].get("lease", 0)) if found else None
        if holder is None or not self.begun:  # an entry from before a restart of this host is taken over
            member.put(self.key, write_entry(self.registration), Lease(self.lease, member))
            self.begun = True
        elif holder not in (self.lease, self.usurper):
            # The newest holder is right: a host that was killed and starts again must get its name before its old
            # lease has run out. The older one keeps serving.
            self.usurper = holder
            name = self.registration.name
            log.error("another host registered as %s: this one is not found any more; give each its own --name", name)

    def leave(self, member: Etcd3Client) -> None:
        """Remove the entry; where etcd does not answer, the lease runs out."""
        if self.lease is not None:
            Lease(self.lease, member).revoke()


class _Entries:
    """Turns entries into hosts; logs once why a bad entry is ignored."""

    def __init__(self) -> None:
        self._refused = set[EtcdEntry]()

    def hosts(self, entries: list[EtcdEntry]) -> dict[str, Registration]:
        """Hosts by name. Of two entries with one address the later one counts."""
        by_address: dict[str, Registration] = {}
        before, self._refused = self._refused, set()
        for entry in entries:
            try:
                registration = read_entry(entry.name, entry.value)
                by_address[registration.address] = registration
            except InputError as error:
                self._refused.add(entry)
                if entry not in before:
                    log.warning("registry: entry %.*r is passed over: %s", MAX_SHOWN, entry.name, error)
        return {host.name: host for host in by_address.values()}


class _Watched:
    """Asks a registry on a thread; logs once that it is down, and once that it is back."""

    def __init__(self, url: str, consequence: str) -> None:
        self._url, self._consequence, self._is_down = url, consequence, False
        self.back_at = -math.inf  # on the loop's clock

    async def ask(self, question: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer | None:
        """The answer; None while the registry is down."""
        try:
            answer = await in_thread(question, *args, **kwargs)
        except RegistryDown as reason:
            if not self._is_down:
                log.warning("registry %s is down (%s): %s", self._url, reason, self._consequence)
            self._is_down = True
            return None
        if self._is_down:
            log.info("registry %s is back", self._url)
            self._is_down, self.back_at = False, asyncio.get_running_loop().time()
        return answer
