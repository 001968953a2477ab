"""`onesweep serve MODEL`: machines that join get their stages; rendezvous, router and gateway run here."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cli.admin import check_installed
from serving.cli.machines import ADDRESSES_NAME, locked, run_directory
from serving.cli.run import add_import_options, find_checkpoint
from serving.gateway.settings import DEFAULT_LISTEN
from stages.errors import InputError, ServiceError
from stages.host.commands import check_positive
from stages.progress import ProgressLine
from stages.signals import ends_cleanly, run_interruptible
from stages.wire.web_access import check_framework

if TYPE_CHECKING:
    from serving.router.paths import HostLink
    from serving.router.topology import HostEntry, Topology
    from stages.checkpoint.release_store import ReleaseManifest
    from stages.importing.importing import StageHost
    from stages.v1 import stage_pb2
    from stages.wire.rendezvous import Rendezvous, RunDirectory
    from stages.wire.tls import Security

# Modules that need gRPC or torch are imported when the command runs.

ANSWER_S = 10.0  # for the answer to Describe
POLL_S = 0.2
MEGABYTE = 1e6
DEFAULT_RENDEZVOUS = "0.0.0.0:7790"
TICKET_DAYS = 1.0


def add_serve(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("model", type=Path, metavar="MODEL", help="a .gguf file, a Hugging Face folder or a checkpoint")
    add("--wait", type=int, metavar="N", help="machines that share the model (those that joined before, at least 1)")
    add("--listen", default=DEFAULT_RENDEZVOUS, metavar="HOST:PORT", help=f"where they join ({DEFAULT_RENDEZVOUS})")
    add("--address", metavar="HOST:PORT[,...]", help="what they dial, where it is not this machine's own address")
    add("--port", type=int, default=7700, metavar="P", help="the router's, on loopback (7700)")
    add("--http", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"the API and the page ({DEFAULT_LISTEN})")
    add("--threads", type=int, default=1, metavar="N", help="processor threads of the router (1)")
    add_import_options(serve)
    add("--tokens", type=Path, metavar="FILE", help="who may ask the router, from `onesweep token`")


def run_serve(options: argparse.Namespace) -> int:
    check_framework("--http")
    check_installed()
    from stages.wire.rendezvous import MOST_MACHINES

    check_positive(options, "context", "threads", "port", "wait")
    if (options.wait or 1) > MOST_MACHINES:
        raise InputError(f"--wait must be at most {MOST_MACHINES}, not {options.wait}")
    progress = ProgressLine()
    with ends_cleanly(), closing(progress), locked(run_directory()):
        _serve(options, progress)
    return 0


def _serve(options: argparse.Namespace, progress: ProgressLine) -> None:
    from serving.cli.deploy import read_release
    from serving.cli.deployment import Deployment, check_free, new_directory, present
    from serving.router.topology import Topology, local_topology
    from stages.wire.rendezvous import RunDirectory
    from stages.wire.tls import Security
    from stages.wire.tokens import read_tokens

    if options.tokens is not None:
        read_tokens(options.tokens)
    run = RunDirectory(run_directory())
    router = f"127.0.0.1:{options.port}"
    security = Security(run.tls)
    # Before machines are asked for anything: a router that runs here may be using them.
    nobody = Topology(_entries(["nobody"]), router, certificates=run.directory)
    directory = new_directory(nobody)
    check_free(nobody, options.http, ())
    with _rendezvous(run, options, progress.say) as rendezvous:
        topology = replace(nobody, hosts=_entries(_wait(rendezvous, run, options, progress)))
        hosts = topology.hosts
        progress.at(f"asking {len(hosts)} machines for their memory and speed")
        waiting = run_interruptible(_describe_all(topology, security))
        checkpoint, parts = find_checkpoint(options, len(hosts), progress, waiting)
        shares = local_topology(len(hosts), parts, checkpoint).hosts
        placed = tuple(replace(host, blocks=share.blocks) for host, share in zip(hosts, shares, strict=True))
        topology = replace(topology, hosts=placed)
        contents = read_release(checkpoint)
        rendezvous.neighbours = _neighbours(topology)
        run_interruptible(_bring_all(topology, security, contents, waiting, progress))
        deployment = Deployment.start(
            topology,
            checkpoint,
            directory,
            options.threads,
            router_options=["--tokens", str(options.tokens.resolve())] if options.tokens else [],
            http=options.http,
            hosts_run=True,
        )
        present(deployment, options.http, progress, 'try        onesweep generate "The sea"')


@contextmanager
def _rendezvous(run: RunDirectory, options: argparse.Namespace, say: Callable[[str], object]) -> Iterator[Rendezvous]:
    """The rendezvous, on a thread of its own for as long as the model is served; this process and its children dial
    machines over it. Raises OnesweepError where it cannot listen."""
    from stages.wire.channel import LINKS_VARIABLE, parse_address
    from stages.wire.links import LinkProxy, own_addresses
    from stages.wire.rendezvous import Rendezvous
    from stages.wire.tickets import MOST_ADDRESSES

    host, port = parse_address(options.listen, "--listen")
    if port == 0:
        raise InputError("--listen needs a port: tickets say it")
    if options.address:
        addresses = tuple(options.address.split(","))
        if len(addresses) > MOST_ADDRESSES:
            raise InputError(f"--address takes at most {MOST_ADDRESSES} addresses, not {len(addresses)}")
        for address in addresses:
            parse_address(address, "--address")
    elif host in ("0.0.0.0", "::"):
        addresses = (*own_addresses(port)[: MOST_ADDRESSES - 1], f"127.0.0.1:{port}")
    else:
        addresses = (options.listen,)
    rendezvous, started = Rendezvous(run, say), threading.Event()
    failure: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        ends.append((asyncio.get_running_loop(), stop))
        try:
            async with rendezvous.serving(options.listen), await LinkProxy(rendezvous.dial).open():
                rendezvous.proxy = os.environ[LINKS_VARIABLE]
                rendezvous.tell()
                started.set()
                await stop.wait()
        except BaseException as error:
            failure.append(error)
            raise
        finally:
            started.set()

    ends = list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
    thread = threading.Thread(target=_quietly, args=(main,), daemon=True)
    thread.start()
    started.wait()
    if failure:
        raise failure[0]
    (run.directory / ADDRESSES_NAME).write_text(json.dumps(addresses), encoding="utf-8")
    try:
        yield rendezvous
    finally:
        loop, stop = ends[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def _quietly(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with suppress(BaseException):  # told to who waits for the thread's start
        asyncio.run(main())


def _wait(rendezvous: Rendezvous, run: RunDirectory, options: argparse.Namespace, progress: ProgressLine) -> list[str]:
    """Names of the machines that are to share the model, once they are there. Prints a ticket where some must join."""
    from serving.cli.machines import ticket_of

    known = len(rendezvous.machines)
    count = options.wait or max(1, known)
    if (missing := count - known) > 0:
        _, secret = run.invitations.add(missing, TICKET_DAYS)
        uses = f"{missing} machines" if missing > 1 else "a machine"
        progress.say(f"on each machine, for {uses} and a day:\n\n    onesweep join {ticket_of(run, secret)}\n")
    while len(present := rendezvous.present) < count:
        names = f" ({', '.join(present)})" if present else ""
        absent = [name for name in list(rendezvous.machines) if name not in present]
        away = f"; not there: {', '.join(absent)} (--wait {len(present)} does without)" if absent and present else ""
        progress.at(f"waiting for machines: {len(present)} of {count}{names}{away}")
        time.sleep(POLL_S)
    return present[:count]


def _entries(names: Sequence[str]) -> tuple[HostEntry, ...]:
    from serving.router.topology import HostEntry
    from stages.wire.links import link_address

    return tuple(HostEntry(name, link_address(name), (i,), link_address(name)) for i, name in enumerate(names))


def _neighbours(topology: Topology) -> dict[str, set[str]]:
    """Whom each machine hands work to."""
    by_address = {host.address: host.name for host in topology.hosts}
    return {host.name: {by_address[address] for address in topology.successors(host)} for host in topology.hosts}


@asynccontextmanager
async def _links(topology: Topology, security: Security) -> AsyncIterator[list[HostLink]]:
    """A link to each host. Raises InputError where one may not be dialled."""
    from serving.router.paths import HostLink

    links: list[HostLink] = []
    try:
        for host in topology.hosts:
            links.append(HostLink(host, ANSWER_S, security))
        yield links
    finally:
        await asyncio.gather(*(link.relay.close(0) for link in links))


async def _describe_all(topology: Topology, security: Security) -> list[StageHost]:
    """Speed and room of every host. Raises ServiceError that names those that do not answer, or take no stage."""
    from stages.importing.importing import StageHost
    from stages.wire.status import StatusError

    async with _links(topology, security) as links:
        outcomes = await asyncio.gather(*map(_described, links), return_exceptions=True)
        problems = []
        hosts = []
        for link, outcome in zip(links, outcomes, strict=True):
            address = link.entry.address
            if isinstance(outcome, StatusError):
                problems.append(outcome.message)
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            assert link.info is not None
            room = link.info.room
            if not link.info.HasField("room"):
                problems.append(f"host {address} was started with a checkpoint of its own")
            elif not 0 < room.speed < math.inf:
                problems.append(f"host {address} measured a speed that cannot be")
            hosts.append(StageHost(room.speed, room.memory_bytes, address))
    if problems:
        raise ServiceError(f"{'; '.join(problems)}; each must run `onesweep join`")
    return hosts


async def _described(link: HostLink) -> None:
    """Describe a machine that may be between two servers. Raises StatusError."""
    from stages.wire.status import StatusError

    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            await link.describe()
            return
        except StatusError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(POLL_S)


async def _bring_all(
    topology: Topology,
    security: Security,
    contents: ReleaseManifest,
    waiting: Sequence[StageHost],
    progress: ProgressLine,
) -> None:
    """Have every host hold its stage; nothing is sent to one that does. Raises OnesweepError."""
    from serving.router.rollout import load, send
    from stages.checkpoint.release_store import release_files
    from stages.v1 import stage_pb2
    from stages.wire.status import StatusError

    assert contents.root is not None
    async with _links(topology, security) as links:

        async def missing_stage(link: HostLink, host: StageHost) -> stage_pb2.Assignment | None:
            following = topology.successors(link.entry)
            await link.describe()
            if _holds(link, contents.name) and set(link.onward) == set(following):
                return None
            blocks = link.entry.blocks
            drafts = topology.blocks - 1 in blocks  # by what is in local/
            files = release_files(contents.directories, lambda kind, i: drafts if kind == "local" else i in blocks)
            if (needed := sum(part.bytes for part in files.values())) > host.memory_bytes:
                raise InputError(
                    f"host {host.name}: its stage takes {needed / MEGABYTE:,.1f} MB, it has room for "
                    f"{host.memory_bytes / MEGABYTE:,.1f}: {(needed - host.memory_bytes) / MEGABYTE:,.1f} MB are "
                    f"missing; free memory there, or cut the model anew ({contents.root} is its cut)"
                )
            return stage_pb2.Assignment(blocks=blocks, next=following)

        async def bring(link: HostLink, assignment: stage_pb2.Assignment) -> None:
            progress.at(f"sending {link.entry.address} its stage")
            sent_bytes = await send(link, contents, assignment)
            progress.say(f"{link.entry.address}: {sent_bytes / MEGABYTE:.1f} MB sent, blocks {link.entry.span}")

        try:
            needed = await asyncio.gather(*map(missing_stage, links, waiting))
            jobs = [(link, assignment) for link, assignment in zip(links, needed, strict=True) if assignment]
            # No host changes its stage before all have their files: a transfer that fails leaves what was served.
            await asyncio.gather(*(bring(link, assignment) for link, assignment in jobs))
            await asyncio.gather(*(load(link, contents.name, (), assignment) for link, assignment in jobs))
            progress.at(f"loading {contents.name} on {len(jobs)} hosts")
            await asyncio.gather(*(_loaded(link, contents.name) for link, _ in jobs))
        except StatusError as refusal:
            raise ServiceError(refusal.message) from None


def _holds(link: HostLink, release: str) -> bool:
    """True if the host has loaded its blocks of a release."""
    held = {each.name for each in link.held.values()}
    return link.info is not None and tuple(link.info.blocks) == link.entry.blocks and release in held


async def _loaded(link: HostLink, release: str) -> None:
    """Return when the host, which listens anew, has loaded its stage. Raises ServiceError."""
    from serving.router.rollout import LOAD_S
    from stages.wire.status import StatusError

    deadline, problem = time.monotonic() + LOAD_S, "no answer"
    while time.monotonic() < deadline:
        # A host that is between two servers does not answer for a moment.
        try:
            await link.describe()
        except StatusError as refusal:
            problem = refusal.message
        else:
            assert link.info is not None
            if _holds(link, release):
                return
            problem = link.info.not_ready_reason
            if "cannot be served" in problem:
                break
        await asyncio.sleep(POLL_S)
    raise ServiceError(f"host {link.entry.address} does not serve its stage: {problem}")
