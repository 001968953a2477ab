"""Dependencies of the handlers: access to the router with the caller's token, and strict parsing of bodies."""

import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic_core
from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute

from serving.client.client import AsyncClient, DrawnPictures, Result
from serving.client.result import Logprobs
from serving.gateway.errors import ApiError
from serving.v1 import router_pb2
from stages.wire.channel import is_loopback
from stages.wire.status import CALLS
from stages.wire.tokens import SCHEME, own_token


def _client(request: Request) -> AsyncClient:
    return request.app.state.client


RouterClient = Annotated[AsyncClient, Depends(_client)]


@dataclass(frozen=True)
class RouterAccess:
    """The router, used with the caller's token."""

    client: AsyncClient
    # Timeout of requests that name none.
    timeout_s: float
    authorization: str | None = field(repr=False)

    async def status(self) -> router_pb2.StatusResponse:
        return await self.client.status(authorization=self.authorization)

    async def tokenize(self, mode: str, **asked: Any) -> router_pb2.TokenizeResponse:  # noqa: ANN401
        """`AsyncClient.tokenize`."""
        message = router_pb2.TokenizeRequest(mode=mode, protocol=CALLS, **asked)
        return await self.client.tokenize(message, self.authorization)

    async def draw(self, classes: str, **settings: Any) -> DrawnPictures:  # noqa: ANN401
        """`AsyncClient.draw`."""
        settings["timeout_s"] = settings.get("timeout_s") or self.timeout_s
        return await self.client.draw(classes, **settings, authorization=self.authorization)

    def events(self, **settings: Any) -> AsyncGenerator[bytes | Logprobs | router_pb2.Trip | Result, None]:  # noqa: ANN401
        """`AsyncClient.events`."""
        settings["timeout_s"] = settings.get("timeout_s") or self.timeout_s
        return self.client.events(**settings, authorization=self.authorization)


def _access(
    request: Request,
    client: RouterClient,
    authorization: Annotated[str | None, Header(description="Bearer TOKEN: passed on to the router")] = None,
) -> RouterAccess:
    settings, forwarded = request.app.state.settings, None
    # Clients send a token out of habit, or something that is not one, and the link to the router may not be private. In
    # these cases the router decides without it, and its refusal says so if it wants a token.
    if client.is_private and (match := re.fullmatch(r"[Bb]earer +([\x21-\x7e]{1,4096})", authorization or "")):
        forwarded = SCHEME + match[1]
    # the page works at once on the user's own machine: anyone who reaches it gets texts and status, no more
    if is_loopback(settings.listen) and (own := own_token(client.address)):
        forwarded = SCHEME + own
    return RouterAccess(client, settings.timeout_s, forwarded)


Router = Annotated[RouterAccess, Depends(_access)]


class _StrictRequest(Request):
    async def json(self) -> object:
        """The parsed body, without NaN, halves of surrogate pairs or deep nesting. Raises ApiError."""
        try:
            # its cache would keep thousands of short strings, such as prompts, after their requests
            parsed: object = pydantic_core.from_json(await self.body(), allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            too_deep = "nested too deep: at most 200 objects and lists inside each other"  # as pydantic's parser has it
            problem = too_deep if "recursion limit" in str(error) else f"not JSON: {error}"
            problem = re.sub(": .*hex escape", ": half of a surrogate pair", problem)
            raise ApiError(400, f"the body is {problem}", code="invalid_json") from None
        return parsed


class StrictRoute(APIRoute):
    """A route whose body is parsed strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
