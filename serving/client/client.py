"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

import asyncio
import codecs
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onesweep.serving.client.result import DrawnPictures, Logprobs, Result, pictures_of, result_of
from onesweep.serving.drawing.request import drawing_message
from onesweep.serving.router.request import DEFAULT_ROUTER, DEFAULT_TIMEOUT_S, Request
from onesweep.serving.v1 import router_pb2, router_pb2_grpc
from onesweep.stages.errors import InputError, ServiceError, printable
from onesweep.stages.wire.channel import check_target, is_loopback, open_blocking_channel, open_channel
from onesweep.stages.wire.status import REQUEST_KEY, STATUS_MARK, call_metadata, retry_after_ms, trailing_metadata
from onesweep.stages.wire.tls import Security, Tls, handshake_problem
from onesweep.stages.wire.tokens import token_metadata

# The client's public surface.
__all__ = ["AsyncClient", "Client", "DrawnPictures", "RequestRefused", "Result", "RouterError", "TextDecoder", "Tls"]

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


_USER_MISTAKES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class RequestRefused(InputError):
    """The router found the token, or a field of the request, wrong; `code` is the gRPC status."""

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


def error_of(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, timeout_s: float, security: Security
) -> Exception:
    """The exception for people that a status stands for."""
    code, details = error.code(), printable(error.details() or "", newline=" ")
    metadata = call_metadata(error)
    request = metadata.get(REQUEST_KEY, "")
    if code in _USER_MISTAKES:
        return RequestRefused(details, code, request)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RouterError(f"no answer within {timeout_s:g} s: {details}", code, request=request)
    if is_unreachable(error):
        problem = handshake_problem(details, security)
        missing = f"no router answers at {address}; start one with `onesweep up` ({details})"
        return RouterError(f"the router at {address} {problem}" if problem else missing, code)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RouterError(f"{address} is no router; give the router's address", code)
    return RouterError(details or code.name, code, retry_after_ms(metadata), request)


def is_unreachable(error: grpc.RpcError | grpc.aio.AioRpcError) -> bool:
    """True where no router answered."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and STATUS_MARK not in trailing_metadata(error)


class _Connection(ABC):
    """Common part of the two clients: address, certificates and token, and how calls end."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str = "", insecure: bool = False
    ) -> None:
        """:param tls: the authority that the router's certificate must be signed by; None = plain text.
        :param token: sent with every call, for routers that ask for one.
        :param insecure: accept plain text to another machine, without a token.

        Raises InputError for a connection that would not be safe.
        """
        self.address, self._security = address, checked_security(address, tls, token, insecure)
        self._metadata = token_metadata(token)
        self._open()

    @property
    def is_private(self) -> bool:
        """True where a token that is sent cannot be read on its way."""
        return _is_private(self.address, self._security.tls)

    def _open(self) -> None:
        """Connect with the certificates as they are now."""
        # taken before the files are read: what changes meanwhile is noticed at the next failure
        stamp = self._security.stamp()
        self._dial()
        self._stamp = stamp

    @abstractmethod
    def _dial(self) -> None:
        """Open a channel, and the stub that calls go over from now on."""

    @contextmanager
    def _errors(self, timeout_s: float) -> Iterator[None]:
        """Failures of a call as the exceptions that its caller gets."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._failed(error, timeout_s) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC raises it, too, where it was the connection that ended
            raise RouterError(f"the connection to {self.address} was closed", grpc.StatusCode.UNAVAILABLE) from None

    def _failed(self, error: grpc.RpcError | grpc.aio.AioRpcError, timeout_s: float) -> Exception:
        """The exception to raise for a call that failed; the next call uses certificates that were renewed."""
        if is_unreachable(error) and self._security.stamp() != self._stamp:
            with suppress(InputError):  # half of it may be replaced yet
                self._open()
        return error_of(error, self.address, timeout_s, self._security)


class _Answer:
    """The responses to one request, as clients hand them out."""

    def __init__(self) -> None:
        self._output = b""

    def read(self, response: router_pb2.GenerateResponse) -> bytes | router_pb2.Trip | Result:
        """A piece of text, a sweep that came back, or the result, which is last."""
        match response.WhichOneof("kind"):
            case "summary":
                return result_of(response.summary, self._output)
            case "trip":
                return response.trip
        self._output += response.text
        return response.text


class _DrawnAnswer:
    """The responses to a request for pictures."""

    def __init__(self, preview: Callable[[DrawnPictures], object] | None) -> None:
        self._preview = preview
        self._pictures: router_pb2.Pictures | None = None
        self._summary: router_pb2.DrawSummary | None = None

    def read(self, response: router_pb2.DrawResponse) -> None:
        if response.HasField("summary"):
            self._summary = response.summary
        elif not response.pictures.preview:
            self._pictures = response.pictures
        elif self._preview is not None:
            self._preview(_checked_pictures(response.pictures))

    def end(self) -> DrawnPictures:
        """The pictures. Raises RouterError where there are none."""
        if self._pictures is None or self._summary is None:
            raise RouterError("the router ended the answer without pictures", grpc.StatusCode.INTERNAL)
        return _checked_pictures(self._pictures, self._summary)


def _checked_pictures(message: router_pb2.Pictures, summary: router_pb2.DrawSummary | None = None) -> DrawnPictures:
    """Raises RouterError for pixels that are not as many as the message says."""
    try:
        return pictures_of(message, summary)
    except ValueError:
        raise RouterError("the router sent pictures of another size than it says", grpc.StatusCode.INTERNAL) from None


class AsyncClient(_Connection):
    """Talks to a router from asyncio code."""

    def _dial(self) -> None:
        # calls under way end on the channel that they began on
        self._channels = [*getattr(self, "_channels", ()), open_channel(self.address, security=self._security)]
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channels[-1])

    async def generate(self, prompt: str | bytes, **settings: Any) -> Result:  # noqa: ANN401
        """Generate a whole text; `settings` are those of `Request`, and timeout_s.

        Raises RequestRefused or RouterError.
        """
        result: Result | None = None
        async for item in self.events(prompt, whole=True, **settings):
            result = item if isinstance(item, Result) else result
        return _complete(result)

    async def stream(self, prompt: str | bytes, **settings: Any) -> AsyncIterator[bytes | Result]:  # noqa: ANN401
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        async with aclosing(self.events(prompt, **settings)) as events:
            async for event in events:
                if isinstance(event, bytes | Result):
                    yield event

    async def events(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        trips: bool = False,
        authorization: str | None = None,
        named: Callable[[str], object] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> AsyncGenerator[bytes | Logprobs | router_pb2.Trip | Result, None]:
        """Like `stream`, with a Trip for each sweep that came back, and Logprobs before the text that they are of.

        :param whole: the text in one piece at the end.
        :param authorization: sent to the router as metadata of this name, such as "Bearer TOKEN".
        :param named: called first, with the router's name of the request, where it tells one.
        """
        request = Request(prompt=prompt, **settings).message(whole, trips)
        timeout_s = _checked_timeout(timeout_s)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._credentials(authorization))
        answer = _Answer()
        try:
            with self._errors(timeout_s):
                if named is not None and (name := dict(await call.initial_metadata()).get(REQUEST_KEY)):
                    named(str(name))
                async for response in call:
                    if response.logprobs:
                        yield list(response.logprobs)
                    yield answer.read(response)
        finally:
            call.cancel()

    async def draw(
        self,
        classes: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        preview: Callable[[DrawnPictures], object] | None = None,
        authorization: str | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> DrawnPictures:
        """Draw pictures of one class or of several; `settings` are those of `DrawingRequest`.

        :param preview: called with what the pictures look like after each host but the last, mode `chain` only. They
            come in any order; one that would come after the pictures does not come.
        Raises RequestRefused or RouterError.
        """
        request = drawing_message(classes, settings, previews=preview is not None)
        timeout_s = _checked_timeout(timeout_s)
        call = self._stub.Draw(request, timeout=timeout_s, metadata=self._credentials(authorization))
        answer = _DrawnAnswer(preview)
        try:
            with self._errors(timeout_s):
                async for response in call:
                    answer.read(response)
        finally:
            call.cancel()
        return answer.end()

    async def status(self, timeout_s: float = 5.0, authorization: str | None = None) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        metadata = self._credentials(authorization)
        with self._errors(timeout_s):
            return await self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s, metadata=metadata)

    async def serves(self, timeout_s: float = 5.0) -> bool:
        """True where the router can take requests; no token is needed. Raises RouterError."""
        health = health_pb2_grpc.HealthStub(self._channels[-1])
        with self._errors(timeout_s):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def exchange(
        self, requests: AsyncIterator[router_pb2.DeployRequest] | None, timeout_s: float
    ) -> AsyncGenerator[router_pb2.DeployProgress, None]:
        """The router's progress while it exchanges its weights for those that `requests` bring (`onesweep deploy`).

        :param requests: None = it goes back to the release before. Raises RequestRefused or RouterError.
        """
        call: (
            grpc.aio.UnaryStreamCall[router_pb2.RollbackRequest, router_pb2.DeployProgress]
            | grpc.aio.StreamStreamCall[router_pb2.DeployRequest, router_pb2.DeployProgress]
        )
        if requests is None:
            call = self._stub.Rollback(router_pb2.RollbackRequest(), timeout=timeout_s, metadata=self._metadata)
        else:
            call = self._stub.Deploy(requests, timeout=timeout_s, metadata=self._metadata)
        try:
            with self._errors(timeout_s):
                async for progress in call:
                    yield progress
        finally:
            call.cancel()

    def _credentials(self, authorization: str | None) -> tuple[tuple[str, str], ...]:
        """Metadata with the caller's token, or this client's. Raises InputError for plain text to another machine."""
        if authorization is None:
            return self._metadata
        checked_security(self.address, self._security.tls, authorization, self._security.insecure)
        return (("authorization", authorization),)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Client(_Connection):
    """Talks to a router from plain code; see `AsyncClient` for what its methods do."""

    def _dial(self) -> None:
        self._channels = [*getattr(self, "_channels", ()), open_blocking_channel(self.address, security=self._security)]
        self._stub = router_pb2_grpc.RouterServiceStub(self._channels[-1])

    def generate(self, prompt: str | bytes, **settings: Any) -> Result:  # noqa: ANN401
        """Generate a whole text; `settings` are those of `Request`, and timeout_s.

        Raises RequestRefused or RouterError.
        """
        result: Result | None = None
        for item in self.stream(prompt, whole=True, **settings):
            result = item if isinstance(item, Result) else result
        return _complete(result)

    def stream(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> Iterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        request, answer = Request(prompt=prompt, **settings).message(whole), _Answer()
        call = self._stub.Generate(request, timeout=_checked_timeout(timeout_s), metadata=self._metadata)
        try:
            with self._errors(timeout_s):
                for response in call:
                    item = answer.read(response)
                    assert not isinstance(item, router_pb2.Trip)
                    yield item
        finally:
            call.cancel()

    def draw(
        self,
        classes: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        preview: Callable[[DrawnPictures], object] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> DrawnPictures:
        """Like `AsyncClient.draw`."""
        request = drawing_message(classes, settings, previews=preview is not None)
        call = self._stub.Draw(request, timeout=_checked_timeout(timeout_s), metadata=self._metadata)
        answer = _DrawnAnswer(preview)
        try:
            with self._errors(timeout_s):
                for response in call:
                    answer.read(response)
        finally:
            call.cancel()
        return answer.end()

    def status(self, timeout_s: float = 5.0) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        with self._errors(timeout_s):
            return self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s, metadata=self._metadata)

    def serves(self, timeout_s: float = 5.0) -> bool:
        """True where the router can take requests; no token is needed. Raises RouterError."""
        health = health_pb2_grpc.HealthStub(self._channels[-1])
        with self._errors(timeout_s):
            answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _complete(result: Result | None) -> Result:
    """The end of a whole answer. Raises RouterError where there is none."""
    if result is None:
        raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
    return result


class TextDecoder:
    """Shows bytes as they arrive without cutting a UTF-8 character in two."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def checked_security(address: str, tls: Tls | None, token: str, insecure: bool) -> Security:
    """TLS or plain text for a router. Raises InputError; a token never leaves the machine in plain text."""
    security = Security(tls, insecure)
    check_target(address, security, "router address")
    if token and not _is_private(address, tls):
        raise InputError(f"a token is not sent to {address} in plain text: give --tls-ca")
    return security


def _is_private(address: str, tls: Tls | None) -> bool:
    return tls is not None or is_loopback(address)


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise InputError(f"timeout_s must be above 0, not {timeout_s}")
    return timeout_s
