"""The command `onesweep chaos training`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import OnesweepError

if TYPE_CHECKING:
    from loadtest.training.run import TrainingResult

DEFAULT_PROFILE = "links-60"


def add_training(parser: argparse.ArgumentParser) -> None:
    """Options of `chaos training`."""
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="of the run that ships (20)")
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="P",
        help=f"links; loopback needs no root, and cannot be cut ({DEFAULT_PROFILE})",
    )
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="profiles of your own")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the schedule (0)")
    parser.add_argument("--faults", metavar="F[,F]", help="kinds, such as kill,twin (all that can be done)")
    parser.add_argument("--count", type=int, metavar="N", help="faults (1.2 a minute, each kind at least once)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run of your own, which ends when it ends")
    parser.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text (default: Python's docs)")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="losses of the run without faults: kept there for the next time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with a time line")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the time line alone")
    parser.set_defaults(run=run_training_command)


def run_training_command(options: argparse.Namespace) -> int:
    from loadtest.chaos.commands import check_files, names, write_files
    from loadtest.destination import check_destination
    from loadtest.machine import commit, this_machine
    from loadtest.training.faults import FAULTS
    from loadtest.training.page import training_page
    from loadtest.training.picture import time_line
    from loadtest.training.record import training_record
    from loadtest.training.run import run_training_chaos
    from loadtest.training.settings import TrainingChaosSettings, check_settings
    from serving.deployment import ends_cleanly

    settings = TrainingChaosSettings(
        minutes=options.minutes,
        seed=options.seed,
        profile=options.profile,
        kinds=names(options.faults, "--faults") or tuple(FAULTS),
        count=options.count,
        config=options.config,
        data=options.data,
        profiles=options.profiles,
        reference=options.reference,
    )
    check_settings(settings)
    check_files(options)
    if options.reference is not None:
        check_destination(options.reference, "--reference")
    machine, command = this_machine(), shlex.join(["onesweep", *sys.argv[1:]])
    with ends_cleanly():
        result = run_training_chaos(settings, lambda words: print(words, flush=True))
    _show(result)
    about = (result, command, commit(), machine)
    write_files(options, lambda: training_record(*about), lambda: training_page(*about), lambda: time_line(result))
    if result.trouble:
        raise OnesweepError("something was lost or counted twice, had no end, or is worse than it may be: see above")
    return 0


def _show(result: TrainingResult) -> None:
    from loadtest.chaos.table import markdown
    from loadtest.training.table import tables, verdict

    for each in reversed(tables(result)):
        if each.rows:
            print("\n" + markdown(each.head, each.rows))
    print("\n" + "\n".join(f"- {words}" for words in verdict(result)), flush=True)
