"""Links between machines of a run that need no open port.

Stage servers are dialled as NAME.onesweep. gRPC asks a proxy on loopback for the connection, and the proxy takes the
first of these ways to the machine that works:

direct     a socket to an address that the machine announced, where a TLS handshake shows its name;
reversed   a pipe that the machine opens to this one's stage server, if this one can be dialled;
relayed    a pipe over the rendezvous, which every machine dials: one more trip.

The two stage servers speak TLS end to end, whatever carries it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio

from stages.clock import monotonic
from stages.errors import InputError, quoted
from stages.threads import cancelled
from stages.v1 import join_pb2, join_pb2_grpc
from stages.wire.channel import KEEPALIVE, LINK_DOMAIN, SILENT_MS, open_channel, parse_address, use_link_proxy
from stages.wire.pipes import PIECE_BYTES, PIPE_KEY, AwaitedPipes, CalledPipe, Pipe, SocketPipe, splice
from stages.wire.status import Metadata, StatusError, unavailable
from stages.wire.tls import Security, Tls
from stages.wire.tokens import token_metadata

log = logging.getLogger(__name__)

LINK_PORT = 7701
ROUTER_NAME = "router"
TO_KEY = "onesweep-to"  # metadata of Carry: the target of a new pipe; PIPE_KEY identifies the pipe
KINDS = DIRECT, REVERSED, RELAYED = "direct", "reversed", "relayed"
MAX_ANNOUNCED = 16  # addresses of one machine that are announced
PROXY_S, MAX_UNKNOWN = 5.0, 64  # for a connection to the proxy to state its request; most such connections
# Time to try each way. Together less than gRPC allows an attempt to connect (CONNECT_MS in channel.py).
PROBE_S, REVERSE_S, NOTICE_S = 1.0, 2.0, 4.0
BETWEEN_S = 3.0  # time for a machine to listen again, before a way other than a direct one is tried
CHOSEN_S = 300.0  # how long a way is reused before looking for a better one
RETRY_S, MAX_RETRY_S = 0.2, 2.0

Dial = Callable[[str, SocketPipe], Awaitable[None]]
Addresses = Callable[[], Sequence[str]]


def link_name(machine: str) -> str:
    """The name in the machine's certificate, which other stage servers dial."""
    return f"{machine}.{LINK_DOMAIN}"


def link_address(machine: str) -> str:
    return f"{link_name(machine)}:{LINK_PORT}"


def check_machine(name: str) -> str:
    """The name of a machine: one label of a domain name. Raises InputError."""
    if not re.fullmatch("[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
        raise InputError(f"a machine's name must be 1 to 32 lower-case letters, digits and dashes, not {quoted(name)}")
    return name


class LinkProxy:
    """The proxy on loopback that gRPC asks for connections to NAME.onesweep."""

    def __init__(self, dial: Dial) -> None:
        """:param dial: carries the bytes of a connection to a machine, until it ends. Raises StatusError if it
        cannot."""
        self._dial = dial
        self._password = secrets.token_hex(16)  # keeps other users of this machine out
        self._unknown = 0  # connections that have not shown the password yet
        self._logged = dict[str, str]()  # why no way to a machine worked, as last logged

    async def open(self) -> asyncio.Server:
        """Listen, and make the channels of this process and its children use this proxy."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE_BYTES)
        port = server.sockets[0].getsockname()[1]
        use_link_proxy(f"http://onesweep:{self._password}@127.0.0.1:{port}")
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = await self._read_target(reader)
            if not name:
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            await self._dial(name, local := _Answered(reader, writer))
            self._logged.pop(name, None)
        except StatusError as refusal:
            if self._logged.get(name) != refusal.message:  # gRPC retries again and again
                log.info("no route to %s: %s", name, refusal.message)
            self._logged[name] = refusal.message
            if not local.is_answered:
                is_gone = refusal.code is grpc.StatusCode.NOT_FOUND
                writer.write(b"HTTP/1.1 410 Gone\r\n\r\n" if is_gone else b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, grpc.RpcError, asyncio.CancelledError):
            pass  # cancelled when this process ends: asyncio would log it as an error
        finally:
            writer.close()

    async def _read_target(self, reader: asyncio.StreamReader) -> str:
        """As `_target_of`; empty also for connections that are too slow, or too many."""
        if self._unknown >= MAX_UNKNOWN:
            return ""
        self._unknown += 1
        try:
            async with asyncio.timeout(PROXY_S):
                return self._target_of(await reader.readuntil(b"\r\n\r\n"))
        except TimeoutError:
            return ""
        finally:
            self._unknown -= 1

    def _target_of(self, head: bytes) -> str:
        """The machine that a request asks for; empty for a stranger's request."""
        line, *fields = head.decode("latin-1").split("\r\n")
        connect = re.fullmatch(rf"CONNECT ([a-z0-9-]{{1,32}})\.{LINK_DOMAIN}:[0-9]{{1,5}} HTTP/1\.[01]", line)
        credentials = base64.b64encode(f"onesweep:{self._password}".encode()).decode()
        shown = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        is_ours = secrets.compare_digest(shown.get("proxy-authorization", "").encode(), f"Basic {credentials}".encode())
        return connect[1] if connect and is_ours else ""


class _Answered(SocketPipe):
    """A connection to the proxy. It sends word that the way is open before reading the first bytes."""

    is_answered = False

    async def read(self) -> bytes:
        if not self.is_answered:
            self.is_answered = True
            self.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        return await super().read()


class MachineLinks:
    """A joined machine's links to others, and theirs to it. Lives on one event loop."""

    def __init__(
        self, name: str, tls: Tls, rendezvous: Sequence[str], secret: str, own: tuple[str, int], addresses: Addresses
    ) -> None:
        """:param rendezvous: addresses of the rendezvous.
        :param own: host and port of this machine's own stage server.
        :param addresses: current addresses at which others may be able to dial that server.

        Raises InputError for certificate files that fail a handshake.
        """
        self.name, self.tls, self.own, self._addresses = name, tls, own, addresses
        self.announced: tuple[str, ...] = ()
        self.awaited = AwaitedPipes()  # type: ignore[abstract]
        self.attends = False
        tls.read()
        self._rendezvous, self._shown = tuple(rendezvous), token_metadata(secret)
        self._channels = list[grpc.aio.Channel]()  # to each address of the rendezvous
        self._stub: join_pb2_grpc.JoinServiceAsyncStub | None = None
        self._ways = dict[str, tuple[str, str, float]]()  # kind, address and time of the last choice
        self._kinds = dict[str, str]()  # kinds of links last shown to people
        self._lost_at = dict[str, float]()  # when a directly dialled machine stopped answering
        self._tasks = set[asyncio.Task[None]]()

    async def attend(self) -> None:
        """Open the pipes that the rendezvous asks for. Has no end; if the rendezvous is lost, tries each of its
        addresses again. Raises StatusError if it refuses this machine."""
        pause_s, at, name, tls = RETRY_S, 0, link_name(ROUTER_NAME), Tls(self.tls.authority)
        self._channels = [_channel(address, name, tls, self._shown) for address in self._rendezvous]
        while not await self._listens():  # others dial this machine as soon as they learn of it
            await asyncio.sleep(RETRY_S)
        while True:
            address = self._rendezvous[number := at % len(self._rendezvous)]
            stub: join_pb2_grpc.JoinServiceAsyncStub = join_pb2_grpc.JoinServiceStub(self._channels[number])
            self.announced = tuple(self._addresses())[:MAX_ANNOUNCED]  # a laptop may have moved by now
            try:
                async for notice in stub.Attend(join_pb2.AttendRequest(addresses=self.announced)):
                    if not self.attends:
                        self._kinds.clear()  # it may be a new process
                        log.info("%s: connected to the rendezvous at %s", self.name, address)
                    self._stub, self.attends, pause_s = stub, True, RETRY_S
                    if notice.pipe:
                        self._begin(self._answer(stub, notice))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise StatusError(error.code(), error.details() or "") from None
                if self.attends:
                    log.warning("%s: lost the rendezvous at %s (%s)", self.name, address, error.details())
                elif at == len(self._rendezvous) - 1:  # all addresses have been tried
                    said = "no rendezvous answers at %s (%s); retrying: check that `onesweep serve` is running"
                    log.warning(said, ", ".join(self._rendezvous), error.details())
            at += not self.attends  # an address that worked is tried again
            self.attends = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def dial(self, name: str, local: SocketPipe) -> None:
        """Carry a connection to a machine, by the first way that works. Raises StatusError."""
        if (stub := self._stub) is None:
            raise unavailable("the rendezvous has not been reached yet")
        last, address, chosen_at = self._ways.pop(name, ("", "", 0.0))
        kind = last if monotonic() - chosen_at <= CHOSEN_S else ""
        try:
            if kind in ("", DIRECT):
                tried = [address] if kind else []
                found = await self._direct(tried, name)
                if found is None:
                    there = await stub.Reach(join_pb2.ReachRequest(to=name), timeout=NOTICE_S)
                    found = await self._direct([each for each in there.addresses if each not in tried], name)
                if found is not None:
                    self._choose(stub, name, DIRECT, found[1])
                    await splice(local, found[0])
                    found[0].writer.close()
                    return
                is_same = last == DIRECT and address in there.addresses
                if is_same and monotonic() - self._lost_at.setdefault(name, monotonic()) < BETWEEN_S:
                    self._ways[name] = last, address, chosen_at
                    raise unavailable(f"machine {name} no longer answers at its address")
            async with self._reversed(stub, name if kind != RELAYED else "") as other:
                if other is not None:
                    self._choose(stub, name, REVERSED)
                    await splice(local, other)
                    return
            self._choose(stub, name, RELAYED)
            call = stub.Carry(metadata=((TO_KEY, name), *self._shown))
            await call.read()  # an empty chunk: the other end is open
            await self._relay(stub, name, local, CalledPipe(call))
            call.cancel()
        except grpc.aio.AioRpcError as error:
            raise StatusError(error.code(), error.details() or error.code().name) from None

    async def leave(self) -> None:
        """Tell the rendezvous that this machine is leaving, so that others take over its stage."""
        if self._stub is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Attend(join_pb2.AttendRequest(leaving=True), timeout=NOTICE_S).read()

    async def _listens(self) -> bool:
        """True once this machine's stage server listens."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*self.own)
            writer.close()
            return True
        return False

    async def close(self) -> None:
        await cancelled(self._tasks)
        for channel in self._channels:
            await channel.close()

    async def _direct(self, addresses: Sequence[str], name: str) -> tuple[SocketPipe, str] | None:
        """A socket to a machine at one of `addresses`, and that address."""
        if (address := await self._answering(addresses, name)) is None:
            return None
        try:
            reader, writer = await asyncio.open_connection(*parse_address(address))
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            return SocketPipe(reader, writer), address
        except OSError:
            return None

    @contextlib.asynccontextmanager
    async def _reversed(self, stub: join_pb2_grpc.JoinServiceAsyncStub, name: str) -> AsyncIterator[Pipe | None]:
        """A pipe that the machine opens to this one; None if it does not. :param name: empty: ask no machine."""
        if not name or not self.announced:
            yield None
            return
        async with self.awaited.awaited() as (pipe, found):
            await stub.Reach(join_pb2.ReachRequest(to=name, pipe=pipe, addresses=self.announced), timeout=NOTICE_S)
            await asyncio.wait([found], timeout=REVERSE_S)
            yield found.result() if found.done() else None

    async def _relay(self, stub: join_pb2_grpc.JoinServiceAsyncStub, name: str, local: SocketPipe, other: Pipe) -> None:
        """Carry a connection over the rendezvous until it ends, or until a cheaper way appears. The connection is then
        made again over that way, and requests under way are replayed."""
        carrying = asyncio.create_task(splice(local, other))
        try:
            while not (await asyncio.wait([carrying], timeout=CHOSEN_S))[0]:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if await self._is_near(stub, name):
                        self._ways.pop(name, None)
                        return
        finally:
            await cancelled([carrying])

    async def _is_near(self, stub: join_pb2_grpc.JoinServiceAsyncStub, name: str) -> bool:
        """True if a machine can be reached without the rendezvous now."""
        there = await stub.Reach(join_pb2.ReachRequest(to=name), timeout=NOTICE_S)
        if await self._answering(there.addresses, name):
            return True
        async with self._reversed(stub, name) as other:
            return other is not None

    async def _answer(self, stub: join_pb2_grpc.JoinServiceAsyncStub, notice: join_pb2.Notice) -> None:
        """Open the pipe that a notice asks for, to this machine's own stage server."""
        metadata = ((PIPE_KEY, notice.pipe),)
        async with contextlib.AsyncExitStack() as stack:
            if notice.addresses:
                address = await self._answering(notice.addresses, notice.caller)
                if address is None:
                    return  # the waiting machine takes another way
                # of its own: another machine may have this address by the next notice
                channel = await stack.enter_async_context(_channel(address, link_name(notice.caller), self.tls))
                call = join_pb2_grpc.JoinServiceStub(channel).Carry(metadata=metadata)
            else:
                call = stub.Carry(metadata=(*metadata, *self._shown))
            stack.callback(call.cancel)
            with contextlib.suppress(OSError, grpc.RpcError):
                reader, writer = await asyncio.open_connection(*self.own)
                stack.callback(writer.close)
                await splice(SocketPipe(reader, writer), CalledPipe(call))

    async def _answering(self, addresses: Sequence[str], name: str) -> str | None:
        """The first of `addresses` where the machine `name` shows its certificate."""
        probes = [asyncio.create_task(self._shows(address, name)) for address in addresses[:MAX_ANNOUNCED]]
        try:
            for probe in asyncio.as_completed(probes):
                if (found := await probe) is not None:
                    return found
            return None
        finally:
            await cancelled(probes)

    async def _shows(self, address: str, name: str) -> str | None:
        """`address`, if the machine `name` is there."""
        assert self.tls.certificate is not None
        host, port = parse_address(address)
        with contextlib.suppress(OSError):  # errors of TLS and of the clock are of this class, too
            context = ssl.create_default_context(cafile=str(self.tls.authority))
            context.load_cert_chain(self.tls.certificate, self.tls.key)
            context.set_alpn_protocols(["h2"])
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=link_name(name))
            writer.transport.abort()
            return address
        return None

    def _choose(self, stub: join_pb2_grpc.JoinServiceAsyncStub, name: str, kind: str, address: str = "") -> None:
        """Remember a way, and show it to people on both machines."""
        self._ways[name] = kind, address, monotonic()
        self._lost_at.pop(name, None)
        if self._kinds.get(name) == kind:
            return
        self._kinds[name] = kind
        log.info("%s: link to %s: %s %s", self.name, name, kind, address)

        async def tell() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Reach(join_pb2.ReachRequest(to=name, kind=kind), timeout=NOTICE_S)

        self._begin(tell())

    def _begin(self, job: Awaitable[None]) -> None:
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _channel(address: str, name: str, tls: Tls, shown: Metadata = ()) -> grpc.aio.Channel:
    """A channel to the address at which `name` is expected."""
    options = (("grpc.ssl_target_name_override", name), *KEEPALIVE)
    return open_channel(address, security=Security(tls), options=options, metadata=shown)
