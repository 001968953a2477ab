"""The command `plan`."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from stages.settings import add_flags, from_flags, setting
from trainer.options import add_config_options, add_data_options, config_of, corpus_of, given, print_json

if TYPE_CHECKING:
    from trainer.planning.cost import WorkerLink

# Modules that need torch are imported when the command runs.

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def count(text: str) -> float:
    """A number with K, M or B after it."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([KMB]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 350M, not {text!r}")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class ModelToPlan:
    """The model and its workers, where they are not those of the settings."""

    params: float | None = setting(None, "parameters in all, such as 350M: sets the width", type=count, metavar="N")
    block_count: int | None = setting(None, "parts that are trained apart", metavar="B")
    layers: int | None = setting(None, "of the whole model", metavar="L")
    workers: int | None = setting(None, "in all, equally many a block", metavar="W")
    steps: int | None = setting(None, "local steps of each worker")
    steps_per_round: int | None = setting(None, "", metavar="H")


@dataclass(frozen=True)
class LinkToPlan:
    """The link between a worker and the coordinator: a named one, and figures that win over it."""

    link: str | None = setting(None, "lan, links-20, links-60, links-150 or consumer", metavar="NAME")
    up_mbps: float | None = setting(None, "to the coordinator; wins over --link", metavar="M")
    down_mbps: float | None = setting(None, "from the coordinator; wins over --link", metavar="M")
    latency_ms: float | None = setting(None, "one way; wins over --link")


def add_plan(plan: argparse.ArgumentParser) -> None:
    add_config_options(plan)
    add_data_options(plan)
    add_flags(plan.add_argument_group("model", "defaults are those of the settings"), ModelToPlan)
    add_flags(plan.add_argument_group("link", "between a worker and the coordinator"), LinkToPlan)
    step = plan.add_argument_group("machine")
    step.add_argument("--step-s", type=float, metavar="S", help="seconds of a local step of the busiest part")
    step.add_argument("--measure", action="store_true", help="take a few such steps here instead; needs their memory")
    plan.add_argument("--json", action="store_true", help="print JSON")


def run_plan(options: argparse.Namespace) -> int:
    """Plan, and print it."""
    from stages.errors import InputError
    from trainer.planning.plan import describe, make_plan, measure_step, shape_model, staff, table

    if options.measure == (options.step_s is not None):
        raise InputError("say how long a step takes, --step-s SECONDS, or take some here: --measure; one of the two")
    asked, link = from_flags(ModelToPlan, options), _link(from_flags(LinkToPlan, options))
    config = config_of(options, rounds=given({"steps_per_round": asked.steps_per_round}))
    config = shape_model(config, asked.params, asked.block_count, asked.layers)
    config = staff(config, asked.workers, options.config is not None)
    step_s, activations = options.step_s, 0
    if options.measure:
        measured = measure_step(config, corpus_of(options))
        step_s, activations = measured.seconds, measured.activations
    rows = make_plan(config, link, step_s, options.config is not None, activations)
    if options.json:
        record = {
            "model": asdict(config.architecture),
            "parts": 1 if config.rounds.model == "ar" else config.architecture.parts,
            "replicas": config.rounds.replicas,
            "link": asdict(link),
            "step_s": step_s,
            "rows": [asdict(row) for row in rows],
        }
        print_json(record)
        return 0
    print(f"{describe(config)}, {step_s:.3g} s each; {link.up_mbps:g} Mbit/s up, {link.down_mbps:g} down, ", end="")
    print(f"{link.latency_ms:g} ms one way\n")
    print("\n".join(table(rows)))
    return 0


def _link(asked: LinkToPlan) -> WorkerLink:
    """Raises InputError."""
    from stages.errors import InputError, one_of
    from trainer.planning.cost import LINKS, WorkerLink

    own = given({name: value for name, value in asdict(asked).items() if name != "link"})
    if asked.link is None:
        if len(own) < 3:
            raise InputError(
                f"say what a worker's link is: --link with one of {', '.join(LINKS)}, or all of --up-mbps, --down-mbps "
                "and --latency-ms"
            )
        return WorkerLink(**own)
    if asked.link not in LINKS:
        raise InputError(f"no link {asked.link!r}{one_of(asked.link, LINKS, 'there are')}")
    return replace(LINKS[asked.link], **own)
