"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from serving.client.failover import RequestRefused, RouterConnection, RouterError, Turns
from serving.client.result import DrawnPictures, Logprobs, Result, booked
from serving.drawing.request import drawing_message
from serving.router.request import DEFAULT_TIMEOUT_S, Request
from serving.v1 import router_pb2, router_pb2_grpc
from stages.wire.channel import Options, open_blocking_channel, open_channel
from stages.wire.status import CALLS, REQUEST_KEY
from stages.wire.tls import Tls

# The client's public surface.
__all__ = ["AsyncClient", "Client", "DrawnPictures", "RequestRefused", "Result", "RouterError", "TextDecoder", "Tls"]

T = TypeVar("T")
SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
STATUS, HEALTH = router_pb2.StatusRequest(protocol=CALLS), health_pb2.HealthCheckRequest(service=SERVICE)


class _DrawnAnswer:
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
            self._preview(_pictures_of(response.pictures))

    def end(self, moves: int = 0) -> DrawnPictures:
        """The pictures; moves from router to router count as replays. Raises RouterError where there are none."""
        if self._pictures is None or self._summary is None:
            raise RouterError("the router ended the answer without pictures", grpc.StatusCode.INTERNAL)
        self._summary.replays += moves
        return _pictures_of(self._pictures, self._summary)


def _pictures_of(message: router_pb2.Pictures, summary: router_pb2.DrawSummary | None = None) -> DrawnPictures:
    """Raises RouterError for pixels that are not as many as the message says."""
    import numpy as np

    shape = (message.count, message.channels, message.height, message.width)
    try:
        # its own numbers are not trusted: reshape fails where they do not come to the pixels that it brought
        pixels = np.frombuffer(message.pixels, np.uint8).reshape(shape)
    except ValueError:
        raise RouterError("the router sent pictures of another size than it says", grpc.StatusCode.INTERNAL) from None
    if summary is None:
        return DrawnPictures(pixels, block=message.block)
    return DrawnPictures(pixels, **{**booked(summary, DrawnPictures), "classes": list(summary.classes)})


class AsyncClient(RouterConnection, AbstractAsyncContextManager["AsyncClient"]):
    """Talks to a router from asyncio code."""

    _stubs: "list[router_pb2_grpc.RouterServiceAsyncStub]"

    def _dial(self, address: str, options: Options) -> grpc.aio.Channel:
        return open_channel(address, security=self.security, options=options)

    async def _ask(self, timeout_s: float, ask: Callable[[int, float], Awaitable[T]]) -> T:
        """Answer of a router, asked by its place and with the time left; where it is lost, of the next one."""
        turns = Turns(self, timeout_s)
        while True:
            with turns:
                return await ask(turns.at, turns.left_s)
            await asyncio.sleep(turns.pause_s)

    async def generate(self, prompt: str | bytes, **settings: Any) -> Result:  # noqa: ANN401
        """Generate a whole text; `settings` are those of `Request`, and timeout_s.

        Raises RequestRefused or RouterError.
        """
        return _complete([item async for item in self.events(prompt, whole=True, **settings)])

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
        answer = Turns(self, timeout_s)
        while True:
            metadata = self._credentials(authorization)
            call = self._stubs[answer.at].Generate(request, timeout=answer.left_s, metadata=metadata)
            with answer.of(call):
                if named is not None and (name := dict(await call.initial_metadata()).get(REQUEST_KEY)):
                    named(str(name))
                    named = None
                async for response in call:
                    for item in answer.read(response):
                        yield item
                return
            await asyncio.sleep(answer.pause_s)

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
        turns = Turns(self, timeout_s)
        while True:
            answer, metadata = _DrawnAnswer(preview), self._credentials(authorization)
            call = self._stubs[turns.at].Draw(request, timeout=turns.left_s, metadata=metadata)
            with turns.of(call):
                async for response in call:
                    answer.read(response)
                return answer.end(turns.moves)
            await asyncio.sleep(turns.pause_s)

    async def status(self, timeout_s: float = 5.0, authorization: str | None = None) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        metadata = self._credentials(authorization)
        return await self._ask(timeout_s, lambda at, s: self._stubs[at].Status(STATUS, timeout=s, metadata=metadata))

    async def tokenize(
        self, asked: router_pb2.TokenizeRequest, authorization: str | None = None, timeout_s: float = 5.0
    ) -> router_pb2.TokenizeResponse:
        """A text in the tokens of a mode, or tokens as a text. Raises RequestRefused or RouterError."""
        metadata = self._credentials(authorization)
        return await self._ask(timeout_s, lambda at, s: self._stubs[at].Tokenize(asked, timeout=s, metadata=metadata))

    async def serves(self, timeout_s: float = 5.0) -> bool:
        """True where the router can take requests; no token is needed. Raises RouterError."""
        answer = await self._ask(timeout_s, lambda at, s: HealthStub(self._newest[at]).Check(HEALTH, timeout=s))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def exchange(
        self, requests: AsyncIterator[router_pb2.DeployRequest] | None, timeout_s: float, at: int = 0
    ) -> AsyncGenerator[router_pb2.DeployProgress, None]:
        """The progress of a router, one of the client's, while it exchanges its weights for those that `requests` bring
        or, with None, for those before (`onesweep deploy`). Raises RequestRefused or RouterError."""
        ask: Any = self._stubs[at].Deploy if requests else self._stubs[at].Rollback
        call = ask(requests or router_pb2.RollbackRequest(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for progress in call:
                yield progress
        except grpc.RpcError as error:
            raise self.failed(error, at, timeout_s) from None
        finally:
            call.cancel()

    def _credentials(self, authorization: str | None) -> tuple[tuple[str, str], ...]:
        """Metadata with the caller's token, or this client's. Raises InputError for plain text to another machine."""
        if authorization is None:
            return self._metadata
        self._check(authorization)
        return (("authorization", authorization),)

    async def close(self) -> None:
        self.closed = True
        for channel in self._channels:
            await channel.close()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Client(RouterConnection, AbstractContextManager["Client"]):
    """Talks to a router from plain code; see `AsyncClient` for what its methods do."""

    _stubs: list[router_pb2_grpc.RouterServiceStub]

    def _dial(self, address: str, options: Options) -> grpc.Channel:
        return open_blocking_channel(address, self.security, options)

    def _ask(self, timeout_s: float, ask: Callable[[int, float], T]) -> T:
        turns = Turns(self, timeout_s)
        while True:
            with turns:
                return ask(turns.at, turns.left_s)
            time.sleep(turns.pause_s)

    def generate(self, prompt: str | bytes, **settings: Any) -> Result:  # noqa: ANN401
        """Like `AsyncClient.generate`."""
        return _complete(list(self.stream(prompt, whole=True, **settings)))

    def stream(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> Iterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        request, answer = Request(prompt=prompt, **settings).message(whole), Turns(self, timeout_s)
        while True:
            call = self._stubs[answer.at].Generate(request, timeout=answer.left_s, metadata=self._metadata)
            with answer.of(call):
                for response in call:
                    yield from (item for item in answer.read(response) if isinstance(item, bytes | Result))
                return
            time.sleep(answer.pause_s)

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
        turns = Turns(self, timeout_s)
        while True:
            answer = _DrawnAnswer(preview)
            call = self._stubs[turns.at].Draw(request, timeout=turns.left_s, metadata=self._metadata)
            with turns.of(call):
                for response in call:
                    answer.read(response)
                return answer.end(turns.moves)
            time.sleep(turns.pause_s)

    def status(self, timeout_s: float = 5.0) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        return self._ask(timeout_s, lambda at, s: self._stubs[at].Status(STATUS, timeout=s, metadata=self._metadata))

    def serves(self, timeout_s: float = 5.0) -> bool:
        """True where the router can take requests; no token is needed. Raises RouterError."""
        answer = self._ask(timeout_s, lambda at, s: HealthStub(self._newest[at]).Check(HEALTH, timeout=s))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        self.closed = True
        for channel in self._channels:
            channel.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def _complete(items: Sequence[object]) -> Result:
    """The end of a whole answer. Raises RouterError where there is none."""
    if not items or not isinstance(items[-1], Result):
        raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
    return items[-1]


class TextDecoder:
    """Shows bytes as they arrive without cutting a UTF-8 character in two."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)
