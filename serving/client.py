"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

from __future__ import annotations

import codecs
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
import grpc.aio

from serving.topology import DEFAULT_ROUTER
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import InputError, ServiceError
from stages.refusal import MARK, REQUEST, RETRY_AFTER, told
from stages.transport import open_blocking_channel, open_channel, parse_address

DEFAULT_TIMEOUT_S = 120.0
MAX_BYTES = (1 << 32) - 1
MAX_SEED = (1 << 64) - 1
MAX_PROMPT_BYTES = 1 << 20
"""No model has a larger context."""

_USER_MISTAKES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class RequestSettings(TypedDict, total=False):
    """Settings of a request; those that are None or left out are the router's to choose."""

    mode: str
    max_bytes: int
    seed: int
    temperature: float | None
    chunk: int | None
    steps: int | None
    codec: str | None
    sampler: str | None
    drafter: str | None
    draft: int | None
    scorer: str | None
    candidates: int | None
    suffix: str | bytes
    budget_ms: int | None


class TimedSettings(RequestSettings, total=False):
    """The same, with how long to wait for the whole answer."""

    timeout_s: float


class RequestRefused(InputError):
    """The router found a field of the request wrong; `code` is the gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode, request: str = "") -> None:
        super().__init__(message)
        self.code, self.request = code, request


class RouterError(ServiceError):
    """The router, or a host behind it, failed or did not answer; `code` is the gRPC status.

    `request` is what the router's log calls the request; empty where it never got there."""

    def __init__(
        self, message: str, code: grpc.StatusCode, retry_after_ms: int | None = None, request: str = ""
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after_ms, self.request = code, retry_after_ms, request


@dataclass(frozen=True)
class HostShare:
    """What one host did for a request."""

    name: str
    blocks: list[int]
    compute_ms: float
    queue_ms: float


@dataclass(frozen=True)
class Result:
    """A generated text and what it cost, as the servers booked it."""

    text: str
    mode: str
    seed: int
    prompt_bytes: int
    output_bytes: int
    sweeps: int
    hops: int
    wire_bytes: list[int]
    """Payload of each hop of a sweep, in its order; where sweeps differ, the largest."""
    wire_bytes_total: int
    latency_ms: float
    first_byte_ms: float
    compute_ms: float
    hosts: list[HostShare]
    drafted: int
    """Bytes guessed by a drafter, and how many of them were right."""
    accepted: int
    reached: int
    """Guesses that counted: those that were right, and the first wrong one of each sweep."""
    output: bytes = field(repr=False)
    """The exact bytes; `text` shows those that are no UTF-8 as U+FFFD."""
    scorer: str = ""
    """What scored or verified; empty where nothing did."""
    chunk: int = 0
    """Bytes a sweep, the most; 0 where the mode has none."""
    candidates: int = 0
    """Continuations scored in a sweep, the most."""
    effective_samples: float = 0.0
    """Of the candidates, as their weights leave them: the mean over sweeps."""
    divergence_bits: float = 0.0
    """KL(drafter || scorer) for a byte, as the candidates showed it."""
    reason: str = ""
    """Why mode `auto` picked this mode; empty where the request named it."""
    replays: int = 0
    """Times that the work moved to other hosts, because one failed or was late."""
    request: str = ""
    """What the router's and the hosts' logs call this request."""

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that counted which were right; None where nothing was guessed."""
        return self.accepted / self.reached if self.reached else None

    @property
    def host_seconds(self) -> float:
        """Seconds of arithmetic on the hosts."""
        return sum(host.compute_ms for host in self.hosts) / 1000

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["output_hex"] = record.pop("output").hex()
        return record


class AsyncClient:
    """Talks to a router from asyncio code."""

    def __init__(self, address: str = DEFAULT_ROUTER) -> None:
        parse_address(address, "router address")
        self.address = address
        self._channel = open_channel(address)
        self.stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def generate(self, prompt: str | bytes, **settings: Unpack[TimedSettings]) -> Result:
        """Generate a whole text; see `request_of` for the settings. Raises RequestRefused or RouterError."""
        result: Result | None = None
        async for item in self._items(prompt, whole=True, **settings):
            if isinstance(item, Result):
                result = item
        if result is None:
            raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
        return result

    async def stream(
        self, prompt: str | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S, **settings: Unpack[RequestSettings]
    ) -> AsyncIterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        async with aclosing(self._items(prompt, timeout_s=timeout_s, **settings)) as items:
            async for item in items:
                yield item

    async def _items(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> AsyncGenerator[bytes | Result, None]:
        request = request_of(prompt, whole=whole, **settings)
        call = self.stub.Generate(request, timeout=_checked_timeout(timeout_s))
        output = b""
        try:
            async for response in call:
                if response.WhichOneof("kind") == "summary":
                    yield _result(response.summary, output)
                else:
                    output += response.text
                    yield response.text
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.address, timeout_s) from None
        finally:
            call.cancel()

    async def status(self, timeout_s: float = 5.0) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        try:
            return await self.stub.Status(router_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.address, timeout_s) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Client:
    """Talks to a router from plain code."""

    def __init__(self, address: str = DEFAULT_ROUTER) -> None:
        parse_address(address, "router address")
        self.address = address
        self._channel = open_blocking_channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: str | bytes, **settings: Unpack[TimedSettings]) -> Result:
        """Generate a whole text; see `request_of` for the settings. Raises RequestRefused or RouterError."""
        result: Result | None = None
        for item in self._items(prompt, whole=True, **settings):
            if isinstance(item, Result):
                result = item
        if result is None:
            raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
        return result

    def stream(
        self, prompt: str | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S, **settings: Unpack[RequestSettings]
    ) -> Iterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        yield from self._items(prompt, timeout_s=timeout_s, **settings)

    def _items(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[bytes | Result]:
        request = request_of(prompt, whole=whole, **settings)
        call = self._stub.Generate(request, timeout=_checked_timeout(timeout_s))
        output = b""
        try:
            for response in call:
                if response.WhichOneof("kind") == "summary":
                    yield _result(response.summary, output)
                else:
                    output += response.text
                    yield response.text
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout_s) from None
        finally:
            call.cancel()

    def status(self, timeout_s: float = 5.0) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        try:
            return self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address, timeout_s) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request_of(
    prompt: str | bytes,
    *,
    mode: str = "sweep",
    max_bytes: int = 128,
    seed: int = 0,
    temperature: float | None = None,
    chunk: int | None = None,
    steps: int | None = None,
    codec: str | None = None,
    sampler: str | None = None,
    drafter: str | None = None,
    draft: int | None = None,
    scorer: str | None = None,
    candidates: int | None = None,
    suffix: str | bytes = b"",
    budget_ms: int | None = None,
    whole: bool = False,
) -> router_pb2.GenerateRequest:
    """A request message; None leaves a setting to the router. Raises InputError for what the message cannot carry."""
    raw, following = _raw("prompt", prompt), _raw("suffix", suffix)
    names = (("mode", mode), ("codec", codec), ("sampler", sampler), ("drafter", drafter), ("scorer", scorer))
    for word, text in names:
        if text is not None and not text.isascii():
            raise InputError(f"unknown {word} {text!r}: its name has letters that no {word} has")
    for name, value, least, most in (
        ("max_bytes", max_bytes, 1, MAX_BYTES),
        ("seed", seed, 0, MAX_SEED),
        ("chunk", chunk, 1, MAX_BYTES),
        ("steps", steps, 1, MAX_BYTES),
        ("draft", draft, 1, MAX_BYTES),
        ("candidates", candidates, 1, MAX_BYTES),
        ("budget_ms", budget_ms, 1, MAX_BYTES),
    ):
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise InputError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return router_pb2.GenerateRequest(
        prompt=raw,
        mode=mode,
        max_bytes=max_bytes,
        seed=seed,
        temperature=temperature,
        chunk=chunk,
        steps=steps,
        codec=codec,
        sampler=sampler,
        drafter=drafter,
        draft=draft,
        scorer=scorer,
        candidates=candidates,
        suffix=following,
        budget_ms=budget_ms,
        whole=whole,
    )


def _raw(name: str, text: str | bytes) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise InputError(f"the {name} is not UTF-8: check the terminal's or file's encoding") from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise InputError(f"the {name} has {len(raw)} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten it")
    return raw


class TextDecoder:
    """Shows bytes as they arrive without cutting a UTF-8 character in two."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise InputError(f"timeout_s must be above 0, not {timeout_s}")
    return timeout_s


def error_of(error: grpc.RpcError | grpc.aio.AioRpcError, address: str, timeout_s: float) -> Exception:
    """The exception for people that a status stands for."""
    code, details = error.code(), error.details() or ""
    metadata = told(error)
    request = metadata.get(REQUEST, "")
    if code in _USER_MISTAKES:
        return RequestRefused(details, code, request)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RouterError(f"no answer within {timeout_s:g} s: {details}", code, request=request)
    if MARK not in metadata and code is grpc.StatusCode.UNAVAILABLE:
        return RouterError(f"no router answers at {address}; start one with `onesweep up` ({details})", code)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RouterError(f"{address} is no router; give the router's address", code)
    retry = metadata.get(RETRY_AFTER)
    return RouterError(details or code.name, code, None if retry is None else int(retry), request)


def _result(summary: router_pb2.Summary, output: bytes) -> Result:
    return Result(
        text=output.decode(errors="replace"),
        mode=summary.mode,
        seed=summary.seed,
        prompt_bytes=summary.prompt_bytes,
        output_bytes=summary.output_bytes,
        sweeps=summary.sweeps,
        hops=summary.hops,
        wire_bytes=list(summary.wire_bytes),
        wire_bytes_total=summary.wire_bytes_total,
        latency_ms=round(summary.latency_ms, 3),
        first_byte_ms=round(summary.first_byte_ms, 3),
        compute_ms=round(summary.compute_ms, 3),
        hosts=[HostShare(h.name, list(h.blocks), round(h.compute_ms, 3), round(h.queue_ms, 3)) for h in summary.hosts],
        drafted=summary.drafted,
        accepted=summary.accepted,
        reached=summary.reached,
        scorer=summary.scorer,
        chunk=summary.chunk,
        candidates=summary.candidates,
        effective_samples=round(summary.effective_samples, 3),
        divergence_bits=round(summary.divergence_bits, 4),
        reason=summary.reason,
        replays=summary.replays,
        request=summary.request,
        output=output,
    )
