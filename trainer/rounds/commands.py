"""Commands for rounds: `train coordinate`, `work`, `status`, `simulate` and `audit`."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stages.device import check_device
from stages.errors import ConfigError, InputError, printable
from stages.progress import ProgressLine, aligned, counted
from stages.settings import add_flags, from_flags, setting
from stages.signals import ask_to_stop, ends_at_once, on_signal
from stages.telemetry.observability import start_log
from stages.wire.channel import check_name
from stages.wire.secret_files import add_server_options, add_token_options
from stages.wire.status import record_of
from stages.wire.tls import LOOPBACK_ONLY, security_of
from stages.wire.tokens import token_of
from trainer.commands import add_own_and_shared, config_of, corpus_of
from trainer.rounds.settings import CoordinatorSettings, WatchSettings, WorkerSettings
from trainer.v1 import rounds_pb2

if TYPE_CHECKING:
    from trainer.rounds.client import RoundsClient


# A command imports modules that need torch only when it runs.


def add_coordinate(coordinate: argparse.ArgumentParser) -> None:
    add_own_and_shared(coordinate, CoordinatorSettings, "config data threads")
    add_server_options(coordinate)


def add_work(work: argparse.ArgumentParser) -> None:
    work.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    work.add_argument("--name", help="name of this worker; with a token, its key's name or NAME.SUFFIX (the host name)")
    work.add_argument("--state", type=Path, metavar="DIR", help="directory for its state (runs/work/NAME)")
    add_own_and_shared(work, WorkerSettings, "data threads")
    add_flags(work, WatchSettings, only=("patience_s",))
    add_server_options(work)
    add_token_options(work)


def add_status(rounds: argparse.ArgumentParser) -> None:
    add_flags(rounds, WatchSettings)
    add_server_options(rounds)
    add_token_options(rounds)


def is_open_to_others(settings: CoordinatorSettings) -> bool:
    """True if other owners' workers may join: with tokens, certificates, or plain text beyond this machine."""
    return settings.tokens is not None or settings.security != LOOPBACK_ONLY


def run_coordinate(options: argparse.Namespace) -> int:
    with ends_at_once():
        from trainer.rounds.service import coordinate

    start_log("text", "coordinator")
    settings = from_flags(CoordinatorSettings, options, security=security_of(options))
    config = config_of(options)
    if config.rounds.robust == "auto":
        scored = is_open_to_others(settings) and (options.data is not None or not settings.own_data)
        config = replace(config, rounds=replace(config.rounds, robust="scored" if scored else "none"))
    if config.rounds.robust == "scored" and settings.own_data and options.data is None:
        raise ConfigError(
            "robust = scored measures updates on this machine's text, but --own-data lets workers train on other text: "
            "give --data with text like theirs"
        )
    spec = coordinate(config, corpus_of(options), settings)
    print(f"{settings.out}: {counted(len(spec.parts), 'part')} after {counted(spec.rounds, 'round')}")
    return 0


def run_work(options: argparse.Namespace) -> int:
    if options.site is not None:
        # before the import of torch, which would log native stack traces instead of one sentence
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with ends_at_once():
        from trainer.rounds.site import Site
        from trainer.rounds.worker import work

    name = check_name(options.name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64], "--name")
    if options.part is not None and not 0 <= options.part < 2**32:
        raise InputError(f"--block must be the number of a part, not {options.part}")
    start_log("text", name)
    settings = from_flags(WorkerSettings, options, name=name, state=options.state or Path("runs/work") / name)
    check_device(settings.device)
    corpus, stop, watch = corpus_of(options), threading.Event(), from_flags(WatchSettings, options)
    if settings.site is None and (settings.machines > 1 or settings.machine):
        raise InputError("--machine and --machines need --site HOST:PORT, the address where the first machine listens")
    with on_signal(partial(ask_to_stop, stop)):
        site = Site(settings, options.insecure, watch.patience_s, stop.is_set) if settings.site is not None else None
        if site is not None and settings.machine:
            print(f"{name}: the run has ended; {counted(site.follow(corpus), 'step')} done with the site")
            return 0
        with closing(_link(options, watch, stop)) as link:
            trained = work(link, corpus, settings, site)
        if site is not None:
            site.end()
    print(f"{name}: the run has ended; {counted(trained, 'round')} trained here")
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Show a run until it ends, across its coordinator's restarts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal without Unicode
    settings = from_flags(WatchSettings, options)
    with closing(_link(options, settings, threading.Event())) as link:
        for update in link.watch(settings.interval_s):
            if settings.json:
                print(json.dumps(record_of(update)), flush=True)
            else:
                show(lines_of(update), settings.once)
            if settings.once:
                break
    return 0


def _link(options: argparse.Namespace, settings: WatchSettings, stop: threading.Event) -> RoundsClient:
    """Raises InputError."""
    from trainer.rounds.client import RoundsClient

    security = security_of(options)
    token = token_of(options, settings.coordinator, security.tls)
    return RoundsClient(settings.coordinator, security, token, settings.patience_s, stop.is_set)


@dataclass(frozen=True)
class SimulateSettings:
    vary: tuple[str, ...] = setting(
        (), "setting of [rounds], of the workers, or SECTION.NAME", action="append", metavar="NAME=VALUE[,VALUE]"
    )
    one_place: bool = setting(False, "also train with one worker per part, which reads all replicas' text")
    seeds: tuple[int, ...] = setting((0,), "")


add_simulate = partial(add_own_and_shared, own=SimulateSettings, shared="config data steps threads json")


def run_simulate(options: argparse.Namespace) -> int:
    """Make rounds for every combination of the varied settings."""
    with ends_at_once():
        from trainer.rounds.comparison import run_variants, table, variants

    flags, results = from_flags(SimulateSettings, options), []
    compared = variants(config_of(options), flags.vary, flags.one_place)
    for result in run_variants(compared, flags.seeds, corpus_of(options)):
        results.append(result)
        print(f"{result.variant}, seed {result.seed}: {result.losses['next_byte']:.3f} nats", file=sys.stderr)
    if options.json:
        record = {"results": [{**vars(each), "traffic": vars(each.traffic)} for each in results]}
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(table(results)))
    return 0


def add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the rounds, with a rounds.sqlite3")


def run_audit(options: argparse.Namespace) -> int:
    """Check the events of rounds against their files; prints a line per fault and returns 1 if there are any."""
    from trainer.rounds.store import audit

    found = audit(options.directory)
    for problem in found.problems:
        print(f"wrong: {problem}")
    print(found)
    return 1 if found.problems else 0


# A run on a terminal: parts, workers, and the late ones among them.

DOING = {
    rounds_pb2.DOING_WAITING: "waiting",
    rounds_pb2.DOING_FETCHING: "fetching",
    rounds_pb2.DOING_TRAINING: "training",
    rounds_pb2.DOING_SENDING: "sending",
}
PART_HEAD = ("part", "round", "left", "present", "arrived", "published", "losses in nats")
WORKER_HEAD = ("worker", "part", "device", "state", "round", "step", "busy", "up", "down", "silent", "accepted", "")


def lines_of(update: rounds_pb2.WatchUpdate) -> list[str]:
    """The run as two tables, of parts and of workers."""
    parts = {part.part: part for part in update.parts}
    return [
        *_head(update),
        "",
        *aligned([PART_HEAD, *(_part(part, update.rounds) for part in update.parts)]),
        "",
        *aligned([WORKER_HEAD, *(_worker(worker, parts.get(worker.part)) for worker in update.workers)]),
    ]


def _head(update: rounds_pb2.WatchUpdate) -> list[str]:
    seconds = max(update.seconds, 1e-9)  # since the coordinator's start
    moved = [
        f"{what} {size(count)} ({size(count / seconds)}/s)"
        for what, count in (("updates in", update.received_bytes), ("weights out", update.sent_bytes))
    ]
    state = rounds_pb2.RunState.Name(update.state).removeprefix("RUN_STATE_").lower()
    late, gone = sum(w.late for w in update.workers), sum(w.gone for w in update.workers)
    here = f"{len(update.workers) - gone} of {sum(part.replicas for part in update.parts)} workers present"
    counts = [f"{count} {what}" for what, count in (("late", late), ("gone", gone)) if count]
    lines = [
        f"run {printable(update.run[:12])}  {state}  {counted(update.rounds, 'round')}",
        "  ".join([", ".join([here, *counts]), *moved, f"in {duration(update.seconds)}"]),
    ]
    return [*lines, f"problem: {printable(update.problem)}"] if update.problem else lines


def _part(part: rounds_pb2.PartStatus, rounds: int) -> tuple[str, ...]:
    return (
        printable(part.name),
        f"{part.round}/{rounds}",
        duration(part.seconds_left) if part.HasField("seconds_left") else "-",
        f"{part.present}/{part.replicas}",
        str(part.arrived),
        str(part.published) if part.HasField("published") else "-",
        "  ".join(f"{printable(name.removesuffix('_nats'))} {nats:.3f}" for name, nats in sorted(part.losses.items())),
    )


def _worker(worker: rounds_pb2.WorkerStatus, part: rounds_pb2.PartStatus | None) -> tuple[str, ...]:
    name, open_round = (part.name, part.round) if part else (str(worker.part), 0)
    notes = [f"late: round {open_round} is open"] if worker.late else []
    if worker.problem:
        notes.append(printable(worker.problem))
    return (
        printable(worker.worker),
        f"{printable(name)}.{worker.replica}",
        printable(worker.device) or "-",
        "gone" if worker.gone else DOING.get(worker.doing, "joining"),
        str(worker.round),
        str(worker.steps),
        f"{worker.busy_seconds / worker.lived_seconds:.0%}" if worker.lived_seconds else "-",
        size(worker.sent_bytes),
        size(worker.received_bytes),
        duration(worker.silent_seconds),
        f"{worker.accepted}" + (f" ({worker.refused} refused)" if worker.refused else ""),
        "; ".join(notes),
    )


def size(count: float) -> str:
    """Bytes in readable form."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """A time in readable form."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def show(lines: Sequence[str], once: bool) -> None:
    """Print one page of text, on a terminal over the last page unless there is only one."""
    in_place = ProgressLine(sys.stdout).in_place and not once
    text = framed(lines, shutil.get_terminal_size()) if in_place else "\n".join(lines) + "\n\n"
    print(text, end="", flush=True)


def framed(lines: Sequence[str], size: os.terminal_size) -> str:
    """The top lines that fit, erasing the rest of older lines, so that nothing flickers or scrolls."""
    room = max(size.lines - 1, 1)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines"]
    return HOME + "".join(f"{line[: size.columns]}{END_OF_LINE}\n" for line in lines) + END_OF_SCREEN
