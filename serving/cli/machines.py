"""`onesweep join`: a machine joins a run with a ticket and keeps its place there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cli.parser import check_positive
from serving.cli.ports import port_free
from stages.device import AUTO, check_device
from stages.errors import InputError, ServiceError
from stages.host.settings import HostSettings, StageSettings
from stages.settings import add_flags, from_flags
from stages.signals import ends_at_once, run_until_signal, start_ticks
from stages.telemetry.observability import start_log
from stages.wire.channel import parse_address
from stages.wire.links import LinkProxy, MachineLinks, check_machine
from stages.wire.secret_files import exclusive, make_private_directory, state_directory, state_home
from stages.wire.status import StatusError
from stages.wire.tls import Security

if TYPE_CHECKING:
    from stages.wire.tickets import JoinedMachine, Ticket

ADDRESSES_NAME, DOING_NAME = "addresses.json", "doing.json"
MAX_NAMESAKES = 32  # most machines of one person on one computer


def run_directory() -> Path:
    """The directory of the run served from here."""
    return state_home() / "run"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory for this process. Raises ServiceError if another one holds it."""
    make_private_directory(directory)
    taken = f"another process serves from {directory}: stop it, or set XDG_STATE_HOME"
    with exclusive(directory / "lock", ServiceError(taken)):
        yield


def serving_here() -> dict[str, str]:
    """The current step of this machine's `onesweep serve`, and its router's address; empty if none runs."""
    with contextlib.suppress(OSError, ValueError, LookupError, InputError):  # of a user without a home
        record = dict(json.loads((run_directory() / DOING_NAME).read_text(encoding="utf-8")))
        if start_ticks(record["process"]) == record["began"]:  # not another process with that id
            return record
    return {}


def served_here(router: str | None) -> str:
    """A sentence about a router that was started on this machine and does not answer; empty if there is none.

    :param router: its address, or None for any."""
    from serving.cli.deployment import deployment_here
    from serving.cli.servers import ROUTER

    record, here = serving_here(), deployment_here(router)
    if here is not None and (ended := here.ended().get(ROUTER)):
        return f"the router at {here.topology.router} exited: {ended}; `onesweep down`, then start it again"
    if not record or (router is not None and router.replace("localhost", "127.0.0.1") != record["router"]):
        return ""
    if deployment_here(record["router"]):
        return "`onesweep serve` runs here, but its router does not answer: see its output"
    return record["doing"] and f"`onesweep serve` runs here, but has no router yet: {record['doing']}"


def add_join(join: argparse.ArgumentParser) -> None:
    join.add_argument("ticket", metavar="TICKET", nargs="?", help="of `onesweep serve` or `invite`, once; - for stdin")
    join.add_argument("--name", metavar="NAME", help="name of this machine (its hostname)")
    join.add_argument("--listen", metavar="HOST:PORT", help="address that others connect to (any address, a free port)")
    join.add_argument("--model", type=Path, metavar="FILE", help="local copy of the model, to read layers from (none)")
    join.add_argument("--threads", type=int, metavar="N", help="processor threads (all cores)")
    add_flags(join, HostSettings, only=("device",))  # not given: the topology may name it


@ends_at_once()
def run_join(options: argparse.Namespace) -> int:
    check_positive(options, "threads")
    from stages.wire.tickets import Ticket

    # refuse early, while the ticket is unused
    state_directory()
    if options.device not in (None, AUTO):
        check_device(options.device)
    if options.model is not None:
        from stages.importing.importing import open_source

        open_source(options.model).check()
    text = sys.stdin.readline() if options.ticket == "-" else options.ticket
    ticket = Ticket.parse(text.strip().rpartition(" ")[2]) if text else None  # `invite` prints the whole command
    if options.listen and parse_address(options.listen, "--listen")[1] == 0:
        raise InputError("--listen needs a port: others connect to it")
    with contextlib.ExitStack() as stack:
        place = _place(ticket, options.name, stack)
        start_log("text", place.name)
        _serve_stages(place, options)
    return 0


def _place(ticket: Ticket | None, name: str | None, stack: contextlib.ExitStack) -> JoinedMachine:
    """Lock this machine's place in the run of a ticket; without a ticket, in the only run that it joined. Raises
    OnesweepError."""
    from stages.wire.tickets import MACHINE_NAME, JoinedMachine, enrolled, is_known

    joined = state_home() / "joined"
    if ticket is not None:
        run = joined / ticket.fingerprint[:16]
    else:
        runs = sorted(path.parent.parent for path in joined.glob(f"*/*/{MACHINE_NAME}"))
        if len(set(runs)) != 1:
            what = "this machine has joined several runs" if runs else "this machine has joined no run"
            raise InputError(f"{what}: give the ticket that `onesweep serve` printed")
        run = runs[0]
    plain = re.sub("[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    own = check_machine(name) if name else plain[:28].strip("-") or "machine"
    there = [JoinedMachine.read(path.parent) for path in sorted(run.glob(f"*/{MACHINE_NAME}"))]
    folders = {place.name: place.directory.name for place in there if place}  # a ticket may name the machine
    if name:
        names = [folders[own]] if own in folders else [own] if ticket else []
    else:
        names = [own, *(f"{own[:28]}-{i}" for i in range(2, MAX_NAMESAKES))] if ticket else [*folders.values()]
    for each in names:
        try:
            stack.enter_context(locked(run / each))
        except ServiceError:
            if name:
                raise
            continue
        if (place := JoinedMachine.read(run / each)) and is_known(place):
            return place
        if ticket is None:
            raise ServiceError("the router no longer admits this machine: give a new ticket, from `onesweep invite`")
        if place := enrolled(ticket, run / each, name or each, is_given=bool(name)):
            return place
    unknown = f"this machine has joined no run as {own!r}: give the ticket that `onesweep serve` printed"
    raise InputError("`onesweep join` already runs here: stop it, or give a ticket and --name" if names else unknown)


def _serve_stages(place: JoinedMachine, options: argparse.Namespace) -> None:
    """Hold the stages that the router assigns, until a signal. Raises OnesweepError."""
    from stages.host.server import EmptyHost
    from stages.memory import return_large_buffers
    from stages.wire.tickets import own_addresses, renew

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
            await links.leave()  # first: running work may take a while

        proxy = await LinkProxy(links.dial).open()
        attending = asyncio.create_task(links.attend())
        others = [asyncio.create_task(job) for job in (renew(place), leaving())]
        attending.add_done_callback(lambda _: stop.set())
        try:
            await EmptyHost(settings).run(stop)
        finally:
            for task in (attending, *others):
                task.cancel()
            proxy.close()
            await links.close()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await attending
        except StatusError as refusal:
            raise ServiceError(f"the router no longer admits this machine: {refusal.message}") from None

    print(f"{place.name} has joined the run at {place.rendezvous[0]}; Ctrl-C leaves it", flush=True)
    run_until_signal(run)


def _kept_port(path: Path) -> int:
    """The port of this machine's last start, so that a NAT gateway can forward it; another if it is taken."""
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    with socket.socket() as probe:
        if kept.isdecimal() and port_free("0.0.0.0", int(kept) % 65536):
            return int(kept) % 65536
        probe.bind(("0.0.0.0", 0))
        port = int(probe.getsockname()[1])
    path.write_text(str(port), encoding="utf-8")
    return port
