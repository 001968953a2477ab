"""What clients raise, and which gRPC status stands for which."""

from __future__ import annotations

import grpc
import grpc.aio

from stages.errors import InputError, ServiceError
from stages.handshake import handshake_problem
from stages.refusal import MARK, RETRY_AFTER, trailing
from stages.security import Security

_USER_MISTAKES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class RequestRefused(InputError):
    """The router found the token, or a field of the request, wrong; `code` is the gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class RouterError(ServiceError):
    """The router, or a host behind it, failed or did not answer; `code` is the gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after_ms = code, retry_after_ms


def error_of(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, timeout_s: float, security: Security
) -> Exception:
    """The exception for people that a status stands for."""
    code, details = error.code(), error.details() or ""
    if code in _USER_MISTAKES:
        return RequestRefused(details, code)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RouterError(f"no answer within {timeout_s:g} s: {details}", code)
    if is_unreachable(error):
        problem = handshake_problem(details, security)
        missing = f"no router answers at {address}; start one with `onesweep up` ({details})"
        return RouterError(f"the router at {address} {problem}" if problem else missing, code)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RouterError(f"{address} is no router; give the router's address", code)
    retry = trailing(error).get(RETRY_AFTER)
    return RouterError(details or code.name, code, None if retry is None else int(retry))


def is_unreachable(error: grpc.RpcError | grpc.aio.AioRpcError) -> bool:
    """Whether no router was there to say anything."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and MARK not in trailing(error)
