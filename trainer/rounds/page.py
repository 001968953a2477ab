"""The page of a run: one HTML file, and the JSON that it asks for. Viewers cost the run next to nothing."""

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

import grpc
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stages.threads import in_thread
from stages.wire.channel import is_loopback
from stages.wire.status import StatusError
from stages.wire.tls import Security
from stages.wire.tokens import HEADER, STATUS, Keyring
from stages.wire.web_access import host_name, is_other_site, is_ours, page_headers
from stages.wire.web_server import WebServer, open_socket
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.service import status_of
from trainer.rounds.view import snapshot

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # for all viewers together: the run needs file handles, too
FRESH_S = 2.0  # A snapshot is shown so long, however many ask
STATUSES = {grpc.StatusCode.UNAUTHENTICATED: 401, grpc.StatusCode.PERMISSION_DENIED: 403}


class Snapshots:
    """The run as JSON, made when somebody asks and the last one has grown old."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._made_s, self._made = float("-inf"), b""
        self._making = asyncio.Lock()

    async def newest(self) -> bytes:
        """While a round is merged, the one before."""
        lock = self.coordinator.ledger_lock
        async with self._making:
            now = self.coordinator.clock()
            if now - self._made_s >= FRESH_S and not (self._made and lock.locked()):
                async with lock:
                    status = status_of(self.coordinator)
                # workers' calls need not wait for it
                self._made = await in_thread(lambda: json.dumps(snapshot(status)).encode())
                self._made_s = now
        return self._made


class Page:
    """An ASGI application with two paths, `/` and `/status.json`; the second shows a token where the run has some."""

    def __init__(self, snapshots: Snapshots, keyring: Keyring, name: str | None, encrypted: bool) -> None:
        """:param name: what this server may be called by, beside `localhost` and addresses.

        :param encrypted: then a browser has checked the name already.
        """
        self.snapshots, self.keyring, self.encrypted = snapshots, keyring, encrypted
        self.names = {name} if name else set[str]()
        self.html = files("trainer.rounds").joinpath("page.html").read_bytes()
        self.headers = page_headers(_digest(self.html, b"script"), _digest(self.html, b"style"), "data:")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(scope["method"], scope["path"], Headers(scope=scope))
        response.headers.update({**self.headers, "cache-control": "no-store"})
        await response(scope, receive, send)

    async def _answer(self, method: str, path: str, headers: Headers) -> Response:
        host = headers.get("host", "")
        if not self.encrypted and not is_ours(host, self.names):
            return _refusal(403, "this page is not known by the name in the Host header: use its address or localhost")
        if is_other_site(headers.get("origin"), host):
            return _refusal(403, "a page of another site may not look at this run")
        if method != "GET":
            return _refusal(405, "this page can only be looked at: GET", {"allow": "GET"})
        if path == "/":
            return Response(self.html, media_type="text/html")
        if path != "/status.json":
            return _refusal(404, "there are two paths, / and /status.json")
        try:
            self.keyring.identify([(HEADER, headers[HEADER])] if HEADER in headers else (), STATUS)
        except StatusError as refusal:
            return _refusal(STATUSES[refusal.code], refusal.message)
        return Response(await self.snapshots.newest(), media_type="application/json")


@asynccontextmanager
async def page_served(
    coordinator: Coordinator, listen: str, security: Security, keyring: Keyring
) -> AsyncIterator[int]:
    """The page, for as long as this lasts; gives its port. Whatever happens to it later, the run continues.

    :param listen: for which `check_page` has nothing to say. Raises InputError, ServiceError where it cannot be served.
    """
    tls = None if is_loopback(listen) else security.tls
    page = Page(Snapshots(coordinator), keyring, host_name(listen), tls is not None)
    certificate, key = (tls.certificate, tls.key) if tls else (None, None)
    server = WebServer(page, certificate, key, MAX_CONNECTIONS)
    with open_socket(listen) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(_ended)
        log.info("page: %s://%s:%d", "https" if tls else "http", listen.rpartition(":")[0], port)
        try:
            yield port
        finally:
            server.should_exit = True
            await asyncio.wait([serving])


def _refusal(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)


def _digest(html: bytes, tag: bytes) -> str:
    """Name of the page's one script or style sheet in a content security policy."""
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def _ended(serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()):
        log.error("the page has ended, the run continues: %s", error)
