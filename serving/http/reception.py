"""ASGI middleware: lets in whom the guard knows, bounds what they send, and ends the work of those who leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.errors import ApiError, error_response
from serving.http.guard import SECURITY_HEADERS, Guard

MAX_BODY_BYTES = 2 << 20
"""Twice the longest prompt that can be sent on."""
BODY_S = 15.0


class Gone(Exception):
    """The client closed the connection."""


class Reception:
    """Wraps an app whose handlers may then simply work: they are cancelled when nobody waits for the answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self.guard.check(scope["method"], headers)
            body = await _read(receive, headers)
        except Gone:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, _with_headers(send))
            return
        await _while_connected(self.app(scope, _replay(body), _with_headers(send)), receive)


async def _read(receive: Receive, headers: Headers) -> bytes:
    """Raises ApiError when there is too much, or it takes too long; Gone."""
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less", code="body_too_large")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        told = {"connection": "close"}  # there may never be a rest to wait for
        raise ApiError(408, f"the body did not come within {BODY_S:g} s: send it faster", headers=told) from None
    return bytes(body)


def _replay(body: bytes) -> Receive:
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive() -> Message:
        nonlocal message
        if message is None:
            await asyncio.Event().wait()  # `_while_connected` listens for the end
        given, message = message, None
        assert given is not None
        return given

    return receive


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


def _with_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sender
