"""The routers of a client: their addresses and errors, and the answer to a request that loses one of them.

The other router is asked for the same request, with the same seed, so it writes the same text from the beginning. What
was handed out already is compared and left out. To have it continue a given text would save that time and lose the
promise: tokens, penalties, schemas, stop strings and the borders of chunks depend on where a text began.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import grpc.aio

from onesweep.serving.client.result import Logprobs, Result, result_of
from onesweep.serving.v1 import router_pb2
from onesweep.stages.errors import InputError, ServiceError, printable
from onesweep.stages.wire.channel import parse_address
from onesweep.stages.wire.status import REQUEST_KEY, STATUS_MARK, call_metadata, retry_after_ms, trailing_metadata
from onesweep.stages.wire.tls import Security, handshake_problem

MOST_ROUTERS = 8
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


class Turns:
    """One request, and the router whose turn it is. A router is asked again only once text came from another."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        self.routers, self.at = routers, routers.first
        self._deadline_s = time.monotonic() + timeout_s
        self._lost: dict[int, RouterError] = {}  # by router, since text came last

    @property
    def left_s(self) -> float:
        """Time until the request's deadline, which all routers share."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    def lost(self, error: RouterError) -> float:
        """Give the turn to another router; return the seconds to wait before it is asked.

        Raises `error` where another router would not help, and RouterError where none is left.
        """
        addresses, pause_s = self.routers.addresses, (error.retry_after_ms or 0) / 1000
        if self._lost and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and 0 < pause_s < self.left_s:
            return pause_s  # everybody moved here from a router that died: there will be room
        cut_off = error.code is grpc.StatusCode.CANCELLED and not error.reached
        if len(addresses) == 1 or not (cut_off or error.code is grpc.StatusCode.UNAVAILABLE):
            raise error
        self._lost[self.at] = error
        others = [i % len(addresses) for i in range(self.at + 1, self.at + len(addresses))]
        left = [i for i in others if i not in self._lost]
        if not left:
            raise next((each for each in self._lost.values() if each.reached), self._nobody(error))
        if self.routers.first == self.at:
            self.routers.first = left[0]
        self.at = left[0]
        return 0.0

    def _nobody(self, last: RouterError) -> RouterError:
        said = "; ".join(f"{self.routers.addresses[i]}: {error}" for i, error in self._lost.items())
        return RouterError(nobody_answers(" or ".join(self.routers.addresses), said), last.code, reached=False)


@dataclass
class _Read:
    """Length of an answer so far: as read from one router, or as handed out."""

    text_bytes: int = 0
    tokens: int = 0  # with log-probabilities
    trips: int = 0


class RoutedAnswer(Turns):
    """The responses to one request for text, as clients hand them out, whichever routers they come from."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        super().__init__(routers, timeout_s)
        self._output, self._done, self._here = b"", _Read(), _Read()

    def lost(self, error: RouterError) -> float:
        pause_s = super().lost(error)
        self._here = _Read()
        return pause_s

    def read(self, response: router_pb2.GenerateResponse) -> Iterator[bytes | Logprobs | router_pb2.Trip | Result]:
        """New parts: log-probabilities before the text that they are of, a sweep, or the result, which is last.

        Raises RouterError where this router's text is not the one that was begun.
        """
        here, done = self._here, self._done
        if response.logprobs:
            here.tokens += len(response.logprobs)
            if (new := here.tokens - done.tokens) > 0:
                done.tokens = here.tokens
                yield list(response.logprobs)[-new:]
        match response.WhichOneof("kind"):
            case "summary":
                if here.text_bytes < done.text_bytes:
                    raise self._differs()
                yield result_of(response.summary, self._output)
            case "trip":
                here.trips += 1
                if here.trips > done.trips:
                    done.trips = here.trips
                    yield response.trip
            case _:
                old = self._output[here.text_bytes : here.text_bytes + len(response.text)]
                if not response.text.startswith(old):
                    raise self._differs()
                here.text_bytes += len(response.text)
                if new_text := response.text[len(old) :]:
                    self._output += new_text
                    done.text_bytes = here.text_bytes
                    self._lost.clear()
                    yield new_text

    def _differs(self) -> RouterError:
        said = (
            f"the router at {self.routers.addresses[self.at]} does not write the text that another began: they serve "
            "different weights, or mode auto chose by their own latencies; ask again"
        )
        return RouterError(said, grpc.StatusCode.ABORTED)
