"""The command `plan`."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from trainer.options import add_config_options, add_data_options, config_of, corpus_of, given, print_json

if TYPE_CHECKING:
    from trainer.planning.cost import WorkerLink

# Modules that need torch are imported when the command runs.

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def register_plan(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `onesweep`."""
    plan = subparsers.add_parser(
        "plan",
        help="bytes, hours and memory of each variant of a run's rounds, before it starts",
        description="Bytes, hours, utilisation and memory of each variant of rounds, for a model and its links.",
    )
    add_config_options(plan)
    add_data_options(plan)
    model = plan.add_argument_group("model", "defaults are those of the settings")
    model.add_argument("--params", type=count, metavar="N", help="parameters in all, such as 350M: sets the width")
    model.add_argument("--block-count", type=int, metavar="B", help="parts that are trained apart")
    model.add_argument("--layers", type=int, metavar="L", help="of the whole model")
    model.add_argument("--workers", type=int, metavar="W", help="in all, equally many a block")
    model.add_argument("--steps", type=int, metavar="N", help="local steps of each worker")
    model.add_argument("--steps-per-round", type=int, metavar="H")
    link = plan.add_argument_group("link", "between a worker and the coordinator")
    link.add_argument("--link", metavar="NAME", help="lan, links-20, links-60, links-150 or consumer")
    link.add_argument("--up-mbps", type=float, metavar="M", help="to the coordinator; wins over --link")
    link.add_argument("--down-mbps", type=float, metavar="M", help="from the coordinator; wins over --link")
    link.add_argument("--latency-ms", type=float, metavar="MS", help="one way; wins over --link")
    step = plan.add_argument_group("machine")
    step.add_argument("--step-s", type=float, metavar="S", help="seconds of a local step of the busiest part")
    step.add_argument("--measure", action="store_true", help="take a few such steps here instead; needs their memory")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Plan, and print it."""
    from dataclasses import asdict

    from stages.errors import InputError
    from trainer.planning.plan import describe, make_plan, measure_step, shape_model, staff, table

    if options.measure == (options.step_s is not None):
        raise InputError("say how long a step takes, --step-s SECONDS, or take some here: --measure; one of the two")
    config, link = config_of(options, rounds=given({"steps_per_round": options.steps_per_round})), _link(options)
    config = shape_model(config, options.params, options.block_count, options.layers)
    config = staff(config, options.workers, options.config is not None)
    step_s, activations = options.step_s, None
    if options.measure:
        measured = measure_step(config, corpus_of(options))
        step_s, activations = measured.seconds, measured.activations
    rows = make_plan(config, link, step_s, options.config is not None, activations)
    if options.json:
        record = {
            "model": asdict(config.architecture),
            "parts": len(rows[0].traffic),
            "replicas": config.rounds.replicas,
            "link": asdict(link),
            "step_s": step_s,
            "rows": [row.to_record() for row in rows],
        }
        print_json(record)
        return 0
    print(f"{describe(config)}, {step_s:.3g} s each; {link.up_mbps:g} Mbit/s up, {link.down_mbps:g} down, ", end="")
    print(f"{link.latency_ms:g} ms one way\n")
    print("\n".join(table(rows)))
    return 0


def count(text: str) -> float:
    """A number with K, M or B after it."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([KMB]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 350M, not {text!r}")
    return float(match[1]) * UNITS[match[2]]


def _link(options: argparse.Namespace) -> WorkerLink:
    """Raises InputError."""
    from dataclasses import replace

    from stages.errors import InputError
    from trainer.planning.cost import LINKS, WorkerLink

    own = given({name: getattr(options, name) for name in ("up_mbps", "down_mbps", "latency_ms")})
    if options.link is None:
        if len(own) < 3:
            raise InputError(
                f"say what a worker's link is: --link with one of {', '.join(LINKS)}, or all of --up-mbps, --down-mbps "
                "and --latency-ms"
            )
        return WorkerLink(**own)
    if options.link not in LINKS:
        raise InputError(f"no link {options.link!r}; there are {', '.join(LINKS)}")
    return replace(LINKS[options.link], **own)
