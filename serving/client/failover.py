"""The routers of a client: their addresses and errors, and the answer to a request that loses one of them.

The other router is asked for the same request, with the same seed, so it writes the same text from the beginning. What
was handed out already is compared and left out. To have it continue a given text would save that time and lose the
promise: tokens, penalties, schemas, stop strings and the borders of chunks depend on where a text began.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import grpc.aio

from onesweep.serving.client.result import Logprobs, Result, result_of
from onesweep.serving.v1 import router_pb2
from onesweep.stages.errors import InputError, ServiceError, printable
from onesweep.stages.wire.channel import SILENCE_MS, parse_address
from onesweep.stages.wire.status import REQUEST_KEY, STATUS_MARK, call_metadata, retry_after_ms, trailing_metadata
from onesweep.stages.wire.tls import Security, handshake_problem

MOST_ROUTERS = 8
LOST_AFTER_MS = 5_000  # pings of an idle connection are 10 s apart (channel.py)
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

    `request` is what the router's log calls the request; empty where it never got there. `reached`: it is the router's
    own word, not that of a connection which ended."""

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode,
        retry_after_ms: int | None = None,
        request: str = "",
        reached: bool = True,
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after_ms, self.request, self.reached = code, retry_after_ms, request, reached


def router_addresses(text: str, what: str = "router address") -> tuple[str, ...]:
    """The routers of "HOST:PORT[,HOST:PORT...]", in the order in which they are asked. Raises InputError."""
    addresses = tuple(text.split(","))
    for address in addresses:
        parse_address(address, what)
    if len(set(addresses)) != len(addresses) or len(addresses) > MOST_ROUTERS:
        raise InputError(f"{what} {text!r} must name up to {MOST_ROUTERS} routers, each once")
    return addresses


def error_of(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, timeout_s: float, security: Security
) -> RequestRefused | RouterError:
    """The exception for people that a status stands for."""
    code, details = error.code(), printable(error.details() or "", newline=" ")
    metadata = call_metadata(error)
    request, reached = metadata.get(REQUEST_KEY, ""), STATUS_MARK in trailing_metadata(error)
    if code in _USER_MISTAKES:
        return RequestRefused(details, code, request)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RouterError(f"no answer within {timeout_s:g} s: {details}", code, request=request)
    if is_unreachable(error):
        problem = handshake_problem(details, security)
        said = f"the router at {address} {problem}" if problem else nobody_answers(address, details)
        return RouterError(said, code, reached=False)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RouterError(f"{address} is no router; give the router's address", code)
    return RouterError(details or code.name, code, retry_after_ms(metadata), request, reached)


def nobody_answers(where: str, details: str) -> str:
    return f"no router answers at {where}; start one with `onesweep up` ({details})"


def is_unreachable(error: grpc.RpcError | grpc.aio.AioRpcError) -> bool:
    """True where no router answered."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and STATUS_MARK not in trailing_metadata(error)


@dataclass
class Routers:
    """Addresses of a client's routers, and which of them the next request asks first."""

    addresses: tuple[str, ...]
    first: int = 0

    @property
    def silence_ms(self) -> int:
        """Time that a ping may go unanswered. Only one router deploys: to several, no message is large."""
        return LOST_AFTER_MS if len(self.addresses) > 1 else SILENCE_MS


class Turns:
    """One request, and the router whose turn it is. A router is asked again only once text came from another."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        self.routers, self.timeout_s, self.at = routers, timeout_s, routers.first
        self.pause_s = 0.0  # before the next turn
        self._deadline_s = time.monotonic() + timeout_s
        self._lost: dict[int, RouterError] = {}  # by router, since text came last

    @property
    def address(self) -> str:
        return self.routers.addresses[self.at]

    @property
    def left_s(self) -> float:
        """Time until the request's deadline, which all routers share."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    def lost(self, error: RequestRefused | RouterError) -> None:
        """Give the turn to another router.

        Raises `error` where another router would not help, and RouterError where none is left.
        """
        addresses, self.pause_s = self.routers.addresses, 0.0
        if isinstance(error, RequestRefused) or len(addresses) == 1:
            raise error from None
        wait_s = (error.retry_after_ms or 0) / 1000
        if self._lost and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and 0 < wait_s < self.left_s:
            self.pause_s = wait_s  # everybody moved here from a router that died: there will be room
            return
        cut_off = error.code is grpc.StatusCode.CANCELLED and not error.reached
        if not cut_off and error.code is not grpc.StatusCode.UNAVAILABLE:
            raise error from None
        self._lost[self.at] = error
        others = [i % len(addresses) for i in range(self.at + 1, self.at + len(addresses))]
        left = [i for i in others if i not in self._lost]
        if not left:
            raise next((each for each in self._lost.values() if each.reached), self._nobody(error)) from None
        if self.routers.first == self.at:
            self.routers.first = left[0]
        self.at = left[0]

    def _nobody(self, last: RouterError) -> RouterError:
        said = "; ".join(f"{self.routers.addresses[i]}: {error}" for i, error in self._lost.items())
        return RouterError(nobody_answers(" or ".join(self.routers.addresses), said), last.code, reached=False)


class RoutedAnswer(Turns):
    """The responses to one request for text, as clients hand them out, whichever routers they come from."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        super().__init__(routers, timeout_s)
        self._output = b""
        # Numbers of bytes, tokens and trips: handed out, and those among them that this router has not repeated yet.
        self._out, self._old = Counter[str](), Counter[str]()

    def lost(self, error: RequestRefused | RouterError) -> None:
        super().lost(error)
        self._old = self._out.copy()

    def read(self, response: router_pb2.GenerateResponse) -> Iterator[bytes | Logprobs | router_pb2.Trip | Result]:
        """New parts: log-probabilities before the text that they are of, a sweep, or the result, which is last.

        Raises RouterError where this router's text is not the one that was begun.
        """
        if told := list(response.logprobs)[self._repeated("tokens", len(response.logprobs)) :]:
            yield told
        match response.WhichOneof("kind"):
            case "summary" if self._old["bytes"]:
                raise self._differs()
            case "summary":
                yield result_of(response.summary, self._output)
            case "trip":
                if not self._repeated("trips", 1):
                    yield response.trip
            case _:
                at = self._out["bytes"] - self._old["bytes"]
                old = self._repeated("bytes", len(response.text))
                if response.text[:old] != self._output[at : at + old]:
                    raise self._differs()
                if new := response.text[old:]:
                    self._output += new
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
            f"the router at {self.address} does not write the text that another began: they serve different weights, "
            "or mode auto chose by their own latencies; ask again"
        )
        return RouterError(said, grpc.StatusCode.ABORTED)
