"""A client's routers: their addresses and errors, and failover of a request that loses one of them.

The other router gets the same request with the same seed, so it generates the same text from the start. The client
compares the part already handed out and skips it. Continuing the given text would save that time but break the
guarantee: tokens, penalties, schemas, stop strings and chunk borders depend on where a text began.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from grpc import StatusCode

from serving.client.result import Logprobs, PromptLogprobs, Result, booked
from serving.router.request import DEFAULT_ROUTER
from serving.v1 import router_pb2, router_pb2_grpc
from stages.clock import monotonic
from stages.errors import InputError, ServiceError, printable
from stages.wire.channel import Options, check_target, is_loopback, parse_address
from stages.wire.status import REQUEST_KEY, STATUS_MARK, Metadata, call_metadata, retry_after_ms
from stages.wire.tls import Security, Tls, handshake_problem
from stages.wire.tokens import token_for, token_metadata

R = TypeVar("R", router_pb2.GenerateRequest, router_pb2.DrawRequest)

MAX_ROUTERS = 8
# How long to retry all of them: `serve` restarts a router that ended, which takes seconds, and gRPC may not reach a
# restarted one for 2 s, its pause between attempts.
RECOVERY_S, PAUSE_S = 30.0, 0.25
LOST_AFTER_MS = 5_000  # limit on a ping's answer; gRPC's default is a minute, with a ping every 10 s (channel.py)
_USER_MISTAKES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED")


class RequestRefused(InputError):
    """The router rejected the token or a field of the request; `code`: gRPC status, `reason`: TOO_LONG or another."""

    def __init__(self, message: str, code: StatusCode, request: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.code, self.request, self.reason = code, request, reason


class RouterError(ServiceError):
    """The router, or a host behind it, failed or did not answer; `code` is the gRPC status.

    `request` is the request's name in the router's log; empty if it never arrived. `reached`: the error comes from the
    router itself, not from a lost connection."""

    def __init__(
        self, message: str, code: StatusCode, retry_after_ms: int | None = None, request: str = "", reached: bool = True
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after_ms, self.request, self.reached = code, retry_after_ms, request, reached


class HandshakeError(RouterError):
    """The router and this client speak no TLS that the other accepts."""


def router_addresses(text: str) -> tuple[str, ...]:
    """The routers in "HOST:PORT[,HOST:PORT...]", in the order of use. Raises InputError."""
    addresses = tuple(text.split(","))
    for address in addresses:
        parse_address(address, "router address")
    if len(set(addresses)) != len(addresses) or len(addresses) > MAX_ROUTERS:
        raise InputError(f"router address {text!r} must name up to {MAX_ROUTERS} routers, each once")
    return addresses


class RouterConnection(ABC):
    """The common part of the two clients: addresses, certificates and token."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str | None = None, insecure: bool = False
    ) -> None:
        """:param address: HOST:PORT, or several separated by commas: if a router is lost, the next one continues its
            requests with the same text.
        :param tls: the authority that must have signed the router's certificate; None = plain text.
        :param token: sent with every call; None = `token_for`, which is all that this user's own router requires.
        :param insecure: accept plain text to another machine, without a token.

        Raises InputError for an unsafe connection.
        """
        self.address, self.addresses, self.security = address, router_addresses(address), Security(tls, insecure)
        self.first = 0  # the router that the next request tries first
        self._check(token)
        self._token = token
        self.closed = False
        self._channels: list[Any] = []  # running calls end on the channel that they began on
        self._open()

    @property
    def is_private(self) -> bool:
        """True if nobody can read a token on its way."""
        return self.security.tls is not None or all(map(is_loopback, self.addresses))

    @property
    def _metadata(self) -> Metadata:
        """The call metadata, looked up anew each time: a restarted router wants another token."""
        return token_metadata(token_for(self.address, self.security.tls) if self._token is None else self._token)

    def _check(self, token: str | None) -> None:
        """Raise InputError for plain text that is not allowed, or that would carry a token to another machine."""
        for address in self.addresses:
            check_target(address, self.security, "router address")
        if token and not self.is_private:
            raise InputError(f"a token is not sent to {self.address} in plain text: give --tls-ca")

    def _open(self) -> None:
        """Connect with the current certificates."""
        # before the files are read: the next failure then notices a change made meanwhile
        stamp = self.security.stamp()
        # no request's message is large enough to delay a ping for long
        options = [("grpc.http2.ping_timeout_ms", LOST_AFTER_MS)] if len(self.addresses) > 1 else []
        self._newest = [self._dial(each, options) for each in self.addresses]
        self._channels += self._newest
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._newest]
        self._stamp = stamp

    @abstractmethod
    def _dial(self, address: str, options: Options) -> Any:  # noqa: ANN401
        """A channel of the client's kind."""

    def failed(self, error: grpc.RpcError, at: int, timeout_s: float, whose: str = "") -> RequestRefused | RouterError:
        """The exception for a gRPC error; also picks up renewed certificates for the next call.
        :param whose: begins the router's own messages, which do not name it."""
        code, details, metadata = error.code(), printable(error.details() or "", newline=" "), call_metadata(error)
        request, reached, address = metadata.get(REQUEST_KEY, ""), STATUS_MARK in metadata, self.addresses[at]
        if code.name in _USER_MISTAKES:
            return RequestRefused(f"{whose}{details}", code, request, metadata.get(STATUS_MARK, ""))
        if code is StatusCode.DEADLINE_EXCEEDED:
            return RouterError(f"{whose}no answer within {timeout_s:g} s: {details}", code, request=request)
        if code is StatusCode.UNAVAILABLE and not reached:
            if self.security.stamp() != self._stamp:
                with suppress(InputError):  # the files may be half replaced
                    self._open()
            if problem := handshake_problem(details, self.security):
                return HandshakeError(f"the router at {address} {problem}", code, reached=False)
            taken = "SETTINGS frame" in details or "HTTP/2" in details
            start = "with `onesweep up`" if address == DEFAULT_ROUTER else "there, or correct the address"
            remedy = "another program uses that port, or it hangs" if taken else f"start one {start}"
            missing = f"no router answers at {address}; {remedy} ({details})"
            if "resolving" in details:  # gRPC's own sentence has three kinds of brackets
                missing = f"the name in {address} does not resolve: check its spelling"
            # retry a router that had a connection: only the call was cut off
            retry_ms = None if "last error" in details or "resol" in details else round(1000 * PAUSE_S)
            return RouterError(missing, code, retry_ms, request, reached=False)
        if code is StatusCode.CANCELLED and not reached and not self.closed:
            # from gRPC itself: once 1,000 calls wait for a server's event loop, it ends some of them unseen by the
            # server's code. CONTINUATION floods fill that queue: each failed connection leaves a call there.
            message = f"the call to the router at {address} was cut off: too many calls wait there"
            return RouterError(message, StatusCode.UNAVAILABLE, round(1000 * PAUSE_S), request, reached=False)
        if code is StatusCode.UNIMPLEMENTED:
            return RouterError(f"{address} is not a router; give the router's address", code)
        return RouterError(f"{whose}{details or code.name}", code, retry_after_ms(metadata), request, reached)


class Turns(AbstractContextManager["Turns"]):
    """One request's turns at the routers, and the part of the answer handed out so far, from whichever router.

    As a context manager it is one call. A failed call ends the block without an exception and passes the turn on.
    """

    def __init__(self, client: RouterConnection, timeout_s: float) -> None:
        if not 0 < timeout_s < math.inf:
            raise InputError(f"timeout_s must be above 0, not {timeout_s}")
        self.client, self.timeout_s, self.at = client, timeout_s, client.first
        self.pause_s, self.moves = 0.0, 0  # pause before the next turn; moves from router to router
        self._deadline_s = monotonic() + timeout_s
        self._call: grpc.RpcContext | grpc.aio.RpcContext | None = None
        self._lost, self._since_s = dict[int, RouterError](), 0.0  # by router, and since when; text clears it
        self.output = b""
        # Counts of bytes, tokens and trips handed out, and of those that this router has yet to repeat.
        self._out, self._old = Counter[str](), Counter[str]()

    @property
    def left_s(self) -> float:
        """Seconds until the request's deadline, which all routers share."""
        return max(self._deadline_s - monotonic(), 0.0)

    def asking(self, request: R) -> R:
        """The request as this turn sends it: a router waits less for its hosts while there is another one to ask."""
        request.has_other = len({*self._lost, self.at}) < len(self.client.addresses)
        return request

    def of(self, call: grpc.RpcContext | grpc.aio.RpcContext) -> Self:
        """Return this turn, which from now on also ends `call`."""
        self._call = call
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._call is not None:
            self._call.cancel()
        if isinstance(error, grpc.RpcError):
            error = self.client.failed(error, self.at, self.timeout_s)
        elif isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and not task.cancelling():
            # gRPC also raises it when the connection ended: another router helps, unless we closed it ourselves
            closed, message = self.client.closed, f"the connection to {self.client.addresses[self.at]} was closed"
            code = StatusCode.CANCELLED if closed else StatusCode.UNAVAILABLE
            error = RouterError(message, code, reached=closed)
        if isinstance(error, RequestRefused | RouterError):
            self.lost(error)
            return True
        return False

    def lost(self, error: RequestRefused | RouterError) -> None:
        """Pass the turn to another router.

        Raises `error` if another router would not help, and RouterError if none is left.
        """
        addresses, self.pause_s, self._old = self.client.addresses, 0.0, self._out.copy()
        if isinstance(error, RequestRefused):
            raise error from None
        wait_s = (error.retry_after_ms or 0) / 1000
        if len(addresses) == 1 and (error.reached or not (wait_s or self._lost)):  # nothing ever answered there
            raise error from None
        if self._lost and error.code is StatusCode.RESOURCE_EXHAUSTED and 0 < wait_s < self.left_s:
            self.pause_s = wait_s  # all clients moved here from a dead router: room will follow
            return
        if error.code is not StatusCode.UNAVAILABLE:
            raise error from None
        self._since_s = self._since_s if self._lost else monotonic()
        self._lost[self.at] = error
        others = [i % len(addresses) for i in range(self.at + 1, self.at + len(addresses))] or [0]
        left = [i for i in others if i not in self._lost]
        if not left and monotonic() + PAUSE_S < min(self._since_s + RECOVERY_S, self._deadline_s):
            left, self.pause_s = others, PAUSE_S
        if not left:
            none = f"none of the routers {' and '.join(addresses)} answers: " if len(addresses) > 1 else ""
            answered = [each for each in self._lost.values() if each.reached]
            unreached = RouterError(f"{none}{error}", error.code, error.retry_after_ms, reached=False)
            raise (*answered, unreached)[0] from None
        if self.client.first == self.at:
            self.client.first = left[0]
        self.at, self.moves = left[0], self.moves + (not self.pause_s)

    def read(self, response: router_pb2.GenerateResponse) -> Iterator[bytes | Logprobs | router_pb2.Trip | Result]:
        """Yield new parts: logprobs before their text, a sweep, or the result, which comes last.

        Raises RouterError if this router's text differs from the text begun.
        """
        if scored := list(response.prompt_logprobs)[self._repeated("scored", len(response.prompt_logprobs)) :]:
            yield PromptLogprobs(scored)
        if logprobs := list(response.logprobs)[self._repeated("tokens", len(response.logprobs)) :]:
            yield logprobs
        match response.WhichOneof("kind"):
            case "summary" if self._old["bytes"]:
                raise self._differs()
            case "summary":
                response.summary.replays += self.moves
                text = self.output.decode(errors="replace")
                yield Result(text=text, output=self.output, **booked(response.summary, Result))
            case "trip":
                if not self._repeated("trips", 1):
                    yield response.trip
            case _:
                at = self._out["bytes"] - self._old["bytes"]
                old = self._repeated("bytes", len(response.text))
                if response.text[:old] != self.output[at : at + old]:
                    raise self._differs()
                if new := response.text[old:]:
                    self.output += new
                    self._lost.clear()
                    yield new

    def _repeated(self, kind: str, count: int) -> int:
        """Number of `count` further items that were already handed out."""
        old = min(self._old[kind], count)
        self._old[kind] -= old
        self._out[kind] += count - old
        return old

    def _differs(self) -> RouterError:
        message = (
            f"the router at {self.client.addresses[self.at]} does not continue the text that another began: they serve "
            "different weights, or mode auto chose by each one's latencies; send the request again"
        )
        return RouterError(message, StatusCode.ABORTED)
