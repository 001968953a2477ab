"""Channels and servers: addresses, gRPC options and security, decided in one place."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import signal
from collections.abc import Sequence

import grpc
import grpc.aio

from stages.errors import InputError, ServiceError
from stages.security import LOOPBACK_ONLY, Security, ServerCertificate, channel_credentials
from stages.unreadable import Screen, reading

log = logging.getLogger(__name__)

DEFAULT_MESSAGE_BYTES = 4 << 20
MAX_NAME = 64
DRAIN_S = 25.0
"""How long a server that was told to stop goes on with what runs, unless told otherwise (--drain-s)."""

CONNECT_MS = 100
"""How long a try to connect may take; later ones may take as long as the pause before the next, which grows to 2 s."""

# gRPC's own keepalive finds dead peers; it does not keep the congestion window open, Warm messages do (relay.py).
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # hosts are dialled directly, whatever proxy the shell has for the web
]


def parse_address(text: str, what: str = "address") -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPv6]:PORT". Raises InputError."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise InputError(f"{what} {text!r} must be HOST:PORT, with a port from 0 to 65535")
    return match[1].strip("[]"), int(match[2])


def check_name(name: str, what: str = "name") -> str:
    """`name`, if it can name a host or router in messages, file names and terminals. Raises InputError."""
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", name):
        raise InputError(
            f"{what} {name!r} must be 1 to {MAX_NAME} letters, digits, dots, dashes or underscores, "
            "and begin with a letter or digit"
        )
    return name


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address` (HOST:PORT)."""
    host, _ = parse_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_target(address: str, security: Security, what: str = "address") -> None:
    """Raise InputError unless `address` may be dialled: plain text does not leave the machine unasked."""
    parse_address(address, what)
    if security.tls is None and not security.insecure and not is_loopback(address):
        raise InputError(
            f"{what} {address} is on another machine and traffic would not be encrypted: "
            "give --tls-ca, or accept it with --insecure"
        )


def open_channel(
    address: str, message_bytes: int = DEFAULT_MESSAGE_BYTES, security: Security = LOOPBACK_ONLY
) -> grpc.aio.Channel:
    """A channel to another machine. Nothing connects before the first call. Raises InputError."""
    check_target(address, security)
    options = _message_options(message_bytes)
    if security.tls is None:
        return reading(grpc.aio.insecure_channel(address, options=options))
    return reading(grpc.aio.secure_channel(address, channel_credentials(security.tls), options=options))


def open_blocking_channel(
    address: str,
    message_bytes: int = DEFAULT_MESSAGE_BYTES,
    security: Security = LOOPBACK_ONLY,
    connect_ms: int = CONNECT_MS,
) -> grpc.Channel:
    """Like `open_channel`, for code without an event loop.

    :param connect_ms: more where nobody else can be asked: far away, two round trips (with TLS three) take longer.
    """
    check_target(address, security)
    options = _message_options(message_bytes, connect_ms)
    if security.tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(security.tls), options=options)


def new_server(
    message_bytes: int = DEFAULT_MESSAGE_BYTES, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server that accepts messages up to `message_bytes`; larger ones get RESOURCE_EXHAUSTED unread."""
    # without SO_REUSEPORT a second server on the same port is refused instead of sharing it silently
    options = [*_message_options(message_bytes), ("grpc.so_reuseport", 0)]
    return grpc.aio.server(interceptors=[Screen(), *interceptors], options=options)


def bind(server: grpc.aio.Server, address: str, security: Security = LOOPBACK_ONLY, mutual: bool = False) -> int:
    """Listen on `address`; return the port.

    :param mutual: whether callers must show a certificate, too; only with TLS.

    Raises InputError when the address is not loopback and there is neither TLS nor `insecure`, ServiceError when it is
    in use.
    """
    host, port = parse_address(address, "listen address")
    if security.tls is None and not security.insecure and not is_loopback(address):
        raise InputError(
            f"{address} can be reached from other machines and traffic is not encrypted: "
            "give --tls-cert, listen on a loopback or tunnel address, or accept it with --insecure"
        )
    try:
        if security.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, ServerCertificate(security.tls, mutual).credentials())
    except RuntimeError:
        bound = 0
    if bound and security.tls is None and not is_loopback(address):
        log.warning("%s can be reached from other machines, and what passes there is not encrypted", address)
    if not bound:
        raise ServiceError(f"cannot listen on {host}:{port}: the port is in use, or the address is not of this machine")
    return bound


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second one ends the process at once.

    Call it on the main thread's event loop.
    """
    stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def begin_to_stop() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, begin_to_stop)
    return stop


def _message_options(message_bytes: int, connect_ms: int = CONNECT_MS) -> list[tuple[str, int]]:
    return [
        *_OPTIONS,
        ("grpc.min_reconnect_backoff_ms", connect_ms),  # which is what gRPC makes of it
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]
