"""Commands of rounds over the network: `coordinate`, `work` and `rounds`."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from stages.log import LOG_FORMATS, check_log_format, start_log
from stages.security_options import add_server_options, security_of
from stages.token_options import add_token_options, token_of
from trainer.command_options import add_device_option

if TYPE_CHECKING:
    from types import FrameType

    from trainer.rounds.client import Link

# What needs torch is imported when a command runs.

MAX_PATIENCE_S = 1e7


def register_rounds(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of `onesweep`."""
    coordinate = subparsers.add_parser(
        "coordinate", help="give out a model's parts to workers, and merge what they learn"
    )
    coordinate.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, with a section [rounds]")
    coordinate.add_argument("--profile", help="onesweep (default) or blocktrain")
    coordinate.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text (default: Python's docs)")
    coordinate.add_argument("--own-data", action="store_true", help="let workers bring other text than this")
    coordinate.add_argument("--out", type=Path, default=Path("runs/chain"), help="the checkpoint (%(default)s)")
    coordinate.add_argument("--listen", required=True, metavar="HOST:PORT")
    coordinate.add_argument(
        "--lease", type=float, default=30.0, metavar="S", help="silence after which a place is free (30)"
    )
    coordinate.add_argument(
        "--publish-every", type=int, default=10, metavar="N", help="rounds between checkpoints (10)"
    )
    coordinate.add_argument("--page", metavar="HOST:PORT", help="serve a page of the run there, for browsers")
    coordinate.add_argument("--tokens", type=Path, metavar="FILE", help="who may work, from `onesweep token`")
    coordinate.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    coordinate.add_argument("--log-format", default="text", help=f"{' or '.join(LOG_FORMATS)} (text)")
    add_server_options(coordinate)
    coordinate.set_defaults(run=run_coordinate)

    work = subparsers.add_parser("work", help="train one part of a model for a coordinator")
    _add_coordinator_options(work)
    work.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text (default: Python's docs)")
    work.add_argument("--block", type=int, metavar="N", help="the part to train (default: whichever lacks a worker)")
    work.add_argument(
        "--name", help="of this worker; with a token, its key's name or NAME.MORE (default: this machine's)"
    )
    work.add_argument("--state", type=Path, metavar="DIR", help="where it keeps its state (default: runs/work/NAME)")
    work.add_argument("--config", type=Path, metavar="FILE", help="refuse a run of another architecture than in here")
    work.add_argument("--wait", action="store_true", help="where every place is taken, wait for one")
    add_device_option(work)
    work.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="how long to look for the coordinator (600)"
    )
    work.add_argument("--save-every", type=float, default=60.0, metavar="S", help="between two saves in a round (60)")
    work.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    work.add_argument(
        "--pace-s", type=float, default=0.0, metavar="S", help="rest in a local step until it took so long (0)"
    )
    work.add_argument("--log-format", default="text", help=f"{' or '.join(LOG_FORMATS)} (text)")
    work.set_defaults(run=run_work)

    rounds = subparsers.add_parser("rounds", help="watch a coordinator's run: parts, workers, who is late")
    _add_coordinator_options(rounds, positional=True)
    rounds.add_argument("--interval", type=float, default=1.0, metavar="S", help="least time between two looks (1)")
    rounds.add_argument("--once", action="store_true", help="one look")
    rounds.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to look for a coordinator that has gone (600)",
    )
    rounds.add_argument("--json", action="store_true", help="a line of JSON for each look")
    rounds.set_defaults(run=run_rounds)


def run_coordinate(options: argparse.Namespace) -> int:
    """Coordinate a run to its end."""
    from trainer.config import load_config
    from trainer.data import load_corpus
    from trainer.rounds.coordinator_settings import CoordinatorSettings
    from trainer.rounds.server import ServerSettings, coordinate
    from trainer.threads import set_threads

    start_log(check_log_format(options.log_format), "coordinator")
    set_threads(options.threads)
    server = ServerSettings(options.listen, security_of(options), options.tokens, options.page)
    settings = CoordinatorSettings(options.lease, options.publish_every, options.own_data)
    config = load_config(options.config, options.profile)
    plan = coordinate(config, load_corpus(options.data), options.out, server, settings)
    print(f"{options.out}: {len(plan.parts)} parts after {plan.rounds} rounds")
    return 0


def run_work(options: argparse.Namespace) -> int:
    """Work to the end of a run."""
    from stages.errors import InputError
    from stages.transport import check_name
    from trainer.config import load_config
    from trainer.data import load_corpus
    from trainer.rounds.device import check_device
    from trainer.rounds.fleet import Fleet
    from trainer.rounds.pace import Pace
    from trainer.rounds.plan import architecture_digest
    from trainer.rounds.worker import WorkerSettings, work
    from trainer.threads import set_threads

    name = check_name(options.name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64], "--name")
    if options.block is not None and not 0 <= options.block < 2**32:
        raise InputError(f"--block must be the number of a part, not {options.block}")
    if not 0 <= options.save_every <= MAX_PATIENCE_S:
        raise InputError(f"--save-every must be from 0 to {MAX_PATIENCE_S:g} seconds, not {options.save_every:g}")
    start_log(check_log_format(options.log_format), name)
    set_threads(options.threads)
    settings = WorkerSettings(
        name=name,
        state=options.state or Path("runs/work") / name,
        part=options.block,
        wait=options.wait,
        device=check_device(options.device),
        save_every_s=options.save_every,
        architecture=architecture_digest(load_config(options.config).architecture) if options.config else "",
        pace=Pace(Fleet(pace_s=options.pace_s)),
    )
    corpus, stop = load_corpus(options.data), _stop_on_signals()
    link = _link(options, stop)
    try:
        trained = work(link, corpus, settings)
    finally:
        link.close()
    print(f"{name}: the run is over; {trained} rounds trained here")
    return 0


def run_rounds(options: argparse.Namespace) -> int:
    """Show a run until it ends, through its coordinator's restarts."""
    import io
    import json
    from collections import deque

    from trainer.rounds.screen import Screen
    from trainer.rounds.snapshot import snapshot
    from trainer.rounds.view import RATE_S, duration, lines_of
    from trainer.v1.rounds_pb2 import WatchUpdate

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode has no bars
    link, screen = _link(options, threading.Event()), Screen(sys.stdout, sys.stdout.isatty() and not options.once)
    recent, shown = deque[WatchUpdate](), list[str]()

    def away(problem: str) -> None:
        words = f"{problem}; looking for it for {duration(options.patience)}"
        if options.json:
            print(words, file=sys.stderr, flush=True)
        else:
            screen.show([words, "", *shown] if screen.in_place else [words])

    for update in link.watch(options.interval, away):
        if options.json:
            print(json.dumps(snapshot(update)), flush=True)
        else:
            while recent and not 0 < update.seconds - recent[0].seconds <= RATE_S:
                recent.popleft()  # too long ago, or of a coordinator that began anew since
            shown = lines_of(update, recent[0] if recent else None)
            screen.show(shown)
            recent.append(update)
        if options.once:
            break
    link.close()
    return 0


def _add_coordinator_options(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    if positional:
        parser.add_argument("coordinator", metavar="HOST:PORT")
    else:
        parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    add_server_options(parser)
    add_token_options(parser)


def _link(options: argparse.Namespace, stop: threading.Event) -> Link:
    """Raises InputError."""
    from stages.errors import InputError
    from trainer.rounds.client import Link

    patience = getattr(options, "patience", 0.0)
    if not 0 <= patience <= MAX_PATIENCE_S:
        raise InputError(f"--patience must be from 0 to {MAX_PATIENCE_S:g} seconds, not {patience:g}")
    security = security_of(options)
    token = token_of(options, options.coordinator, security.tls)
    return Link(options.coordinator, security, token, patience, stop.is_set)


def _stop_on_signals() -> threading.Event:
    """An event that the first SIGINT or SIGTERM sets; a second one does not wait."""
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop
