"""`onesweep wan ...`: an emulated wide-area network that stays up until it is taken down."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from loadtest.lab.lab import Lab, require_lab, start_lab, stop_lab
from loadtest.lab.profile import Link, profile_named, read_profiles
from stages.errors import InputError
from stages.wire.secret_files import state_directory


def add_wan_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--profile", required=True, metavar="P", help="one of `wan profiles`")
    up.add_argument("--hosts", type=int, default=3, metavar="N", help="hosts beside the router (3)")
    add_wan_profiles(up)


def add_wan_exec(execute: argparse.ArgumentParser) -> None:
    execute.usage = "%(prog)s NODE -- COMMAND ..."
    execute.add_argument("node", metavar="NODE", help="router, host-1, ...")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="and its arguments")


def run_wan_up(options: argparse.Namespace) -> int:
    profile = profile_named(options.profile, options.profiles)
    lab = start_lab(profile, options.hosts, state_directory())
    print(f"{profile.name} is up: {', '.join(f'{node} {lab.address(node)}' for node in lab.nodes)}")
    print("`onesweep wan exec NODE -- COMMAND` runs a program inside, `onesweep wan down` ends it")
    return 0


def run_wan_status(options: argparse.Namespace) -> int:
    lab = require_lab(state_directory())
    print(f"{lab.profile.name}, process {lab.pid}, {len(lab.programs())} programs inside\n")
    print(_links_table(lab))
    return 0


def run_wan_down(options: argparse.Namespace) -> int:
    print(f"{stop_lab(state_directory()).profile.name} is down")
    return 0


def run_wan_exec(options: argparse.Namespace) -> NoReturn:
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        raise InputError("say what to run: onesweep wan exec NODE -- COMMAND ...")
    # It runs in this process's place: signals, terminal and exit code are its own.
    command = require_lab(state_directory()).command(options.node, argv, outlives_parent=True)
    os.execvp(command[0], command)


def run_wan_profiles(options: argparse.Namespace) -> int:
    profiles = read_profiles(options.profiles)
    width = max(map(len, profiles))
    for name in sorted(profiles):
        print(f"{name:{width}}  {profiles[name].description}".rstrip())
    return 0


def _links_table(lab: Lab) -> str:
    from loadtest.report.table import aligned  # imports numpy

    header = ["link", "delay ms", "jitter ms", "Mbit/s", "queue KB", "loss", "packets", "lost", "overflowed"]
    counters, rows = lab.counters(), []
    for source in lab.nodes:
        rows.append([f"{source} ({lab.address(source)})"])
        for destination in (node for node in lab.nodes if node != source):
            counts = counters[source, destination]
            figures = [str(counts[name]) for name in ("carried", "lost", "overflowed")]
            rows.append([f"  to {destination}", *_link_words(lab.profile.link(source, destination)), *figures])
    return aligned(header, [row + [""] * (len(header) - len(row)) for row in rows])


def _link_words(link: Link) -> list[str]:
    rate = "no limit" if link.rate_mbps is None else f"{link.rate_mbps:g}"
    queue = "-" if link.queue_bytes is None else f"{link.queue_bytes / 1000:g}"
    return [f"{link.delay_ms:g}", f"{link.jitter_ms:g}", rate, queue, f"{link.loss:g}"]


def add_wan_profiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="file with more profiles")
