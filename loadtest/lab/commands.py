"""`onesweep wan ...`: an emulated wide-area network while its `up` runs, and programs in it."""

import argparse
import json
import os
import time
from dataclasses import asdict
from typing import NoReturn

from loadtest.commands import echo
from loadtest.lab.lab import RECORD, find_lab, temporary_lab
from loadtest.lab.namespaces import LabError
from loadtest.lab.profile import profile_named
from stages.errors import InputError
from stages.signals import ends_cleanly
from stages.wire.secret_files import make_state_directory, state_directory, write_file

POLL_S = 0.2


def add_wan_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--profile", required=True, metavar="P", help="profile, such as links-60, or FILE:NAME")
    up.add_argument("--hosts", type=int, default=3, metavar="N", help="hosts besides the router (3)")


def add_wan_exec(execute: argparse.ArgumentParser) -> None:
    execute.usage = "%(prog)s NODE -- COMMAND ..."
    execute.add_argument("node", metavar="NODE", help="router, host-1, ...")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="with its arguments")


def run_wan_up(options: argparse.Namespace) -> int:
    profile, directory = profile_named(options.profile), state_directory()
    make_state_directory(directory)
    if (other := find_lab(directory)) is not None:
        raise LabError(f"a lab is already up ({other.profile.name}): stop its `onesweep wan up` first")
    record = directory / RECORD
    with ends_cleanly(), temporary_lab(profile, options.hosts) as lab:
        try:
            write_file(record, json.dumps(asdict(lab)).encode())
            echo(f"{profile.name} is up: {', '.join(f'{node} {lab.address(node)}' for node in lab.places)}")
            echo("`onesweep wan exec NODE -- COMMAND` runs a program inside; Ctrl-C here stops the network")
            while lab.is_up:
                time.sleep(POLL_S)
        finally:
            record.unlink(missing_ok=True)
    raise LabError("the lab process has ended, so the network is gone")


def run_wan_exec(options: argparse.Namespace) -> NoReturn:
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        raise InputError("give a command to run: onesweep wan exec NODE -- COMMAND ...")
    if (lab := find_lab(state_directory())) is None:
        raise LabError("no lab is up; start one with `onesweep wan up --profile links-60`")
    # It replaces this process, so signals, terminal and exit code are its own.
    command = lab.command(options.node, argv, outlives_parent=True)
    os.execvp(command[0], command)
