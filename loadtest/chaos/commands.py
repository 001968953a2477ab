"""The commands `onesweep chaos`, `onesweep flood` and `onesweep soak`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import InputError, Interrupted, OnesweepError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.chaos.flood import FloodSettings
    from loadtest.chaos.run import ChaosResult
    from loadtest.chaos.settings import ChaosSettings

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

DEFAULT_PROFILE = "links-60"


def register(subparsers: Subparsers) -> None:
    from loadtest.load.access import add_access_options
    from loadtest.training.commands import add_training

    chaos = subparsers.add_parser("chaos", help="faults under load: nothing may be lost, no text may change")
    _add_run(chaos, minutes=10.0)
    chaos.add_argument("--faults", metavar="F[,F]", help="kinds, such as kill,freeze (all that can be done)")
    chaos.add_argument("--count", type=int, metavar="N", help="faults (2.4 a minute, each kind at least once)")
    chaos.add_argument("--audit", type=float, default=0.0, metavar="S", help="share of sweeps computed again (0)")
    chaos.set_defaults(run=run_chaos_command)
    kinds = chaos.add_subparsers(title="what", metavar="WHAT")
    add_training(kinds.add_parser("training", help="faults under a training: no accepted update may be lost"))

    soak = subparsers.add_parser("soak", help="steady load for a long time: memory and descriptors must stay")
    _add_run(soak, minutes=30.0)
    soak.set_defaults(run=run_soak_command)

    flood = subparsers.add_parser("flood", help="many times more users than the knee: what is still answered")
    flood.add_argument("--at", type=float, default=10.0, metavar="X", help="users, in those of the knee (10)")
    flood.add_argument("--knee", type=int, metavar="U", help="users of the knee (found: 1, 2, 4 ... users)")
    flood.add_argument("--polite", type=int, default=1, metavar="U", help="a second crowd beside it; 0 = none (1)")
    flood.add_argument("--keys", action="store_true", help="each crowd has a token: one may not live off the other")
    flood.add_argument("--mode", default="sweep", metavar="M", help="what is asked for (sweep)")
    flood.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    flood.add_argument("--seconds", type=float, default=15.0, metavar="S", help="length of each measurement (15)")
    flood.add_argument("--timeout-s", type=float, default=60.0, metavar="S", help="deadline of a request (60)")
    flood.add_argument("--profile", metavar="P", help="links between the hosts; loopback needs no root (loopback)")
    flood.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: shipped weights")
    add_access_options(flood)
    flood.add_argument("--max-requests", type=int, metavar="N", help="that the router takes at once (its default)")
    flood.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    flood.set_defaults(run=run_flood_command)


def _add_run(parser: argparse.ArgumentParser, minutes: float) -> None:
    parser.add_argument("--minutes", type=float, default=minutes, metavar="M", help=f"of load ({minutes:g})")
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="P",
        help=f"links; loopback needs no root, and cannot be cut ({DEFAULT_PROFILE})",
    )
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="profiles of your own")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the schedule and of the texts (0)")
    parser.add_argument("--requests-at-once", type=int, default=4, metavar="N", help="steady load (4)")
    parser.add_argument("--patience-s", type=float, default=60.0, metavar="S", help="a client gives up after (60)")
    parser.add_argument("--modes", metavar="M[,M]", help="what is asked for (all that are served)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: shipped weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with a time line")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the time line alone")


def run_chaos_command(options: argparse.Namespace) -> int:
    from loadtest.chaos.faults import FAULTS

    kinds = names(options.faults, "--faults") or tuple(FAULTS)
    return _run(options, kinds, options.count, options.audit)


def run_soak_command(options: argparse.Namespace) -> int:
    return _run(options, (), None)


def _run(options: argparse.Namespace, kinds: tuple[str, ...], count: int | None, audit: float = 0.0) -> int:
    from loadtest.chaos.page import chaos_page
    from loadtest.chaos.picture import time_line
    from loadtest.chaos.record import chaos_record
    from loadtest.chaos.run import run_chaos
    from loadtest.chaos.settings import check_settings
    from loadtest.machine import commit, this_machine
    from serving.deployment import ends_cleanly

    settings = _settings(options, kinds, count, audit)
    check_settings(settings)
    check_files(options)
    machine, command = this_machine(), shlex.join(["onesweep", *sys.argv[1:]])
    with ends_cleanly():
        result = run_chaos(settings, lambda words: print(words, flush=True))
    _show(result)
    about = (result, command, commit(), machine)
    write_files(options, lambda: chaos_record(*about), lambda: chaos_page(*about), lambda: time_line(result))
    if result.trouble:
        raise OnesweepError("something was lost, wrong, left behind or growing: see above")
    return 0


def run_flood_command(options: argparse.Namespace) -> int:
    from loadtest.chaos.flood import check_flood, run_flood
    from loadtest.chaos.flood_keys import two_keys
    from loadtest.chaos.flood_report import flood_notes, flood_record
    from loadtest.destination import check_destination, write_json
    from loadtest.load.generator import check_locust
    from loadtest.load.prompts import make_cases
    from loadtest.load.run import check_settings
    from loadtest.load.table import run_line, run_table
    from loadtest.load.target import check_target, open_target
    from loadtest.load.texts import Texts
    from loadtest.machine import commit, this_machine
    from serving.deployment import ends_cleanly
    from serving.modes import MODES

    settings = _flood_settings(options)
    load = settings.load
    check_flood(settings)
    check_settings(load)
    if load.mode not in MODES:
        raise InputError(f"unknown mode {load.mode!r}; choose from {', '.join(MODES)}")
    check_target(load.target)
    check_locust()
    if options.json:
        check_destination(options.json)
    machine, command = this_machine(), shlex.join(["onesweep", *sys.argv[1:]])
    with ends_cleanly(), contextlib.ExitStack() as stack:
        if options.keys:
            settings = stack.enter_context(two_keys(settings))
        target = stack.enter_context(open_target(settings.load.target))
        cases = make_cases(load.cases, load.first_seed, load.max_bytes, target.facts().context_bytes)
        texts = Texts(target, cases, load.max_bytes)
        result = run_flood(settings, target, texts, lambda done: print(run_line(done), flush=True))
    print("\n" + run_table(result.results) + "\n\n" + "\n".join(flood_notes(result)), flush=True)
    if options.json:
        write_json(options.json, flood_record(result, command, commit(), machine))
    if result.trouble:
        raise OnesweepError(f"{result.trouble} requests failed, were lost or wrong")
    if any(each.interrupted for each in result.results):
        raise Interrupted("stopped early: the figures are those of the requests until then")
    if result.missed:
        raise OnesweepError("; ".join(result.missed))
    return 0


def _flood_settings(options: argparse.Namespace) -> FloodSettings:
    from loadtest.chaos.flood import FloodSettings
    from loadtest.load.access import Access
    from loadtest.load.run import LoadSettings
    from loadtest.load.target import LOOPBACK, TargetSettings

    profile, access = options.profile or LOOPBACK, Access.of(options)
    if options.keys and (options.router is not None or profile != LOOPBACK):
        raise InputError("--keys is for hosts on loopback that are started here: leave out --router and --profile")
    limit = ("--max-requests", str(options.max_requests)) if options.max_requests is not None else ()
    if limit and options.router is not None:
        raise InputError("--router names a deployment that is there, as it is: leave out --max-requests")
    load = LoadSettings(
        TargetSettings(profile, access, options.checkpoint, router_options=limit),
        options.mode,
        options.knee or 1,
        options.seconds,
        max_bytes=options.bytes,
        timeout_s=options.timeout_s,
    )
    return FloodSettings(load, options.at, options.knee, options.polite)


def _show(result: ChaosResult) -> None:
    from loadtest.chaos.table import (
        FAULT_HEAD,
        LIFE_HEAD,
        MODE_HEAD,
        fault_rows,
        life_rows,
        markdown,
        mode_rows,
        verdict,
    )

    print("\n" + markdown(MODE_HEAD, mode_rows(result)))
    if result.happened:
        print("\n" + markdown(FAULT_HEAD, fault_rows(result)))
    print("\n" + markdown(LIFE_HEAD, life_rows(result)))
    print("\n" + "\n".join(f"- {words}" for words in verdict(result)), flush=True)


def _settings(options: argparse.Namespace, kinds: tuple[str, ...], count: int | None, audit: float) -> ChaosSettings:
    from loadtest.chaos.cases import SETTINGS
    from loadtest.chaos.settings import ChaosSettings
    from serving.shipped import SHIPPED

    return ChaosSettings(
        (options.checkpoint or SHIPPED).resolve(),
        options.profile,
        options.minutes,
        options.requests_at_once,
        options.seed,
        options.patience_s,
        kinds,
        count,
        names(options.modes, "--modes") or tuple(SETTINGS),
        options.profiles,
        audit,
    )


def check_files(options: argparse.Namespace) -> None:
    from loadtest.destination import check_destination
    from loadtest.load.pictures import check_matplotlib

    for flag, path in (("--json", options.json), ("--html", options.html), ("--svg", options.svg)):
        if path is not None:
            check_destination(path, flag)
            if flag != "--json":
                check_matplotlib()


def write_files(
    options: argparse.Namespace,
    record: Callable[[], dict[str, Any]],
    page: Callable[[], str],
    line: Callable[[], str],
) -> None:
    """What was asked for of a run's figures, its report and its time line."""
    from loadtest.destination import write_json
    from loadtest.page import write_page

    if options.json:
        write_json(options.json, record())
    if options.html:
        write_page(options.html, page())
    if options.svg:
        write_page(options.svg, line() + "\n")


def names(text: str | None, flag: str) -> tuple[str, ...]:
    """Names of "A,B"; none where nothing was given. Raises InputError for an empty one."""
    found = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    if not all(found):
        raise InputError(f"{flag} {text!r} must be names with commas between them")
    return found
