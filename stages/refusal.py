"""A refusal: why a host or router does not take a piece of work, as a gRPC status."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio

RETRY_AFTER = "retry-after-ms"
MARK = "onesweep-refusal"
"""Trailing metadata of every Refusal: tells one from a status that gRPC itself makes up when a peer is gone."""

REQUEST = "onesweep-request"
"""Initial and trailing metadata of a router's answer: what logs and traces call the request."""

MAX_CHARACTERS = 1000
"""Of a sentence: it may quote a field, and a field may be as long as a message."""

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Refusal(Exception):
    """Carries a status code, a sentence, and for RESOURCE_EXHAUSTED when to come back."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None) -> None:
        if len(message) > MAX_CHARACTERS:
            message = f"{message[:MAX_CHARACTERS]} ..."
        super().__init__(message)
        self.code, self.message, self.retry_after_ms = code, message, retry_after_ms

    @property
    def number(self) -> int:
        return int(self.code.value[0])

    @classmethod
    def numbered(cls, number: int, message: str, retry_after_ms: int | None = None) -> Refusal:
        """From a status code that came over the wire; a full queue is worth another try, in a second if not said."""
        code = _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:  # nobody refuses with it, and no call can be ended so
            code = grpc.StatusCode.UNKNOWN
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry_after_ms = retry_after_ms or 1000
        return cls(code, message, retry_after_ms)

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End a call with this status, beside what is said at the end of it anyway."""
        metadata: list[Any] = [*(context.trailing_metadata() or ()), (MARK, "1")]
        if self.retry_after_ms is not None:
            metadata.append((RETRY_AFTER, str(self.retry_after_ms)))
        with unless_over():
            await context.abort(self.code, self.message, tuple(metadata))


@contextmanager
def unless_over() -> Iterator[None]:
    """For what is sent to a call that may end in this moment, by its deadline: nobody hears it, and nothing failed.

    Raises CancelledError, as gRPC does where it notices in time.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def told(error: grpc.RpcError) -> dict[str, str]:
    """All metadata of a failed call: a call that this side gave up has no trailing metadata."""
    call: Any = error
    return {str(key): str(value) for key, value in call.initial_metadata() or ()} | trailing(error)


def retry_after_ms(metadata: Mapping[str, str]) -> int | None:
    """When to come back, as whoever refused says; None where that is no number."""
    said = metadata.get(RETRY_AFTER, "")
    return int(said) if re.fullmatch("[0-9]{1,9}", said) else None


def trailing(error: grpc.RpcError) -> dict[str, str]:
    """Trailing metadata of a failed call."""
    metadata: Any = error.trailing_metadata()
    return {str(key): str(value) for key, value in metadata or ()}


def invalid(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def exhausted(message: str, retry_after_ms: int) -> Refusal:
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after_ms)


def failed_precondition(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.FAILED_PRECONDITION, message)
