"""Channels and servers: addresses, gRPC options and security, decided in one place."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import signal

import grpc
import grpc.aio

from stages.errors import InputError, ServiceError

DEFAULT_MESSAGE_BYTES = 4 << 20
MAX_NAME = 64

# gRPC's own keepalive finds dead peers; it does not keep the congestion window open, Warm messages do (relay.py).
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
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


def open_channel(address: str, message_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to another machine. Nothing connects before the first call."""
    parse_address(address)
    return grpc.aio.insecure_channel(address, options=_message_options(message_bytes))


def open_blocking_channel(address: str, message_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.Channel:
    """Like `open_channel`, for code without an event loop."""
    parse_address(address)
    return grpc.insecure_channel(address, options=_message_options(message_bytes))


def new_server(message_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.aio.Server:
    """A server that accepts messages up to `message_bytes`; larger ones get RESOURCE_EXHAUSTED unread."""
    # without SO_REUSEPORT a second server on the same port is refused instead of sharing it silently
    return grpc.aio.server(options=[*_message_options(message_bytes), ("grpc.so_reuseport", 0)])


def bind(server: grpc.aio.Server, address: str, insecure: bool = False) -> int:
    """Listen on `address`; return the port.

    Raises InputError when the address is not loopback and `insecure` was not said, ServiceError when it is in use.
    """
    host, port = parse_address(address, "listen address")
    if not is_loopback(address) and not insecure:
        raise InputError(
            f"{address} can be reached from other machines and traffic is not encrypted: "
            "listen on a loopback or tunnel address, or accept it with --insecure"
        )
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ServiceError(f"cannot listen on {host}:{port}: the port is in use, or the address is not of this machine")
    return bound


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call it on the main thread's event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _message_options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        *_OPTIONS,
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]
