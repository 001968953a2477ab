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

from stages.telemetry.observability import LOG_FORMATS, check_log_format, start_log
from stages.wire.tls import add_server_options, security_of
from stages.wire.tokens import add_token_options, token_of
from trainer.options import (
    add_config_options,
    add_data_options,
    add_device_option,
    assignments,
    choices,
    config_of,
    corpus_of,
    decimals,
    given,
    numbers,
    print_json,
    words,
)

if TYPE_CHECKING:
    from types import FrameType

    from trainer.rounds.client import RoundsClient
    from trainer.rounds.comparison import ArmResult


# Modules that need torch are imported when a command runs.

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
    from trainer.blocks.config import load_config
    from trainer.blocks.data import load_corpus
    from trainer.options import set_threads
    from trainer.rounds.coordinator import CoordinatorSettings
    from trainer.rounds.server import ServerSettings, coordinate

    start_log(check_log_format(options.log_format), "coordinator")
    set_threads(options.threads)
    server = ServerSettings(options.listen, security_of(options), options.tokens, options.page)
    settings = CoordinatorSettings(options.lease, options.publish_every, options.own_data)
    config = load_config(options.config, options.profile)
    spec = coordinate(config, load_corpus(options.data), options.out, server, settings)
    print(f"{options.out}: {len(spec.parts)} parts after {spec.rounds} rounds")
    return 0


def run_work(options: argparse.Namespace) -> int:
    """Work to the end of a run."""
    from stages.errors import InputError
    from stages.wire.channel import check_name
    from trainer.blocks.config import load_config
    from trainer.blocks.data import load_corpus
    from trainer.blocks.device import check_device
    from trainer.options import set_threads
    from trainer.rounds.simulated_workers import SimulatedWorkers, Throttle
    from trainer.rounds.spec import architecture_digest
    from trainer.rounds.worker import WorkerSettings, work

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
        throttle=Throttle(SimulatedWorkers(pace_s=options.pace_s)),
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

    from trainer.rounds.view import RATE_S, TerminalScreen, duration, lines_of, snapshot
    from trainer.v1.rounds_pb2 import WatchUpdate

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode has no bars
    link, screen = (
        _link(options, threading.Event()),
        TerminalScreen(sys.stdout, sys.stdout.isatty() and not options.once),
    )
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


def _link(options: argparse.Namespace, stop: threading.Event) -> RoundsClient:
    """Raises InputError."""
    from stages.errors import InputError
    from trainer.rounds.client import RoundsClient

    patience = getattr(options, "patience", 0.0)
    if not 0 <= patience <= MAX_PATIENCE_S:
        raise InputError(f"--patience must be from 0 to {MAX_PATIENCE_S:g} seconds, not {patience:g}")
    security = security_of(options)
    token = token_of(options, options.coordinator, security.tls)
    return RoundsClient(options.coordinator, security, token, patience, stop.is_set)


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


_FLEET = ("step_s", "pace_s", "slowness", "latency_s", "up_mbps", "down_mbps", "in_time", "late_rounds", "lost")


def add_rounds_options(parser: argparse.ArgumentParser) -> None:
    """Options of `train rounds`."""
    add_config_options(parser)
    add_data_options(parser)
    parser.add_argument(
        "--vary", type=choices, action="append", default=[], metavar="NAME=VALUE[,VALUE]", help="of [rounds], or below"
    )
    parser.add_argument(
        "--arm",
        type=assignments,
        action="append",
        metavar="'NAME=VALUE ...'",
        help="what differs in a way of its own; --vary varies each",
    )
    parser.add_argument("--engine", type=words, metavar="NAME[,NAME]", help="inprocess (default), grpc, torchft")
    parser.add_argument(
        "--one-place",
        nargs="?",
        const="too",
        choices=("too", "only"),
        help="and, or only, one worker a part that reads all replicas' text",
    )
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="N[,N]")
    parser.add_argument("--steps", type=int, help="local steps of each worker")
    fleet = parser.add_argument_group("workers", "of virtual ones, speeds and links; their seconds are not real")
    fleet.add_argument("--step-s", type=float, help="seconds of a local step (default: 1)")
    fleet.add_argument("--slowness", type=decimals, metavar="N[,N]", help="times a replica takes longer, one by one")
    fleet.add_argument("--pace-s", type=float, help="real workers: what a local step takes at least (default: 0)")
    fleet.add_argument("--latency-s", type=float, help="of a message (default: 0.1)")
    fleet.add_argument("--up-mbps", type=float, help="of a worker's link (default: 20)")
    fleet.add_argument("--down-mbps", type=float, help="likewise (default: 100)")
    fleet.add_argument("--in-time", type=float, metavar="SHARE", help="of the updates; others are late (default: 1)")
    fleet.add_argument("--late-rounds", type=float, metavar="N", help="by how many rounds (default: 1.5)")
    fleet.add_argument("--lost", type=float, metavar="SHARE", help="of the updates that never come (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"), help="one file an arm and seed")
    parser.add_argument("--json", action="store_true", help="for programs")


def run_train_rounds(options: argparse.Namespace) -> int:
    """Make rounds for every combination of what is varied; what is done already is not done again."""
    from dataclasses import asdict

    from trainer.rounds.comparison import arms, run_arms, table, tally_table
    from trainer.rounds.simulated_workers import SimulatedWorkers

    config, fleet = config_of(options), SimulatedWorkers(**given({name: getattr(options, name) for name in _FLEET}))
    engines, varied = given({"engine": options.engine}), dict(options.vary)
    ways = [{**engines, **own, **varied} for own in options.arm or [{}]]
    compared = [
        arm for i, way in enumerate(ways) for arm in arms(config, fleet, way, bool(options.one_place) and i == 0)
    ]
    if options.one_place == "only":
        compared = [arm for arm in compared if arm.pooled > 1]
    results = []
    for result in run_arms(compared, options.seeds, corpus_of(options), options.out):
        results.append(result)
        _say(result)
    if options.json:
        print_json({"results": [asdict(result) for result in results]})
    else:
        print("\n".join([*table(results), *tally_table(results)]))
    return 0


def add_audit_options(parser: argparse.ArgumentParser) -> None:
    """Options of `train audit`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the rounds are kept: it has a log.jsonl")


def run_audit(options: argparse.Namespace) -> int:
    """Check the log of rounds against its files; 1 with a line for each thing that should not be."""
    from trainer.rounds.audit import audit

    found = audit(options.directory)
    for problem in found.problems:
        print(f"wrong: {problem}")
    versions = ", ".join(f"{part} at version {number}" for part, number in found.versions.items())
    print(
        f"{found.accepted} updates accepted: {found.merged} merged, {found.pending} pending; {found.dropped} late ones "
        f"dropped by rule{'; ' if versions else ''}{versions}"
    )
    return 1 if found.problems else 0


def _say(result: ArmResult) -> None:
    print(f"{result.arm}, seed {result.seed}: {result.losses['next_byte']:.3f} nats", file=sys.stderr, flush=True)
