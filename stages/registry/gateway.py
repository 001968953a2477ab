"""etcd over its HTTP gateway. Blocks, for a bounded time: to be called on a thread."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import requests
import urllib3
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from stages.registry.settings import RegistrySettings
from stages.transport import parse_address

REQUEST_TIMEOUT_S = 2.0
MAX_ENTRIES = 256
ANSWER_S = 10.0
"""How long an answer may take that comes in pieces."""
MAX_ANSWER_BYTES = 8 << 20
MAX_WORDS = 160
API = "/v3/"
"""Of etcd 3.4 and newer."""

Answer = TypeVar("Answer")


class RegistryDown(Exception):
    """No member of the cluster did what was asked; says what each answered."""


@dataclass(frozen=True)
class Entry:
    """One key under the prefix, as it stands in etcd."""

    name: str
    value: bytes
    revision: int
    lease: int


@dataclass(frozen=True)
class Snapshot:
    """All entries, and the revision of etcd that they are of."""

    entries: tuple[Entry, ...]
    revision: int
    complete: bool


class Gateway:
    """A client of one cluster: asks the member that answered last, and the others when it does not."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.settings = settings
        self._clients = [_client(endpoint, settings) for endpoint in settings.endpoints]
        self._waiting: requests.Response | None = None
        self._interrupted = False

    def snapshot(self) -> Snapshot:
        """Everything under the prefix. Raises RegistryDown."""
        first, end = self._key(""), self.settings.prefix + "0"  # "0" comes after "/"
        request = {"key": _encoded(first), "range_end": _encoded(end), "limit": MAX_ENTRIES}

        def read(client: Etcd3Client) -> Snapshot:
            answer = _read(client, "kv/range", request)
            entries = tuple(_entry(item, len(first)) for item in answer.get("kvs", []))
            return Snapshot(entries, int(answer["header"]["revision"]), not answer.get("more"))

        return self._ask(read)

    def holder(self, name: str) -> int | None:
        """The lease under which a name stands; None where it does not. Raises RegistryDown."""

        def read(client: Etcd3Client) -> int | None:
            items = _read(client, "kv/range", {"key": _encoded(self._key(name))}).get("kvs", [])
            return int(items[0].get("lease", 0)) if items else None

        return self._ask(read)

    def grant(self, lease_s: int) -> int:
        """A new lease. Raises RegistryDown."""
        return self._ask(lambda client: int(_read(client, "lease/grant", {"TTL": lease_s, "ID": 0})["ID"]))

    def renew(self, lease: int) -> bool:
        """Whether the lease was still there. Raises RegistryDown."""

        def read(client: Etcd3Client) -> bool:
            answer = _read(client, "lease/keepalive", {"ID": lease})
            return int(answer["result"].get("TTL", 0)) > 0

        return self._ask(read)

    def revoke(self, lease: int) -> None:
        """End a lease, and with it what stands under it. Raises RegistryDown."""
        self._ask(lambda client: _read(client, "lease/revoke", {"ID": lease}))

    def put(self, name: str, value: bytes, lease: int) -> None:
        """Raises RegistryDown, also for a lease that has run out."""
        entry = {"key": _encoded(self._key(name)), "value": base64.b64encode(value).decode(), "lease": lease}
        self._ask(lambda client: _read(client, "kv/put", entry))

    def wait(self, revision: int, timeout_s: float) -> bool:
        """Return when something under the prefix changed after `revision`; False at `timeout_s`, or for no reason.

        The watch only says that there is news: what there is, is read whole."""
        client = self._clients[0]
        first, end = self._key(""), self.settings.prefix + "0"
        watch: dict[str, Any] = {"key": _encoded(first), "range_end": _encoded(end), "start_revision": revision + 1}
        lines, deadline = 0, time.monotonic() + timeout_s
        with (
            suppress(Exception),  # whatever it is, the next reading says it
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
        """End a `wait` of another thread, and those to come."""
        self._interrupted = True
        if self._waiting is not None:
            with suppress(ValueError, RuntimeError, OSError):  # it is ending by itself
                self._waiting.raw.shutdown()

    def _key(self, name: str) -> str:
        return f"{self.settings.prefix}/{name}"

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
    """An answer of at most MAX_ANSWER_BYTES within ANSWER_S; the client's own `post` would take any."""
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


def _entry(item: dict[str, Any], key_bytes: int) -> Entry:
    name = base64.b64decode(item["key"])[key_bytes:].decode(errors="replace")
    value = base64.b64decode(item.get("value", ""))
    return Entry(name, value, int(item["mod_revision"]), int(item.get("lease", 0)))


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _words(error: Exception) -> str:
    """What went wrong, for a sentence that begins with the member's address."""
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
