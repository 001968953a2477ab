"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

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
        """The pictures; moves from router to router count as replays. Raises RouterError if there are none."""
        if self._pictures is None or self._summary is None:
            raise RouterError("the router closed the stream without pictures", grpc.StatusCode.INTERNAL)
        self._summary.replays += moves
        return _pictures_of(self._pictures, self._summary)


def _pictures_of(message: router_pb2.Pictures, summary: router_pb2.DrawSummary | None = None) -> DrawnPictures:
    """Decode pictures. Raises RouterError if the message does not have the number of pixels that it states."""
    import numpy as np

    shape = (message.count, message.channels, message.height, message.width)
    try:
        # do not trust its own numbers: reshape fails if they do not match its pixels
        pixels = np.frombuffer(message.pixels, np.uint8).reshape(shape)
    except ValueError:
        raise RouterError("the pictures do not have the size in their header", grpc.StatusCode.INTERNAL) from None
    if summary is None:
        return DrawnPictures(pixels, block=message.block)
    return DrawnPictures(pixels, **{**booked(summary, DrawnPictures), "classes": list(summary.classes)})


class AsyncClient(RouterConnection):
    """A router's client for asyncio code."""

    _stubs: "list[router_pb2_grpc.RouterServiceAsyncStub]"

    def _dial(self, address: str, options: Options) -> grpc.aio.Channel:
        return open_channel(address, security=self.security, options=options)

    async def _ask(self, timeout_s: float, ask: Callable[[int, float], Awaitable[T]]) -> T:
        """Call `ask` with a router's index and the time left; if that router is lost, with the next one's."""
        turns = Turns(self, timeout_s)
        while True:
            with turns:
                return await ask(turns.at, turns.left_s)
            await asyncio.sleep(turns.pause_s)

    async def generate(self, prompt: str | bytes, **settings: Any) -> Result:  # noqa: ANN401
        """Generate a whole text; `settings` are the fields of `Request` and timeout_s.

        Raises RequestRefused or RouterError.
        """
        return _complete([item async for item in self.events(prompt, whole=True, **settings)])

    async def stream(self, prompt: str | bytes, **settings: Any) -> AsyncIterator[bytes | Result]:  # noqa: ANN401
        """Yield pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
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
        """Like `stream`, with a Trip for each sweep that came back, and Logprobs before their text.

        :param whole: send the text in one piece at the end.
        :param authorization: sent to the router as metadata of this name, such as "Bearer TOKEN".
        :param named: called first with the router's name for the request, if it sends one.
        """
        request = Request(prompt=prompt, **settings).message(whole, trips)
        answer = Turns(self, timeout_s)
        while True:
            metadata = self._credentials(authorization)
            call = self._stubs[answer.at].Generate(answer.asking(request), timeout=answer.left_s, metadata=metadata)
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
        """Draw pictures of one class or several; `settings` are the fields of `DrawingRequest`.

        :param preview: called with a preview of the pictures after each host but the last, mode `chain` only. Previews
            arrive in any order, and none after the pictures.
        Raises RequestRefused or RouterError.
        """
        request = drawing_message(classes, settings, previews=preview is not None)
        turns = Turns(self, timeout_s)
        while True:
            answer, metadata = _DrawnAnswer(preview), self._credentials(authorization)
            call = self._stubs[turns.at].Draw(turns.asking(request), timeout=turns.left_s, metadata=metadata)
            with turns.of(call):
                async for response in call:
                    answer.read(response)
                return answer.end(turns.moves)
            await asyncio.sleep(turns.pause_s)

    async def status(self, timeout_s: float = 5.0, authorization: str | None = None) -> router_pb2.StatusResponse:
        """The router's view of its hosts. Raises RouterError."""
        metadata = self._credentials(authorization)
        return await self._ask(timeout_s, lambda at, s: self._stubs[at].Status(STATUS, timeout=s, metadata=metadata))

    async def tokenize(
        self, asked: router_pb2.TokenizeRequest, authorization: str | None = None, timeout_s: float = 5.0
    ) -> router_pb2.TokenizeResponse:
        """Convert a text to a mode's tokens, or tokens to a text. Raises RequestRefused or RouterError."""
        metadata = self._credentials(authorization)
        return await self._ask(timeout_s, lambda at, s: self._stubs[at].Tokenize(asked, timeout=s, metadata=metadata))

    async def serves(self, timeout_s: float = 5.0) -> bool:
        """True if the router can serve requests; needs no token. Raises RouterError."""
        answer = await self._ask(timeout_s, lambda at, s: HealthStub(self._newest[at]).Check(HEALTH, timeout=s))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def exchange(
        self, requests: AsyncIterator[router_pb2.DeployRequest] | None, timeout_s: float, at: int = 0
    ) -> AsyncGenerator[router_pb2.DeployProgress, None]:
        """Yield the progress of one of the client's routers while it exchanges its weights for those in `requests` or,
        with None, for the previous ones (`onesweep deploy`). Raises RequestRefused or RouterError."""
        ask: Any = self._stubs[at].Deploy if requests else self._stubs[at].Rollback
        call = ask(requests or router_pb2.RollbackRequest(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for progress in call:
                yield progress
        except grpc.RpcError as error:
            raise self.failed(error, at, timeout_s, f"router {self.addresses[at]}: ") from None
        finally:
            call.cancel()

    def _credentials(self, authorization: str | None) -> tuple[tuple[str, str], ...]:
        """Metadata with the caller's token or this client's. Raises InputError for plain text to another machine."""
        if authorization is None:
            return self._metadata
        self._check(authorization)
        return (("authorization", authorization),)

    async def close(self) -> None:
        self.closed = True
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Client(RouterConnection):
    """A router's client for blocking code; `AsyncClient` documents its methods."""

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
            asked = answer.asking(request)
            call = self._stubs[answer.at].Generate(asked, timeout=answer.left_s, metadata=self._metadata)
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
            call = self._stubs[turns.at].Draw(turns.asking(request), timeout=turns.left_s, metadata=self._metadata)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _complete(items: Sequence[object]) -> Result:
    """The Result at the end of a whole answer. Raises RouterError if there is none."""
    if not items or not isinstance(items[-1], Result):
        raise RouterError("the router closed the stream without a summary", grpc.StatusCode.INTERNAL)
    return items[-1]


class TextDecoder:
    """Decodes bytes as they arrive without splitting a UTF-8 character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)
