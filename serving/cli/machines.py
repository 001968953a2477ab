"""`onesweep join`: a machine joins a run with a ticket, and keeps its place there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cli.admin import check_installed
from serving.cli.ports import port_free
from stages.device import AUTO, check_device
from stages.errors import InputError, ServiceError
from stages.host.commands import add_device, check_positive
from stages.progress import ticking
from stages.settings import from_flags
from stages.signals import start_ticks
from stages.telemetry.observability import start_log

if TYPE_CHECKING:
    from stages.v1 import join_pb2
    from stages.wire.tickets import Ticket
    from stages.wire.tls import Tls

ADDRESSES_NAME, DOING_NAME, MACHINE_NAME = "addresses.json", "doing.json", "machine.json"
MOST_NAMESAKES = 32  # machines of one person's on one computer
DIAL_S, ENROL_S = 5.0, 20.0
RENEWED_DAYS, CHECK_S = 15, 3600.0  # that a certificate is good for yet when another one is asked for


def state_home() -> Path:
    """The directory of runs, and of places in them, which outlive a restart of the computer."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "onesweep"


def run_directory() -> Path:
    """The directory of the run that is served from here."""
    return state_home() / "run"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a directory for this process. Raises ServiceError where another one has it."""
    from stages.wire.secret_files import exclusive, make_private_directory

    make_private_directory(directory)
    said = f"another process serves from {directory}: end it, or set XDG_STATE_HOME"
    with exclusive(directory / "lock", ServiceError(said)):
        yield


def tell_here(router: str, doing: str) -> None:
    """Leave for `serving_here` what this process does."""
    record = {"router": router, "doing": doing, "process": os.getpid(), "began": start_ticks(os.getpid())}
    (run_directory() / DOING_NAME).write_text(json.dumps(record), encoding="utf-8")


def serving_here() -> dict[str, str]:
    """The doings of the `onesweep serve` of this machine, and its router's address; empty where none runs."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        record = dict(json.loads((run_directory() / DOING_NAME).read_text(encoding="utf-8")))
        if start_ticks(record["process"]) == record["began"]:  # not another of that number
            return record
    return {}


def served_here(router: str | None) -> str:
    """A sentence on the `onesweep serve` of this machine, whose router does not answer; empty where none runs.

    :param router: its address, or None for whichever."""
    from serving.cli.deployment import deployment_here

    record = serving_here()
    if not record or (router is not None and router.replace("localhost", "127.0.0.1") != record["router"]):
        return ""
    if deployment_here(record["router"]):
        return "`onesweep serve` is here, and its router does not answer: its own lines say more"
    return record["doing"] and f"`onesweep serve` is here, and has no router yet: {record['doing']}"


@dataclass(frozen=True)
class JoinedMachine:
    """A machine's place in a run, in a directory of its own."""

    directory: Path
    name: str
    secret: str
    rendezvous: tuple[str, ...]

    @property
    def tls(self) -> Tls:
        from stages.wire.tls import Tls

        return Tls(self.directory / "ca.pem", self.directory / "machine.pem", self.directory / "machine.key")

    @classmethod
    def read(cls, directory: Path) -> JoinedMachine | None:
        """None where nobody joined. Raises InputError for a damaged record."""
        path = directory / MACHINE_NAME
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls(directory, str(record["name"]), str(record["secret"]), tuple(map(str, record["rendezvous"])))
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} is damaged: remove {directory}, and join with another ticket") from None


def add_join(join: argparse.ArgumentParser) -> None:
    join.add_argument("ticket", metavar="TICKET", nargs="?", help="of `onesweep serve` or `invite`, once; - reads it")
    join.add_argument("--name", metavar="NAME", help="what to call this machine (its own name)")
    join.add_argument("--listen", metavar="HOST:PORT", help="where others may dial it (any address, a free port)")
    join.add_argument("--model", type=Path, metavar="FILE", help="a copy of what is served: layers come from it (none)")
    join.add_argument("--threads", type=int, metavar="N", help="processor threads (all cores)")
    add_device(join)


def run_join(options: argparse.Namespace) -> int:
    check_installed()
    check_positive(options, "threads")
    from stages.wire.channel import parse_address
    from stages.wire.secret_files import check_private, state_directory
    from stages.wire.tickets import Ticket

    # what would be refused later is refused while the ticket is unused
    check_private(state_directory())
    if options.device not in (None, AUTO):
        check_device(options.device)
    if options.model is not None:
        from stages.importing.importing import open_source

        open_source(options.model).check()
    text = sys.stdin.readline() if options.ticket == "-" else options.ticket
    ticket = Ticket.parse(text.strip().rpartition(" ")[2]) if text else None  # `invite` prints the whole command
    if options.listen and parse_address(options.listen, "--listen")[1] == 0:
        raise InputError("--listen needs a port: others are told it")
    with contextlib.ExitStack() as stack:
        place = _place(ticket, options.name, stack)
        start_log("text", place.name)
        _serve_stages(place, options)
    return 0


def _place(ticket: Ticket | None, name: str | None, stack: contextlib.ExitStack) -> JoinedMachine:
    """This machine's place in the run of a ticket, kept by this process; without a ticket, in the only run that it
    joined. Raises OnesweepError."""
    from stages.wire.links import check_machine

    joined = state_home() / "joined"
    if ticket is not None:
        run = joined / ticket.fingerprint[:16]
    else:
        runs = sorted(path.parent.parent for path in joined.glob(f"*/*/{MACHINE_NAME}"))
        if len(set(runs)) != 1:
            what = "this machine has joined several runs" if runs else "this machine has joined no run"
            raise InputError(f"{what}: give the ticket that `onesweep serve` printed")
        run = runs[0]
    own = check_machine(name) if name else _own_name()
    there = [JoinedMachine.read(path.parent) for path in sorted(run.glob(f"*/{MACHINE_NAME}"))]
    folders = {place.name: place.directory.name for place in there if place}  # a ticket may have named a machine
    if name:
        names = [folders[own]] if own in folders else [own] if ticket else []
    else:
        names = [own, *(f"{own[:28]}-{i}" for i in range(2, MOST_NAMESAKES))] if ticket else [*folders.values()]
    for each in names:
        try:
            stack.enter_context(locked(run / each))
        except ServiceError:
            if name:
                raise
            continue
        if (place := JoinedMachine.read(run / each)) and _is_known(place):
            return place
        if ticket is None:
            raise ServiceError("the router lets this machine in no more: give another ticket, of `onesweep invite`")
        if place := _enrolled(ticket, run / each, name or each, is_given=bool(name)):
            return place
    raise InputError(f"no machine {own!r} of this computer has joined: give the ticket that `onesweep serve` printed")


def _is_known(place: JoinedMachine) -> bool:
    """False where the router let this machine go: it may come back with a new ticket."""
    import grpc

    from stages.v1 import join_pb2
    from stages.wire.secret_files import read_file

    request = join_pb2.EnrolRequest(name=place.name)
    try:
        asyncio.run(_enrol(place.rendezvous[0], read_file(place.tls.authority), request, place.secret))
    except grpc.RpcError as error:
        return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True


def _own_name() -> str:
    plain = re.sub("[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return plain[:28].strip("-") or "machine"


def _enrolled(ticket: Ticket, directory: Path, name: str, is_given: bool) -> JoinedMachine | None:
    """Join, and keep the certificate; None where another machine has a name that nobody gave. Raises OnesweepError."""
    import grpc

    from stages.v1 import join_pb2
    from stages.wire.certificates import make_request
    from stages.wire.secret_files import PUBLIC, write_file
    from stages.wire.tls import LOOPBACK_ONLY, handshake_problem

    address, certificate = _found(ticket)
    key = make_request(directory / "machine.key", name)
    request = join_pb2.EnrolRequest(name=name, request=key, insists=is_given)
    try:
        response = asyncio.run(_enrol(address, certificate, request, ticket.secret))
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ALREADY_EXISTS and not is_given and f" {name} " in details:  # a ticket may name it
            return None
        said = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}
        if code in said:
            raise InputError(details) from None
        problem = handshake_problem(details, LOOPBACK_ONLY) or f"did not let this machine in: {details}"
        raise ServiceError(f"the router at {address} {problem}") from None
    write_file(directory / "ca.pem", response.authority, PUBLIC)
    write_file(directory / "machine.pem", response.certificate, PUBLIC)
    rendezvous = [address, *(each for each in ticket.addresses if each != address)]
    record = {"name": response.name, "secret": response.secret, "rendezvous": rendezvous}
    write_file(directory / MACHINE_NAME, json.dumps(record).encode())
    return JoinedMachine.read(directory)


def _found(ticket: Ticket) -> tuple[str, bytes]:
    """The first address where the ticket's router answers, and its certificate (PEM). Raises ServiceError."""
    from stages.wire.certificates import key_fingerprint
    from stages.wire.channel import parse_address

    problems = []
    for address in ticket.addresses:
        try:
            shown = ssl.get_server_certificate(parse_address(address), timeout=DIAL_S).encode()
        except (OSError, ValueError) as error:
            problems.append(f"{address} does not answer ({getattr(error, 'strerror', None) or error})")
            continue
        if secrets.compare_digest(key_fingerprint(shown), ticket.fingerprint):
            return address, shown
        problems.append(f"at {address} is another server than the ticket's")
    raise ServiceError(
        f"no way to the router: {'; '.join(problems)}. See that `onesweep serve` runs there and that this machine "
        "reaches it; nothing of the ticket was sent"
    )


async def _enrol(
    address: str, certificate: bytes, request: join_pb2.EnrolRequest, secret: str
) -> join_pb2.EnrolResponse:
    import grpc

    from stages.v1 import join_pb2_grpc
    from stages.wire.links import ROUTER_NAME, link_name
    from stages.wire.messages import PROTOCOL
    from stages.wire.tokens import token_metadata

    request.protocol, request.unix_s = PROTOCOL, int(time.time())
    options = (("grpc.ssl_target_name_override", link_name(ROUTER_NAME)), ("grpc.enable_http_proxy", 0))
    with ticking(f"waiting for the router at {address}"):
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options) as channel:
            stub: join_pb2_grpc.JoinServiceAsyncStub = join_pb2_grpc.JoinServiceStub(channel)
            return await stub.Enrol(request, timeout=ENROL_S, metadata=token_metadata(secret))


def _serve_stages(place: JoinedMachine, options: argparse.Namespace) -> None:
    """Hold the stages that the router gives, until a signal. Raises OnesweepError."""
    from stages.host.server import EmptyHost
    from stages.host.settings import HostSettings, StageSettings
    from stages.memory import return_large_buffers
    from stages.signals import run_until_signal
    from stages.wire.channel import parse_address
    from stages.wire.links import LinkProxy, MachineLinks
    from stages.wire.status import StatusError
    from stages.wire.tickets import own_addresses
    from stages.wire.tls import Security

    listen = options.listen or f"0.0.0.0:{_kept_port(place.directory / 'port')}"
    host, port = parse_address(listen, "--listen")
    is_any = host in ("0.0.0.0", "::")
    own = ("::1" if host == "::" else "127.0.0.1" if is_any else host), port
    links = MachineLinks(
        *(place.name, place.tls, place.rendezvous, place.secret, own),
        lambda: own_addresses(port) if is_any else (listen,),
    )
    releases = place.directory / "releases"
    settings = StageSettings(
        checkpoint=releases,
        blocks=(),
        listen=listen,
        next=(),
        host=from_flags(HostSettings, options, name=place.name),
        threads=options.threads,
        security=Security(place.tls),
        releases=releases,
        model=options.model,
        pipes=links.awaited,
    )
    return_large_buffers()

    async def run(stop: asyncio.Event) -> None:
        async def leaving() -> None:
            await stop.wait()
            await links.leave()  # at once: what is under way here may take a while

        proxy = await LinkProxy(links.dial).open()
        attending = asyncio.create_task(links.attend())
        others = [asyncio.create_task(job) for job in (_renew(place), leaving())]
        attending.add_done_callback(lambda _: stop.set())
        try:
            await EmptyHost(settings).run(stop)
        finally:
            for task in (attending, *others):
                task.cancel()
            proxy.close()
            await links.close()
        try:
            await attending
        except asyncio.CancelledError:
            pass
        except StatusError as refusal:
            raise ServiceError(f"the router lets this machine in no more: {refusal.message}") from None

    print(f"{place.name} is a machine of the run at {place.rendezvous[0]}; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        run_until_signal(run)


async def _renew(place: JoinedMachine) -> None:
    """Ask for another certificate of the same key before this one ends; servers take it from its file. Has no end."""
    import grpc

    from stages.v1 import join_pb2
    from stages.wire.certificates import make_request
    from stages.wire.secret_files import PUBLIC, read_file, write_file

    while True:
        certificate = place.tls.read().certificate
        if certificate is not None and certificate.until - datetime.now(UTC) < timedelta(days=RENEWED_DAYS):
            request = join_pb2.EnrolRequest(
                name=place.name, request=make_request(place.directory / "machine.key", place.name)
            )
            for address in place.rendezvous:
                with contextlib.suppress(grpc.RpcError):
                    response = await _enrol(address, read_file(place.tls.authority), request, place.secret)
                    write_file(place.directory / "machine.pem", response.certificate, PUBLIC)
                    break
        await asyncio.sleep(CHECK_S)


def _kept_port(path: Path) -> int:
    """The port of this machine's last start, so that a gateway can be told of it; another where that is taken."""
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    with socket.socket() as probe:
        if kept.isdecimal() and port_free("0.0.0.0", int(kept) % 65536):
            return int(kept) % 65536
        probe.bind(("0.0.0.0", 0))
        port = int(probe.getsockname()[1])
    path.write_text(str(port), encoding="utf-8")
    return port
