"""The exceptions of clients, and the gRPC statuses that they stand for."""

from __future__ import annotations

import grpc
import grpc.aio

from stages.errors import InputError, ServiceError
from stages.wire.status import REQUEST_KEY, STATUS_MARK, call_metadata, retry_after_ms, trailing_metadata
from stages.wire.tls import Security, handshake_problem

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
    code, details = error.code(), error.details() or ""
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
