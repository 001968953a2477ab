"""gRPC channels and servers: one place decides addresses, options, security and health."""

import asyncio
import ipaddress
import logging
import os
import re
import resource
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.errors import InputError, ServiceError
from stages.wire.places import Places
from stages.wire.secret_files import state_directory
from stages.wire.status import (
    DEFAULT_RETRY_MS,
    Context,
    DecodeErrors,
    Interceptor,
    Metadata,
    StatusError,
    exhausted,
    ignoring_ended_call,
    invalid,
    kind_of,
    not_found,
    with_decode_errors,
)
from stages.wire.tls import LOOPBACK_ONLY, Security, ServerCertificate, channel_credentials

log = logging.getLogger(__name__)

DEFAULT_MESSAGE_BYTES = 4 << 20
SMALL_BYTES = 64 << 10  # limit of a request without text
MAX_STREAMS = 256  # calls under way on one connection; its client queues any more
MAX_ARRIVING = 16  # incomplete requests of unknown callers: gRPC buffers what has arrived of each
ARRIVAL_S = 15.0  # for a request to arrive completely
UNREAD_S = 60.0  # for a client to make room for a message by reading earlier ones
MAX_CONNECTIONS = 4096  # fewer if the process may open fewer files: it needs half of them itself
HANDSHAKE_MS = 10_000  # for a connection's handshake, and for its ack of our settings; gRPC allows 2 minutes and 1
# For a client to answer a ping of the server, which may be queued behind a large message; gRPC allows a minute,
# whatever its keepalive setting. A silent client holds a place for this time plus the time between two pings.
PING_MS = 15_000
MAX_NAME = 64
DRAIN_S = 25.0  # time for running requests to end after SIGTERM (drain_s)
KEEP_ALIVE_S = 75  # for the next request on an HTTP connection: longer than clients keep one
KEEP_WARM_S = 0.15  # between messages on an idle link (keep_warm_s)

# An attempt to connect takes up to four round trips with TLS: with 100 ms, far clients would never reach a router.
CONNECT_MS = 5_000
Options = Sequence[tuple[str, int | str]]
# Joined machines are dialled as NAME.onesweep, over the proxy of stages/wire/links.py that this variable names.
LINK_DOMAIN, LINKS_VARIABLE = "onesweep", "ONESWEEP_LINKS"
# For joined machines. A gateway that dropped a connection says nothing; this long a silence counts as a loss.
SILENT_MS = 2000
KEEPALIVE = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", SILENT_MS))
_PLACES = WeakKeyDictionary[grpc.aio.Server, Places]()

# gRPC's keepalive finds dead peers. Warm messages keep the congestion window open (hop_stream.py); keepalive does not.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # gRPC uses it as the time-out of an attempt
    ("grpc.enable_http_proxy", 0),  # hosts are dialled directly, even if the shell sets a proxy for the web
]


def parse_address(text: str, what: str = "address") -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPv6]:PORT". Raises InputError."""
    match = re.fullmatch(r"(?a)(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise InputError(f"{what} {text!r} must be HOST:PORT, with a port from 0 to 65535{_suggestion(text)}")
    return match[1].strip("[]"), int(match[2])


def _suggestion(text: str) -> str:
    """The likely intended address for a URL, or for IPv6 without brackets, as the end of a sentence."""
    bare = re.sub(r"^[a-z]+://|/.*$", "", text)
    if bare != text:
        return f": write {bare}" if ":" in bare else f": write {bare}:PORT"
    host, _, port = text.rpartition(":")
    return f": write [{host}]:{port}" if ":" in host else ""


def check_name(name: str, what: str = "name") -> str:
    """Return a name if it is safe in messages, file names and terminals. Raises InputError."""
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", name):
        raise InputError(
            f"{what} {name!r} must be 1 to {MAX_NAME} letters, digits, dots, dashes or underscores, "
            "and begin with a letter or digit"
        )
    return name


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """True if only this machine can reach `address` (HOST:PORT)."""
    host, _ = parse_address(address)
    ip = ip_of(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def check_target(address: str, security: Security, what: str = "address") -> None:
    """Raise InputError for a plain-text connection to another machine, unless allowed."""
    parse_address(address, what)
    if security.tls is None and not security.insecure and not is_loopback(address):
        raise InputError(
            f"{what} {address} is on another machine and traffic would not be encrypted: "
            "give --tls-ca, or accept it with --insecure"
        )


# Makes plain-text channels: a simulation puts an in-memory network here.
connect: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel


def open_channel(
    address: str,
    message_bytes: int = DEFAULT_MESSAGE_BYTES,
    security: Security = LOOPBACK_ONLY,
    options: Options = (),
    metadata: Metadata = (),
) -> grpc.aio.Channel:
    """A channel that connects on its first call. Raises InputError. :param options: additional gRPC options.
    :param metadata: for calls that bring none of their own."""
    check_target(address, security)
    options = _message_options(message_bytes, (*options, *_link_options(address)))
    if security.tls is None:
        return with_decode_errors(connect(address, options=options), metadata)
    secured = grpc.aio.secure_channel(address, channel_credentials(security.tls), options=options)
    return with_decode_errors(secured, metadata)


def open_blocking_channel(address: str, security: Security = LOOPBACK_ONLY, options: Options = ()) -> grpc.Channel:
    """Like `open_channel`, for code without an event loop."""
    check_target(address, security)
    options = _message_options(DEFAULT_MESSAGE_BYTES, options)
    if security.tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(security.tls), options=options)


class CallBounds(Interceptor):
    """Bounds what callers can make a server buffer: incomplete requests, and answers that they do not read.

    gRPC has a single message size limit for all methods, and buffers the arrived part of every awaited message.
    """

    def __init__(
        self, caller: Callable[[str, Any], str] = lambda *_: "", most: int = MAX_ARRIVING, large: Sequence[str] = ()
    ) -> None:
        """:param caller: gives the caller's name for a method (its path) and metadata; empty if unknown.
        :param most: requests of one known caller that may be arriving at once.
        :param large: methods whose requests may be above SMALL_BYTES."""
        self._caller, self._most, self._large = caller, most, large
        self._arriving = defaultdict[str, dict[asyncio.Timeout, None]](dict)  # by caller, oldest first

    def answered_by(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        path: Any = call.method
        _, inner = kind_of(handler)
        who = self._caller(path, call.invocation_metadata)
        max_bytes = DEFAULT_MESSAGE_BYTES if handler.request_streaming or path in self._large else SMALL_BYTES

        async def answer(requests: AsyncIterator[Any], context: Context) -> None:
            if handler.request_streaming:  # a known caller's stream may pause
                given: Any = requests if who else self._each(requests, max_bytes)
            elif (given := await self._next(requests, who, max_bytes)) is None:
                raise invalid("the call ended without a request")
            responses = inner(given, context)
            if not hasattr(responses, "__aiter__"):
                if (response := await responses) is not None:
                    await _write(context, response)
                return
            async with aclosing(responses):
                async for response in responses:
                    await _write(context, response)

        # handled as a stream, a request is read only when we ask for it
        return grpc.stream_stream_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)

    async def _each(self, requests: AsyncIterator[Any], max_bytes: int) -> AsyncIterator[Any]:
        while (request := await self._next(requests, "", max_bytes)) is not None:
            yield request

    async def _next(self, requests: AsyncIterator[Any], who: str, max_bytes: int) -> Any:  # noqa: ANN401 - a message
        """The next request; None after the last. Raises StatusError."""
        arriving = self._arriving[who]
        try:
            async with asyncio.timeout(ARRIVAL_S) as limit:
                arriving[limit] = None
                if len(arriving) > (self._most if who else MAX_ARRIVING):
                    oldest = next(iter(arriving))  # not this one: a request that arrives at once always gets through
                    del arriving[oldest]
                    if not oldest.expired():  # its own timeout may fire in this very turn of the loop
                        oldest.reschedule(0)
                request = await anext(requests, None)
        except TimeoutError:
            raise exhausted(
                f"the request did not arrive within {ARRIVAL_S:g} s, or too many others came after it", 1000
            ) from None
        finally:
            arriving.pop(limit, None)
            if not self._arriving.get(who):  # callers' names come and go
                self._arriving.pop(who, None)
        if request is not None and request.ByteSize() > max_bytes:
            raise exhausted(f"the request has {request.ByteSize()} bytes; this method's limit is {max_bytes}", 60_000)
        return request


async def _write(context: Context, response: object) -> None:
    """Write a response. Raises StatusError if the client does not read."""
    try:
        async with asyncio.timeout(UNREAD_S):
            with ignoring_ended_call():
                await context.write(response)
    except TimeoutError:
        message = f"the answer was not read for {UNREAD_S:g} s: read it as it arrives"
        raise StatusError(grpc.StatusCode.CANCELLED, message) from None


def new_server(
    message_bytes: int = DEFAULT_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    streams: int = MAX_STREAMS,
    options: Options = (),
) -> grpc.aio.Server:
    """A server that accepts messages up to `message_bytes`; larger ones get RESOURCE_EXHAUSTED unread.

    :param streams: most calls under way on one connection. :param options: additional gRPC options.
    """
    options = [*_message_options(message_bytes, options), ("grpc.max_concurrent_streams", streams)]
    # without SO_REUSEPORT, a second server on the same port fails instead of silently sharing it
    options += [("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS)]
    options += [("grpc.http2.settings_timeout", HANDSHAKE_MS), ("grpc.http2.ping_timeout_ms", PING_MS)]
    # connections beyond this are closed at once; existing ones stay, unless `Places` closes them first
    connections = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    options += [("grpc.max_allowed_incoming_connections", connections)]
    # gRPC could end a connection that pings too often, but 1.85 adds an error to a growing list for each ping that it
    # has read by then: a flood kept two cores copying. Without that limit it answers each ping as it reads it.
    options += [("grpc.http2.max_ping_strikes", 0)]
    places = Places(connections)
    server = grpc.aio.server(interceptors=[DecodeErrors(), *interceptors, places], options=options)
    _PLACES[server] = places
    return server


def check_listen(address: str, security: Security) -> tuple[str, int]:
    """Host and port of an address to listen on. Raises InputError for plain text that others can reach."""
    where = parse_address(address, "listen address")
    if security.tls is None and not security.insecure and not is_loopback(address):
        raise InputError(
            f"{address} can be reached from other machines and traffic is not encrypted: "
            "give --tls-cert, listen on a loopback or tunnel address, or accept it with --insecure"
        )
    return where


def bind(server: grpc.aio.Server, address: str, security: Security = LOOPBACK_ONLY, mutual: bool = False) -> int:
    """Listen on `address`; return the port.

    :param mutual: callers must show a certificate, too; only with TLS.

    Raises InputError for plain text on an address that others can reach, unless `insecure`; ServiceError if the address
    is in use.
    """
    host, port = check_listen(address, security)
    state_directory()  # checked before the server lives, as its links look for tokens there
    try:
        if security.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, ServerCertificate(security.tls, mutual).credentials())
    except RuntimeError:
        bound = 0
    if not bound:
        raise ServiceError(f"cannot listen on {host}:{port}: the port is in use, or the address is not this machine's")
    if security.tls is None and not is_loopback(address):
        log.warning("%s can be reached from other machines, and its traffic is not encrypted", address)
    _PLACES[server].watch(server, bound)
    return bound


def use_link_proxy(url: str) -> None:
    """Dial joined machines over this proxy, in this process and in its children."""
    os.environ[LINKS_VARIABLE] = url
    os.environ["no_grpc_proxy"] = ""  # noqa: SIM112 - else gRPC would obey no_proxy, which may end as our names do


def _link_options(address: str) -> Options:
    proxy = os.environ.get(LINKS_VARIABLE, "")
    if not proxy or not parse_address(address)[0].endswith(f".{LINK_DOMAIN}"):
        return ()
    return (("grpc.enable_http_proxy", 1), ("grpc.http_proxy", proxy))


def _message_options(message_bytes: int, options: Options = ()) -> list[tuple[str, int | str]]:
    """:param options: replace those of the same name, as gRPC uses the first of two equal names."""
    usual = {
        **dict(_OPTIONS),
        "grpc.max_receive_message_length": message_bytes,
        "grpc.max_send_message_length": message_bytes,
    }
    return [*(usual | dict(options)).items()]


# The health service is our own: the library's writes with its lock held, so a single client that reads nothing would
# block every change of status, and the end of the process.
Status = health_pb2.HealthCheckResponse

MAX_WATCHERS = 64
WRITE_S = 10.0  # a client that has not read the last status by then is disconnected


class HealthChecks(health_pb2_grpc.HealthServicer):
    """The status of each service by its name; the empty name stands for the process. Lives on the event loop."""

    def __init__(self) -> None:
        self._status = {"": Status.SERVING}
        self._watchers = set[asyncio.Event]()
        self._is_stopping = False

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Change a status, unless the process is stopping."""
        if not self._is_stopping:
            self._status[service] = status
            self._tell()

    def stop(self) -> None:
        """Report NOT_SERVING for everything from now on."""
        self._is_stopping = True
        self._status = dict.fromkeys(self._status, Status.NOT_SERVING)
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if (status := self._status.get(request.service)) is None:
            raise not_found(f"unknown service {request.service[:80]!r}")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if len(self._watchers) >= MAX_WATCHERS:
            raise exhausted(f"{MAX_WATCHERS} clients are already watching: use Check", DEFAULT_RETRY_MS)
        changed, last = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                status = self._status.get(request.service, Status.SERVICE_UNKNOWN)
                if status != last:
                    async with asyncio.timeout(WRITE_S):
                        await context.write(Status(status=status))
                    last = status
                await changed.wait()
                changed.clear()
        except TimeoutError:
            raise StatusError(grpc.StatusCode.CANCELLED, f"the last status was not read within {WRITE_S:g} s") from None
        finally:
            self._watchers.discard(changed)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()


async def serve_health(checks: HealthChecks, address: str | None) -> grpc.aio.Server:
    """Answer health checks in plain text on a separate port; without an address do nothing.

    Raises InputError or ServiceError if it cannot listen there.
    """
    server = new_server(interceptors=[CallBounds()])
    if address is not None:
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        # a separate port: Kubernetes' gRPC probes do not support TLS, and readiness is no secret
        bind(server, address, Security(insecure=True))
        await server.start()
    return server
