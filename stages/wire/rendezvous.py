"""The rendezvous: certifies machines that bring a ticket, and joins pipes of machines that cannot dial each other."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from stages.clock import monotonic
from stages.errors import InputError, quoted
from stages.threads import cancelled
from stages.v1 import join_pb2, join_pb2_grpc
from stages.wire.auth import HOST, ROUTER, Identity
from stages.wire.certificates import AUTHORITY, Authority, key_fingerprint
from stages.wire.channel import KEEPALIVE, CallBounds, bind, new_server, parse_address
from stages.wire.link_quality import LINKS_NAME, LinkRecord
from stages.wire.links import KINDS, MAX_ANNOUNCED, NOTICE_S, RELAYED, ROUTER_NAME, TO_KEY, check_machine, link_name
from stages.wire.messages import PROTOCOL, hops_refusal
from stages.wire.pipes import (
    PIECE_BYTES,
    PIPE_NOT_AWAITED,
    WINDOW_OPTIONS,
    AwaitedPipes,
    Pipe,
    RelayBudget,
    ServedPipe,
    splice,
)
from stages.wire.secret_files import file_lock, make_private_directory, read_file, write_file
from stages.wire.status import Context, StatusError, already_exists, exhausted, invalid, not_found, unavailable
from stages.wire.tickets import Invitations
from stages.wire.tls import Security, Tls
from stages.wire.tokens import HEADER, SCHEME, token_hash

log = logging.getLogger(__name__)
T = TypeVar("T")

LEAF_DAYS, AUTHORITY_DAYS = 30, 5 * 365
# Between renewals of its own certificate, checks for revoked machines, and records of relayed bytes.
RENEW_S, LOOK_S, RECORD_PAUSE_S = 5 * 86400.0, 1.0, 5.0
ERROR_PAUSE_S = 3600.0  # until damaged files are checked again
STOP_S = 0.5  # time for calls to end by themselves
CLOCK_S = 240.0  # largest error of a machine's clock: certificates are valid from five minutes before
MAX_MACHINES, MAX_CALLS = 64, 256  # in a run; incomplete calls of one machine at once
MAX_NOTICES = 256  # that a machine has not taken in yet


@dataclass
class Machine:
    """A machine that has joined."""

    name: str
    sha256: str  # of the machine's secret
    addresses: tuple[str, ...] = ()  # addresses of its stage server, as it announced them
    notices: asyncio.Queue[join_pb2.Notice] | None = None  # while it attends
    leaving: bool = False  # it is leaving: others take over its stage
    pipes: set[asyncio.Task[None]] = field(default_factory=set)  # with an end at this machine

    def dismiss(self) -> None:
        """End its pipes, and the call by which it attends, if any."""
        for pipe in self.pipes:
            pipe.cancel()
        if (notices := self.notices) is not None and not notices.full():
            self.notices = None
            notices.put_nowait(join_pb2.Notice())  # the last notice


class RunDirectory:
    """Files of a run, on the router's machine: its authority, its own certificate, invitations, machines."""

    def __init__(self, directory: Path) -> None:
        """Create missing files. Raises InputError."""
        make_private_directory(directory)
        self.directory, self._machines = directory, directory / "machines.json"
        is_new = not (directory / f"{AUTHORITY}.pem").exists()
        self.authority = Authority.create(directory, AUTHORITY_DAYS) if is_new else Authority.open(directory)
        own = directory / f"{ROUTER_NAME}.pem"
        if own.exists():
            self.authority.renew(ROUTER_NAME, LEAF_DAYS)
        else:
            self.authority.issue(Identity(ROUTER, ROUTER_NAME), (link_name(ROUTER_NAME), "127.0.0.1"), LEAF_DAYS)
        self.tls = Tls(directory / f"{AUTHORITY}.pem", own, directory / f"{ROUTER_NAME}.key")
        self.fingerprint = key_fingerprint(read_file(own))
        self.invitations = Invitations(directory / "invitations.json")

    def machines(self) -> dict[str, Machine]:
        """Machines that joined, by name. Raises InputError."""
        try:
            there = json.loads(read_file(self._machines)) if self._machines.exists() else {}
            return {name: Machine(name, str(digest)) for name, digest in there.items()}
        except (ValueError, AttributeError):
            raise InputError(f"{self._machines} is damaged: restore it, or remove it") from None

    def keep(self, name: str, machine: Machine | None) -> None:
        """Record a machine that joined, or (None) remove one. Raises InputError."""
        with file_lock(self._machines):
            there = self.machines() | ({name: machine} if machine else {})
            record = {each.name: each.sha256 for each in there.values() if machine or each.name != name}
            write_file(self._machines, json.dumps(record, indent=1).encode())


class Rendezvous(join_pb2_grpc.JoinServiceServicer):
    """The join service, and the router's own way to the machines. Lives on one event loop."""

    def __init__(self, run: RunDirectory, say: Callable[[str], object] = lambda line: None) -> None:
        """:param say: called with lines for people: who joined, which links go over this machine. Raises InputError."""
        self.run, self._say = run, say
        self.machines = run.machines()
        self.neighbours: dict[str, set[str]] = {}  # machines that each may reach, by its place in the ring
        self.refused = Counter[str]()  # refused calls, by method
        self._awaited, self.budget = AwaitedPipes(), RelayBudget()  # type: ignore[abstract]
        self.kinds = {**LinkRecord.read(run.directory).kinds}  # of links made so far, also before this start
        self.proxy = ""  # through which commands on this machine dial machines
        self.advice = list[str]()  # for people, in `status`
        self.announces = True  # whether to announce each link whose kind changes

    async def here(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a job of another thread's loop on this one: gRPC's poller is for one loop of a process."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job, self.loop))

    @property
    def present(self) -> list[str]:
        """Attending machines that are not leaving, in the order of joining. From any thread: it copies at once."""
        there = list(self.machines.values())
        return [machine.name for machine in there if machine.notices is not None and not machine.leaving]

    @property
    def leaving(self) -> set[str]:
        """Machines that announced that they leave. From any thread."""
        return {machine.name for machine in list(self.machines.values()) if machine.leaving}

    @asynccontextmanager
    async def serving(self, address: str) -> AsyncIterator[int]:
        """Listen on `address` for the duration of a `with` block. Yields the port. Raises OnesweepError."""

        def caller(path: str, metadata: Any) -> str:  # noqa: ANN401 - the stubs do not export its type
            found = self._machine_of(dict(metadata))
            return found.name if found else ""

        self.loop, bounds = asyncio.get_running_loop(), [CallBounds(caller, MAX_CALLS)]
        options = (*WINDOW_OPTIONS, *KEEPALIVE)
        server = new_server(2 * PIECE_BYTES, bounds, streams=2 * MAX_CALLS, options=options)
        join_pb2_grpc.add_JoinServiceServicer_to_server(self, server)
        port = bind(server, address, Security(self.run.tls))
        await server.start()
        renewing = asyncio.create_task(self._renew())
        try:
            yield port
        finally:
            renewing.cancel()
            for machine in self.machines.values():
                machine.dismiss()
            await server.stop(STOP_S)

    async def _renew(self) -> None:
        renewed_at = recorded_at = monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.remove_machines(self.machines.keys() - self.run.machines().keys())
                if monotonic() - renewed_at > RENEW_S:
                    renewed_at = monotonic()
                    self.run.authority.renew(ROUTER_NAME, LEAF_DAYS)  # same key, so its fingerprint stays
                if RELAYED in self.kinds.values() and monotonic() - recorded_at > RECORD_PAUSE_S:
                    recorded_at = monotonic()
                    self.write_links()
            except InputError as error:
                log.warning("cannot update the run's files: %s", error)
                await asyncio.sleep(ERROR_PAUSE_S)

    def remove_machines(self, names: Iterable[str]) -> None:
        """Remove machines that `onesweep invite --revoke` took out of the run."""
        for name in names:
            self.machines.pop(name).dismiss()
            self.kinds = {pair: kind for pair, kind in self.kinds.items() if name not in pair}
            self.budget.carried = Counter({pair: n for pair, n in self.budget.carried.items() if name not in pair})
            self.write_links()
            self._say(f"{name} was removed")

    def write_links(self) -> None:
        """Record, for commands on this machine, the proxy that dials machines, and their links. Raises InputError."""
        kinds = [[*pair, kind] for pair, kind in self.kinds.copy().items()]
        ports = {each.name: each.addresses[0] for each in list(self.machines.values()) if each.addresses}
        sizes = [[*pair, size] for pair, size in self.budget.carried.copy().items() if ROUTER_NAME not in pair]
        record = {"proxy": self.proxy, "links": kinds, "ports": ports, "advice": self.advice, "relayed_bytes": sizes}
        write_file(self.run.directory / LINKS_NAME, json.dumps(record).encode())

    # The gRPC methods

    async def Enrol(self, request: join_pb2.EnrolRequest, context: Context) -> join_pb2.EnrolResponse:
        there = self._machine_of(dict(context.invocation_metadata() or ()))
        if request.protocol != PROTOCOL:
            raise hops_refusal(request.protocol, "this machine", "the router")
        if abs(ahead_s := request.unix_s - time.time()) > CLOCK_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            raise invalid(f"this machine's clock is {abs(ahead_s) / 60:.0f} minutes {side} the router's: correct it")
        try:
            if there is not None:
                return self._certified(request, there.name, "")
            secret = _secret_of(dict(context.invocation_metadata() or ()))
            invitation = self.run.invitations.find(secret) if secret else None
            problem = invitation.problem(time.time()) if invitation else "the router does not know this ticket"
            if invitation is None or problem:
                raise self._refusal("Enrol", f"{problem}: ask for another one from `onesweep invite`")
            name = check_machine(invitation.name or request.name)
            if request.insists and name != request.name:
                raise invalid(f"this ticket is for a machine named {name}: omit --name, or ask for another ticket")
            if name in self.machines or name == ROUTER_NAME:
                raise already_exists(f"a machine named {name} has already joined: choose another --name")
            if len(self.machines) >= MAX_MACHINES:
                raise exhausted(f"{MAX_MACHINES} machines have joined, the most: `invite --revoke` removes one", 60_000)
            own = secrets.token_urlsafe(32)
            response = self._certified(request, name, own)
            self.run.invitations.use(invitation)
            self.run.keep(name, machine := Machine(name, token_hash(own)))
            self.machines[name] = machine
        except InputError as error:
            raise invalid(str(error)) from None
        self._say(f"{name} joined")
        return response

    async def Attend(self, request: join_pb2.AttendRequest, context: Context) -> AsyncIterator[join_pb2.Notice]:
        machine = self._caller("Attend", context)
        machine.leaving = request.leaving
        if request.leaving:
            self._say(f"{machine.name} is leaving")
            return
        machine.addresses = _checked(request.addresses)
        machine.dismiss()  # it dialled again: its former connection is dead, even if TCP does not know yet
        machine.notices = notices = asyncio.Queue[join_pb2.Notice](MAX_NOTICES)
        self._say(f"{machine.name} is online")
        try:
            yield join_pb2.Notice()
            while machine.notices is notices:  # a second call replaces the first
                yield await notices.get()
        finally:
            if machine.notices is notices:
                machine.notices = None
                self._say(f"{machine.name} is offline")

    async def Reach(self, request: join_pb2.ReachRequest, context: Context) -> join_pb2.ReachResponse:
        machine = self._caller("Reach", context)
        target = self._reachable(machine, request.to)
        if request.pipe:
            if len(request.pipe) != 32 or not request.pipe.isalnum():
                raise invalid("a pipe's name must be 32 hexadecimal digits")
            addresses = _checked(request.addresses)
            self._notify(target, join_pb2.Notice(pipe=request.pipe, addresses=addresses, caller=machine.name))
        if (kind := request.kind) and kind not in KINDS:
            raise invalid(f"a link's kind must be one of {', '.join(KINDS)}")
        before = self.kinds.get((machine.name, target.name), "")
        if kind and before != kind:
            self.kinds[machine.name, target.name] = kind
            if self.announces:
                self._say(f"link {machine.name} to {target.name}: {kind}{before and f' (it was {before})'}")
            self.write_links()
        return join_pb2.ReachResponse(addresses=target.addresses)

    async def Carry(  # type: ignore[override]  # it writes as it goes
        self, requests: AsyncIterator[join_pb2.Chunk], context: Context
    ) -> None:
        machine, metadata = self._caller("Carry", context), dict(context.invocation_metadata() or ())
        own = ServedPipe(requests, context)
        if TO_KEY in metadata:
            target = self._reachable(machine, str(metadata[TO_KEY]))
            await self._join(own, target, machine.name)
            return
        if not await self._awaited.open(metadata, machine.name, own):
            raise self._refusal("Carry", PIPE_NOT_AWAITED, grpc.StatusCode.NOT_FOUND)

    # The router's own way

    async def dial(self, name: str, local: Pipe) -> None:
        """Carry a connection of this machine's router to a machine's stage server. Raises StatusError."""
        await self._join(local, self._present(name), ROUTER_NAME)

    async def _join(self, own: Pipe, target: Machine, caller: str) -> None:
        """Carry bytes between the caller's end and one that `target` is asked to open here, while both machines
        attend. Raises StatusError."""
        with self.budget.pipe(caller, target.name) as count:
            async with self._awaited.awaited(target.name) as (pipe, found):
                self._notify(target, join_pb2.Notice(pipe=pipe, caller=caller))
                await asyncio.wait([found], timeout=NOTICE_S)
                if not found.done():
                    raise unavailable(f"machine {target.name} does not answer")
                await own.write(b"")  # it is open
                carrying = asyncio.create_task(splice(own, found.result(), count))
                for pipes in [each.pipes for each in (target, self.machines.get(caller)) if each]:
                    pipes.add(carrying)
                    carrying.add_done_callback(pipes.discard)
                try:
                    await asyncio.wait([carrying])
                finally:
                    await cancelled([carrying])

    def _notify(self, target: Machine, notice: join_pb2.Notice) -> None:
        if target.notices is None or target.notices.full():
            raise unavailable(f"machine {target.name} does not read its notices")
        target.notices.put_nowait(notice)

    def _reachable(self, machine: Machine, name: str) -> Machine:
        """The machine called `name`. Raises StatusError if it is not `machine`'s neighbour, or does not attend."""
        if name not in self.neighbours.get(machine.name, ()):
            message = f"{quoted(name)} is not a neighbour of {machine.name}"
            raise self._refusal("Reach", message, grpc.StatusCode.PERMISSION_DENIED)
        return self._present(name)

    def _present(self, name: str) -> Machine:
        if (machine := self.machines.get(name)) is None:
            raise not_found(f"machine {name[:40]} was removed")
        if machine.notices is None:
            raise unavailable(f"machine {name} is offline")
        return machine

    def _caller(self, method: str, context: Context) -> Machine:
        machine = self._machine_of(dict(context.invocation_metadata() or ()))
        if machine is None:
            raise self._refusal(method, "this machine has not joined, or was removed: `onesweep join TICKET`")
        return machine

    def _machine_of(self, metadata: Mapping[str, Any]) -> Machine | None:
        digest = token_hash(_secret_of(metadata))
        return next((each for each in self.machines.values() if hmac.compare_digest(each.sha256, digest)), None)

    def _certified(self, request: join_pb2.EnrolRequest, name: str, secret: str) -> join_pb2.EnrolResponse:
        """Raises InputError."""
        made = self.run.authority.certify(request.request, Identity(HOST, name), (link_name(name),), LEAF_DAYS)
        authority = read_file(self.run.tls.authority)
        return join_pb2.EnrolResponse(authority=authority, certificate=made, secret=secret, name=name)

    def _refusal(
        self, method: str, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED
    ) -> StatusError:
        self.refused[method] += 1
        if self.refused[method] & (self.refused[method] - 1) == 0:  # the first, second, fourth ...: guesses are many
            log.warning("%s refused, %d so far: %s", method, self.refused[method], message)
        return StatusError(code, message)


def _secret_of(metadata: Mapping[str, Any]) -> str:
    header = metadata.get(HEADER, "")
    return header.removeprefix(SCHEME) if isinstance(header, str) else ""


def _checked(addresses: Any) -> tuple[str, ...]:  # noqa: ANN401 - a repeated field
    """The addresses, checked. Raises StatusError for an invalid one."""
    if len(addresses) > MAX_ANNOUNCED:
        raise invalid(f"a machine can have at most {MAX_ANNOUNCED} addresses")
    try:
        for address in addresses:
            parse_address(address)
    except InputError as error:
        raise invalid(str(error)) from None
    return tuple(addresses)
