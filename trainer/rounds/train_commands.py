"""Commands of rounds in this process: `train rounds` and `train audit`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command_options import (
    add_config_options,
    add_data_options,
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
    from trainer.rounds.comparison import Result

# What needs torch is imported when a command runs.

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


def run_rounds(options: argparse.Namespace) -> int:
    """Make rounds for every combination of what is varied; what is done already is not done again."""
    from dataclasses import asdict

    from trainer.rounds.comparison import arms, run_arms
    from trainer.rounds.fleet import Fleet
    from trainer.rounds.tables import table
    from trainer.rounds.tally_table import tally_table

    config, fleet = config_of(options), Fleet(**given({name: getattr(options, name) for name in _FLEET}))
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


def add_experiment_options(parser: argparse.ArgumentParser) -> None:
    """Options of `train experiment`."""
    parser.add_argument("name", metavar="NAME", help="one of those in docs/training.md, such as bytes or late")
    add_data_options(parser)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], metavar="N[,N]")
    parser.add_argument("--steps", type=int, help="local steps of each worker, if not those of the experiment")
    parser.add_argument("--finished", action="store_true", help="the table of what is there already; train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="one file an arm and seed")
    parser.add_argument("--json", action="store_true", help="for programs")


def run_experiment(options: argparse.Namespace) -> int:
    """Answer one question on a small model; what is done already is not done again."""
    from dataclasses import asdict

    from trainer.rounds.comparison import finished, run_arms
    from trainer.rounds.experiments import experiment_named
    from trainer.rounds.tables import table

    experiment = experiment_named(options.name)
    corpus, out = corpus_of(options), options.out / options.name
    compared = experiment.arms(options.steps)
    results = finished(compared, options.seeds, corpus, out)
    if not options.finished:
        results = []
        for result in run_arms(compared, options.seeds, corpus, out):
            results.append(result)
            _say(result)
    if options.json:
        print_json({"question": experiment.question, "results": [asdict(result) for result in results]})
    else:
        print("\n".join(table(results, experiment.losses, experiment.columns, experiment.against)))
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


def _say(result: Result) -> None:
    print(f"{result.arm}, seed {result.seed}: {result.losses['next_byte']:.3f} nats", file=sys.stderr, flush=True)
