"""The routers of a client: their addresses and errors, and the answer to a request that loses one of them.

The other router is asked for the same request, with the same seed, so it writes the same text from the beginning. What
was handed out already is compared and left out. To have it continue a given text would save that time and lose the
promise: tokens, penalties, schemas, stop strings and the borders of chunks depend on where a text began.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

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

MOST_ROUTERS = 8
# So long all are asked again: `serve` starts a router that ended anew, which takes seconds, and one that is back may
# not be reached for 2 s, gRPC's pause between attempts.
BACK_S, PAUSE_S = 30.0, 0.25
LOST_AFTER_MS = 5_000  # a ping's answer; gRPC gives it a minute, and sends one every 10 s (channel.py)
_USER_MISTAKES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED")


class RequestRefused(InputError):
    """The router found the token, or a field of the request, wrong; `code` is the gRPC status."""

    def __init__(self, message: str, code: StatusCode, request: str = "") -> None:
        super().__init__(message)
        self.code, self.request = code, request


class RouterError(ServiceError):
    """The router, or a host behind it, failed or did not answer; `code` is the gRPC status.

    `request` is what the router's log calls the request; empty where it never got there. `reached`: it is the router's
    own word, not that of a connection which ended."""

    def __init__(
        self, message: str, code: StatusCode, retry_after_ms: int | None = None, request: str = "", reached: bool = True
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after_ms, self.request, self.reached = code, retry_after_ms, request, reached


def router_addresses(text: str) -> tuple[str, ...]:
    """The routers of "HOST:PORT[,HOST:PORT...]", in the order in which they are asked. Raises InputError."""
    addresses = tuple(text.split(","))
    for address in addresses:
        parse_address(address, "router address")
    if len(set(addresses)) != len(addresses) or len(addresses) > MOST_ROUTERS:
        raise InputError(f"router address {text!r} must name up to {MOST_ROUTERS} routers, each once")
    return addresses


class RouterConnection(ABC):
    """Common part of the two clients: addresses, certificates and token."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str | None = None, insecure: bool = False
    ) -> None:
        """:param address: HOST:PORT, or several with commas between: where a router is lost, the next one continues its
            requests, and their text is the same.
        :param tls: the authority that the router's certificate must be signed by; None = plain text.
        :param token: sent with every call; None = `token_for`: this user's own router asks for no other.
        :param insecure: accept plain text to another machine, without a token.

        Raises InputError for a connection that would not be safe.
        """
        self.address, self.addresses, self.security = address, router_addresses(address), Security(tls, insecure)
        self.first = 0  # the router that the next request asks first
        self._check(token)
        self._token = token
        self.closed = False
        self._channels: list[Any] = []  # calls under way end on the channel that they began on
        self._open()

    @property
    def is_private(self) -> bool:
        """True where a token that is sent cannot be read on its way."""
        return self.security.tls is not None or all(map(is_loopback, self.addresses))

    @property
    def _metadata(self) -> Metadata:
        """Looked up with each call: a router that is started again asks for another token."""
        return token_metadata(token_for(self.address, self.security.tls) if self._token is None else self._token)

    def _check(self, token: str | None) -> None:
        """Raise InputError for plain text that was not allowed, or that would bring a token to another machine."""
        for address in self.addresses:
            check_target(address, self.security, "router address")
        if token and not self.is_private:
            raise InputError(f"a token is not sent to {self.address} in plain text: give --tls-ca")

    def _open(self) -> None:
        """Connect with the certificates as they are now."""
        # taken before the files are read: what changes meanwhile is noticed at the next failure
        stamp = self.security.stamp()
        # no message of a request is so large that a ping waits long behind it
        options = [("grpc.http2.ping_timeout_ms", LOST_AFTER_MS)] if len(self.addresses) > 1 else []
        self._newest = [self._dial(each, options) for each in self.addresses]
        self._channels += self._newest
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._newest]
        self._stamp = stamp

    @abstractmethod
    def _dial(self, address: str, options: Options) -> Any:  # noqa: ANN401
        """A channel of the client's kind."""

    def failed(self, error: grpc.RpcError, at: int, timeout_s: float) -> RequestRefused | RouterError:
        """The exception for people that a status stands for; the next call uses certificates that were renewed."""
        code, details, metadata = error.code(), printable(error.details() or "", newline=" "), call_metadata(error)
        request, reached, address = metadata.get(REQUEST_KEY, ""), STATUS_MARK in metadata, self.addresses[at]
        if code.name in _USER_MISTAKES:
            return RequestRefused(details, code, request)
        if code is StatusCode.DEADLINE_EXCEEDED:
            return RouterError(f"no answer within {timeout_s:g} s: {details}", code, request=request)
        if code is StatusCode.UNAVAILABLE and not reached:
            if self.security.stamp() != self._stamp:
                with suppress(InputError):  # half of it may be replaced yet
                    self._open()
            problem = handshake_problem(details, self.security)
            taken = "SETTINGS frame" in details or "HTTP/2" in details
            remedy = "another program has that port, or it hangs" if taken else "start one with `onesweep up`"
            missing = f"no router answers at {address}; {remedy} ({details})"
            if "resolving" in details:  # gRPC's sentence has three kinds of brackets
                missing = f"the name in {address} has no address: see that it is spelled right"
            # one that had a connection is asked again: only the call was cut off
            again_ms = None if problem or "last error" in details or "resol" in details else round(1000 * PAUSE_S)
            said = f"the router at {address} {problem}" if problem else missing
            return RouterError(said, code, again_ms, request, reached=False)
        if code is StatusCode.CANCELLED and not reached and not self.closed:
            # gRPC's own word: of the calls that wait for a server's event loop, it ends some from 1,000 on, and no code
            # of the server's sees them. CONTINUATION floods fill that queue: each connection that fails leaves a call.
            said = f"the call to the router at {address} was cut off: too many calls wait there"
            return RouterError(said, StatusCode.UNAVAILABLE, round(1000 * PAUSE_S), request, reached=False)
        if code is StatusCode.UNIMPLEMENTED:
            return RouterError(f"{address} is no router; give the router's address", code)
        return RouterError(details or code.name, code, retry_after_ms(metadata), request, reached)


class Turns:
    """One request, the router whose turn it is, and what was handed out of the answer, whichever routers it came from.

    As a context manager it is one call. A call that fails ends the block without an exception: it is another's turn.
    """

    def __init__(self, client: RouterConnection, timeout_s: float) -> None:
        if not 0 < timeout_s < math.inf:
            raise InputError(f"timeout_s must be above 0, not {timeout_s}")
        self.client, self.timeout_s, self.at = client, timeout_s, client.first
        self.pause_s, self.moves = 0.0, 0  # before the next turn; from router to router
        self._deadline_s = monotonic() + timeout_s
        self._call: grpc.RpcContext | grpc.aio.RpcContext | None = None
        self._lost, self._since_s = dict[int, RouterError](), 0.0  # by router, and from when on, since text came last
        self.output = b""
        # Numbers of bytes, tokens and trips: handed out, and those among them that this router has not repeated yet.
        self._out, self._old = Counter[str](), Counter[str]()

    @property
    def left_s(self) -> float:
        """Time until the request's deadline, which all routers share."""
        return max(self._deadline_s - monotonic(), 0.0)

    def of(self, call: grpc.RpcContext | grpc.aio.RpcContext) -> Self:
        """This turn, which ends `call`, too."""
        self._call = call
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._call is not None:
            self._call.cancel()
        if isinstance(error, grpc.RpcError):
            error = self.client.failed(error, self.at, self.timeout_s)
        elif isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and not task.cancelling():
            # gRPC raises it, too, where it was the connection that ended: another router helps, unless we closed it
            closed, said = self.client.closed, f"the connection to {self.client.addresses[self.at]} was closed"
            code = StatusCode.CANCELLED if closed else StatusCode.UNAVAILABLE
            error = RouterError(said, code, reached=closed)
        if isinstance(error, RequestRefused | RouterError):
            self.lost(error)
            return True
        return False

    def lost(self, error: RequestRefused | RouterError) -> None:
        """Give the turn to another router.

        Raises `error` where another router would not help, and RouterError where none is left.
        """
        addresses, self.pause_s = self.client.addresses, 0.0
        if isinstance(error, RequestRefused):
            raise error from None
        wait_s = (error.retry_after_ms or 0) / 1000
        if len(addresses) == 1 and (error.reached or not (wait_s or self._lost)):  # nobody ever answered there
            raise error from None
        if self._lost and error.code is StatusCode.RESOURCE_EXHAUSTED and 0 < wait_s < self.left_s:
            self.pause_s = wait_s  # everybody moved here from a router that died: there will be room
            return
        if error.code is not StatusCode.UNAVAILABLE:
            raise error from None
        self._since_s = self._since_s if self._lost else monotonic()
        self._lost[self.at] = error
        others = [i % len(addresses) for i in range(self.at + 1, self.at + len(addresses))] or [0]
        left = [i for i in others if i not in self._lost]
        if not left and monotonic() + PAUSE_S < min(self._since_s + BACK_S, self._deadline_s):
            left, self.pause_s = others, PAUSE_S
        if not left:
            none = f"none of the routers {' and '.join(addresses)} answers: " if len(addresses) > 1 else ""
            answered = [each for each in self._lost.values() if each.reached]
            nobody = RouterError(f"{none}{error}", error.code, error.retry_after_ms, reached=False)
            raise (*answered, nobody)[0] from None
        if self.client.first == self.at:
            self.client.first = left[0]
        self.at, self.moves, self._old = left[0], self.moves + (not self.pause_s), self._out.copy()

    def read(self, response: router_pb2.GenerateResponse) -> Iterator[bytes | Logprobs | router_pb2.Trip | Result]:
        """New parts: log-probabilities before the text that they are of, a sweep, or the result, which is last.

        Raises RouterError where this router's text is not the one that was begun.
        """
        if scored := list(response.prompt_logprobs)[self._repeated("scored", len(response.prompt_logprobs)) :]:
            yield PromptLogprobs(scored)
        if told := list(response.logprobs)[self._repeated("tokens", len(response.logprobs)) :]:
            yield told
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
        """Number of those among `count` that were handed out before."""
        old = min(self._old[kind], count)
        self._old[kind] -= old
        self._out[kind] += count - old
        return old

    def _differs(self) -> RouterError:
        said = (
            f"the router at {self.client.addresses[self.at]} does not write the text that another began: they serve "
            "different weights, or mode auto chose by their own latencies; ask again"
        )
        return RouterError(said, StatusCode.ABORTED)
