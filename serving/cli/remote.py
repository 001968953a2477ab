"""`onesweep serve MODEL --hosts ...`: each waiting host gets its stage; the router and the gateway run here."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cli.run import add_import_options, find_checkpoint
from serving.gateway.settings import DEFAULT_LISTEN
from stages.errors import InputError, ServiceError
from stages.host.commands import check_positive
from stages.progress import ProgressLine
from stages.signals import ends_cleanly, run_interruptible
from stages.wire.web_access import check_framework

if TYPE_CHECKING:
    from serving.router.paths import HostLink
    from serving.router.topology import Topology
    from stages.checkpoint.release_store import ReleaseManifest
    from stages.importing.importing import StageHost
    from stages.v1 import stage_pb2
    from stages.wire.tls import Security

# Modules that need gRPC or torch are imported when the command runs.

ANSWER_S = 10.0  # for the answer to Describe
POLL_S = 0.2
MEGABYTE = 1e6


def add_serve(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("model", type=Path, metavar="MODEL", help="a .gguf file, a Hugging Face folder or a checkpoint")
    add("--hosts", required=True, metavar="HOST:PORT[,...]", help="hosts of `onesweep host --empty`, in their order")
    add("--port", type=int, default=7700, metavar="P", help="the router's, on loopback (7700)")
    add("--http", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"the API and the page ({DEFAULT_LISTEN})")
    add("--threads", type=int, default=1, metavar="N", help="processor threads of the router (1)")
    add_import_options(serve)
    add("--tokens", type=Path, metavar="FILE", help="who may ask the router, from `onesweep token`")
    add("--tls-dir", type=Path, metavar="DIR", help="speak TLS: ca.pem, router.pem of `onesweep certs`")
    add("--insecure", action="store_true", help="accept plain text to and from other machines")


def run_serve(options: argparse.Namespace) -> int:
    from serving.cli.deploy import read_release
    from serving.cli.deployment import Deployment, check_free, new_directory, present
    from serving.router.topology import HostEntry, Topology, local_topology
    from stages.wire.tls import Security
    from stages.wire.tokens import read_tokens

    check_framework("--http")
    check_positive(options, "context", "threads", "port")
    addresses = options.hosts.split(",")
    hosts = tuple(HostEntry(f"host-{i + 1}", each, (i,), each) for i, each in enumerate(addresses))
    certificates = options.tls_dir.resolve() if options.tls_dir else None
    topology = Topology(hosts, f"127.0.0.1:{options.port}", certificates=certificates)
    if options.tokens is not None:
        read_tokens(options.tokens)
    security = Security(topology.tls_of("router"), options.insecure)
    # Before the hosts are asked for anything: a router that runs here may be using them.
    directory = new_directory(topology)
    check_free(topology, options.http, ())
    progress = ProgressLine()
    with ends_cleanly(), closing(progress):
        progress.at(f"asking {len(hosts)} hosts for their memory and speed")
        waiting = run_interruptible(_describe_all(topology, security))
        checkpoint, parts = find_checkpoint(options, len(hosts), progress, waiting)
        shares = local_topology(len(hosts), parts, checkpoint).hosts
        placed = tuple(replace(host, blocks=share.blocks) for host, share in zip(hosts, shares, strict=True))
        topology = replace(topology, hosts=placed)
        run_interruptible(_bring_all(topology, security, read_release(checkpoint), waiting, progress))
        router_options = ["--tokens", str(options.tokens.resolve())] if options.tokens else []
        router_options += ["--insecure"] if options.insecure else []
        deployment = Deployment.start(
            topology,
            checkpoint,
            directory,
            options.threads,
            router_options=router_options,
            http=options.http,
            hosts_run=True,
        )
        present(deployment, options.http, progress, 'try        onesweep generate "The sea"')
    return 0


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
        outcomes = await asyncio.gather(*(link.describe() for link in links), return_exceptions=True)
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
        raise ServiceError(
            f"{'; '.join(problems)}; each must run `onesweep host --empty --listen HOST:PORT --releases DIR` "
            "(with certificates: give --tls-dir here)"
        )
    return hosts


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
