"""Channels and servers: addresses, gRPC options and security, decided in one place."""

from __future__ import annotations

import ipaddress

import grpc
import grpc.aio

from stages.errors import InputError, ServiceError

DEFAULT_MESSAGE_BYTES = 4 << 20

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
]


def parse_address(text: str, what: str = "address") -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPv6]:PORT". Raises InputError."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise InputError(f"{what} {text!r} must be HOST:PORT, with a port from 0 to 65535")
    return host.strip("[]"), int(port)


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


def _message_options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        *_OPTIONS,
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]
