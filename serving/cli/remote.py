"""`onesweep serve MODEL` and `invite`: joining machines get stages; rendezvous, router and gateway run here."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serving.cli.deployment import Deployment, new_directory, present
from serving.cli.machines import ADDRESSES_NAME, DOING_NAME, locked, run_directory, serving_here
from serving.cli.models import add_import_options, check_model, find_checkpoint
from serving.cli.parser import check_positive
from serving.cli.ports import check_free
from serving.cli.servers import HTTP, ROUTER
from serving.gateway.settings import DEFAULT_LISTEN, check_framework
from stages.clock import monotonic
from stages.errors import InputError, one_of
from stages.progress import ProgressLine, aligned, counted
from stages.signals import ends_cleanly, run_interruptible, start_ticks
from stages.wire.channel import LINKS_VARIABLE, parse_address
from stages.wire.links import LinkProxy, check_machine
from stages.wire.tokens import read_tokens

if TYPE_CHECKING:
    from stages.wire.rendezvous import Rendezvous, RunDirectory

# The command imports modules that need torch or cryptography only when it runs.

POLL_S, ADVISE_AFTER_S = 0.2, 10.0  # ADVISE_AFTER_S: after the last machine came; then advice is printed
GONE_S = 5.0  # for the rendezvous to drop a machine
REPLACE_AFTER_S = 30.0  # after this, new machines may replace those of the last ring
DEFAULT_RENDEZVOUS = "0.0.0.0:7790"


def add_serve(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("model", type=Path, metavar="MODEL", help="a .gguf file, a Hugging Face folder or a checkpoint")
    add("--wait", type=int, metavar="N", help="machines that share the model (as many as before, at least 1)")
    add("--listen", default=DEFAULT_RENDEZVOUS, metavar="HOST:PORT", help=f"where they join ({DEFAULT_RENDEZVOUS})")
    add("--address", metavar="HOST:PORT[,...]", help="address that they connect to, if not this machine's own")
    add("--port", type=int, default=7700, metavar="P", help="port of the router, on loopback (7700)")
    add("--http", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"API and web page ({DEFAULT_LISTEN})")
    add("--threads", type=int, default=1, metavar="N", help="processor threads of the router (1)")
    add_import_options(serve)
    add("--tokens", type=Path, metavar="FILE", help="access tokens, from `onesweep token`")


def run_serve(options: argparse.Namespace) -> int:
    check_framework("--http")
    from stages.wire.rendezvous import MAX_MACHINES

    check_positive(options, "context", "threads", "port", "wait")
    if (options.wait or 1) > MAX_MACHINES:
        raise InputError(f"--wait must be at most {MAX_MACHINES}, not {options.wait}")
    progress = _RecordedProgress(f"127.0.0.1:{options.port}")
    with ends_cleanly(), closing(progress), locked(run_directory()):
        _serve(options, progress)
    return 0


class _RecordedProgress(ProgressLine):
    """Progress that other commands on this machine can also show while no router answers them: `serving_here`."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self._router, self._doing = router, ""

    def at(self, what: str, share: float | None = None) -> None:
        self._tell(what)
        super().at(what, share)

    def close(self) -> None:
        self._tell("")
        super().close()

    def _tell(self, what: str) -> None:
        if what != self._doing:
            record = {"router": self._router, "doing": what, "process": os.getpid(), "began": start_ticks(os.getpid())}
            with suppress(OSError):  # a disk that is full or read-only does not end what is served
                (run_directory() / DOING_NAME).write_text(json.dumps(record), encoding="utf-8")
                self._doing = what


def _serve(options: argparse.Namespace, progress: ProgressLine) -> None:
    from serving.cli.machine_ring import MachineRing, nobody
    from stages.wire.rendezvous import RunDirectory

    check_model(options)  # before any machine joins
    if options.tokens is not None:
        read_tokens(options.tokens)
    run = RunDirectory(run_directory())
    # Before any call to the machines: a router running here may be using them.
    empty = nobody(f"127.0.0.1:{options.port}", run.directory)
    directory = new_directory(empty)
    check_free({ROUTER: empty.router, HTTP: options.http})
    with _rendezvous(run, options, progress.say) as rendezvous:
        ring = MachineRing(rendezvous, empty, progress)
        names = run_interruptible(rendezvous.here(ring.ordered(_wait(rendezvous, run, options, progress))))
        checkpoint, plan = find_checkpoint(options, len(names), progress, [ring.rooms[name] for name in names])
        ring.plan(checkpoint, plan.parts, names)
        run_interruptible(rendezvous.here(ring.bring(ring.topology, names)))
        deployment = Deployment.start(
            ring.topology,
            checkpoint,
            directory,
            threads=options.threads,
            router_options=["--tokens", str(options.tokens.resolve())] if options.tokens else [],
            http=options.http,
            hosts_run=True,
        )
        present(deployment, options.http, progress, 'try        onesweep generate "The sea"', supervise=ring.supervise)


@contextmanager
def _rendezvous(run: RunDirectory, options: argparse.Namespace, say: Callable[[str], object]) -> Iterator[Rendezvous]:
    """The rendezvous, on its own thread while the model is served; this process and its children dial machines through
    it. Raises OnesweepError if it cannot listen."""
    from stages.wire.rendezvous import Rendezvous
    from stages.wire.tickets import MAX_ADDRESSES, own_addresses

    host, port = parse_address(options.listen, "--listen")
    if port == 0:
        raise InputError("--listen needs a port: tickets contain it")
    if options.address:
        addresses = tuple(options.address.split(","))
        if len(addresses) > MAX_ADDRESSES:
            raise InputError(f"--address takes at most {MAX_ADDRESSES} addresses, not {len(addresses)}")
        for address in addresses:
            parse_address(address, "--address")
    elif host in ("0.0.0.0", "::"):
        addresses = (*own_addresses(port)[: MAX_ADDRESSES - 1], f"127.0.0.1:{port}")
    else:
        addresses = (options.listen,)
    rendezvous, ready = Rendezvous(run, say), Future[asyncio.Event]()

    async def main() -> None:
        stop = asyncio.Event()
        try:
            async with rendezvous.serving(options.listen):
                # closed at once: gRPC may hold connections after the end of their channels
                with closing(await LinkProxy(rendezvous.dial).open()):
                    rendezvous.proxy = os.environ[LINKS_VARIABLE]
                    rendezvous.write_links()
                    ready.set_result(stop)
                    await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    stop = ready.result()
    (run.directory / ADDRESSES_NAME).write_text(json.dumps(addresses), encoding="utf-8")
    try:
        yield rendezvous
    finally:
        rendezvous.loop.call_soon_threadsafe(stop.set)
        thread.join()


def _wait(rendezvous: Rendezvous, run: RunDirectory, options: argparse.Namespace, progress: ProgressLine) -> list[str]:
    """Wait for the machines that are to share the model and return their names: N of `--wait`, else those of the last
    ring, or after a while as many others. Prints a ticket if some must join."""
    from serving.cli.machine_ring import last_order

    last, begin, changed_at = last_order(run), monotonic(), monotonic()
    before = (list[str](), list[str]())

    def place(name: str) -> bool:
        return name not in last  # machines of the last ring come first

    if (missing := (options.wait or 1) - len(rendezvous.machines)) > 0:
        _, secret = run.invitations.add(missing, days=1)
        uses = f"{missing} machines" if missing > 1 else "a machine"
        progress.say(f"on each machine (valid for {uses} and a day):\n\n    onesweep join {ticket_of(run, secret)}\n")
    while True:
        known, present = sorted(rendezvous.machines, key=place), sorted(rendezvous.present, key=place)
        count = options.wait or max(1, min(len(last) or len(known), len(known)))
        absent = [name for name in known[:count] if name not in present and (name in last or not last)]
        # replacements need all files sent again: accept them only if the old machines stay away
        if len(present) >= count and (options.wait or not absent or monotonic() - begin > REPLACE_AFTER_S):
            return present[:count]
        if (known, present) != before:
            before, changed_at = (known, present), monotonic()
        names = f" ({', '.join(present)})" if present else ""
        remedies = [f"`onesweep invite --revoke {absent[0]}` removes it"] if absent else []
        remedies += [f"--wait {len(present)} starts with these"] if present and (absent or not options.wait) else []
        away = f"; missing: {', '.join(absent)}" if absent else ""
        how = f" ({', '.join(remedies)})" if remedies and monotonic() - changed_at > ADVISE_AFTER_S else ""
        progress.at(f"waiting for machines: {len(present)} of {count}{names}{away}{how}")
        time.sleep(POLL_S)


# `onesweep invite`


def add_invite(invite: argparse.ArgumentParser) -> None:
    invite.add_argument("name", metavar="NAME", nargs="?", default="", help="name of the machine (its own)")
    invite.add_argument("--uses", type=int, metavar="N", help="machines that may join with it (1)")
    invite.add_argument("--days", type=float, metavar="D", help="days until it expires (1)")
    revoked = "revoke ticket ID, or remove machine ID; without ID list both"
    invite.add_argument("--revoke", nargs="?", const="", metavar="ID", help=revoked)


def run_invite(options: argparse.Namespace) -> int:
    from stages.wire.link_quality import LinkRecord
    from stages.wire.rendezvous import RunDirectory

    if not (run_directory() / ADDRESSES_NAME).exists():
        raise InputError("nothing is served from here yet: start with `onesweep serve MODEL`")
    run = RunDirectory(run_directory())
    conflicts = [options.name] * bool(options.name)
    conflicts += [f"--{name}" for name in ("uses", "days") if getattr(options, name) is not None]
    if conflicts and options.revoke is not None:
        raise InputError(f"--revoke makes no ticket: leave out {conflicts[0]}, or --revoke")
    if options.revoke in run.machines():
        run.keep(options.revoke, None)
        deadline = monotonic() + GONE_S
        # until the rendezvous has dropped it, so that the router's next answer counts it as lost
        while serving_here() and options.revoke in LinkRecord.read(run.directory).ports and monotonic() < deadline:
            time.sleep(POLL_S)
        ends = "other machines accept its certificate until it expires, in 30 days at most"
        print(f"{options.revoke}: removed; the router refuses it from now on; {ends}")
    elif options.revoke == "":
        tickets = [each for each in run.invitations.all() if not each.problem(time.time())]
        rows = [[f"machine {name}", "", "", ""] for name in run.machines()]
        rows += [[f"ticket {each.id}", each.name, counted(each.uses, "use"), f"until {each.ends}"] for each in tickets]
        print("\n".join(aligned(rows)) or "no machine has joined, and no ticket is open")
    elif options.revoke is not None:
        given, tickets = options.revoke, run.invitations.all()
        if given not in {each.id for each in tickets}:
            known = [*run.machines(), *(each.id for each in tickets if not each.problem(time.time()))]
            raise InputError(f"there is no ticket or machine {given!r}{one_of(given, known) if known else ''}")
        run.invitations.revoke(given)
        print(f"{options.revoke}: revoked; machines that joined with it stay")
    else:
        name = check_machine(options.name) if options.name else ""
        uses, days = (1 if given is None else given for given in (options.uses, options.days))
        invitation, secret = run.invitations.add(uses, days, name)
        print(f"onesweep join {ticket_of(run, secret)}")
        print(f"ticket {invitation.id}; `onesweep invite --revoke {invitation.id}` revokes it", file=sys.stderr)
    return 0


def ticket_of(run: RunDirectory, secret: str) -> str:
    """The text of a ticket to a run."""
    from stages.wire.tickets import Ticket

    addresses = json.loads((run.directory / ADDRESSES_NAME).read_text(encoding="utf-8"))
    return Ticket(tuple(addresses), run.fingerprint, secret).text()
