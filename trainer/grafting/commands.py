"""`onesweep train graft`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onesweep.trainer.options import (
    add_config_options,
    add_data_options,
    add_device_option,
    config_of,
    corpus_of,
    positive,
    print_json,
)

if TYPE_CHECKING:
    from onesweep.trainer.grafting.training import Graft

# Modules that need torch are imported when the command runs.


def add_graft(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_config_options(parser)
    add_data_options(parser)
    add_device_option(parser)
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="an imported model")
    add("--out", type=Path, metavar="DIR", default=Path("runs/graft"), help="blocks (%(default)s)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--block", type=int, metavar="N", help="train this block")
    what.add_argument("--measure", action="store_true", help="train nothing: measure the whole chain, from noise")
    what.add_argument("--write", type=int, metavar="N", help="train nothing: write after N held-out prompts")
    what.add_argument("--export", type=Path, metavar="DIR", help="train nothing: export a checkpoint that hosts serve")
    add("--trains", choices=("slots", "block"), default="slots", help="slots (default): pretrained weights stay frozen")
    add("--anchor-head", choices=("own", "last"), default="last", help="head of the next-token loss of --trains block")
    add("--anchor", type=float, metavar="W", help="weight of that loss (0.3)")
    add("--rank", type=int, default=32, metavar="N", help="rank of the slots' updates (32)")
    add("--steps", type=int, metavar="N")
    add("--seed", type=int, metavar="N")
    add("--euler-steps", type=int, default=4, metavar="K", help="--measure, --write: Euler steps a block (4)")
    add("--windows", type=int, metavar="N", default=4, help="--measure: windows (%(default)s)")
    add("--temperature", type=positive, metavar="T", default=1.0, help="--write: sampling temperature (1)")
    add("--json", action="store_true", help="print JSON")


def run_graft(options: argparse.Namespace) -> int:
    """Train a block, or measure the chain."""
    from onesweep.stages.device import check_device
    from onesweep.trainer.blocks.data import within_memory

    with within_memory(check_device(options.device), "give fewer sequences in --config, or fewer --windows"):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from onesweep.trainer.grafting.store import GraftSettings
    from onesweep.trainer.grafting.training import open_graft, train_block

    options.profile = options.profile or "graft"
    config = config_of(options, anchor=options.anchor)
    graft = open_graft(options.checkpoint, options.out, options.rank, config, corpus_of(options), options.device)
    if options.block is None:
        (_export if options.export else _measure if options.measure else _write)(options, graft)
        return 0
    losses = train_block(graft, GraftSettings(options.block, options.trains, options.anchor_head))
    if options.json:
        print_json(losses)
    else:
        for name, nats in losses.items():
            print(f"{name:32} {nats:.3f}")
    return 0


def _export(options: argparse.Namespace, graft: Graft) -> None:
    from onesweep.trainer.grafting.training import export_chain

    manifest = export_chain(graft, options.export)
    mb = sum(part.bytes for part in manifest.parts if part is not None) / 1e6
    print(
        f"{options.export}: a chain of {len(manifest.parts)} blocks, {mb:.0f} MB; hosts serve it with sweep and chunked"
    )


def _measure(options: argparse.Namespace, graft: Graft) -> None:
    from onesweep.trainer.grafting.training import measure_chain

    found = measure_chain(graft, options.euler_steps, options.windows)
    if options.json:
        print_json(found)
        return
    for name, path in found.items():
        print(f"{name:18} " + " ".join(f"{point['sigma']:.2f}:{point['nats']:.3f}" for point in path))


def _write(options: argparse.Namespace, graft: Graft) -> None:
    from dataclasses import asdict

    from onesweep.stages.errors import InputError
    from onesweep.trainer.grafting.measure import Writing
    from onesweep.trainer.grafting.training import write_samples

    if options.write < 1:
        raise InputError(f"--write needs at least one prompt, not {options.write}")
    writing = Writing(options.write, steps=options.euler_steps, temperature=options.temperature)
    rows, texts = write_samples(graft, writing)
    if options.json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    for row, text in zip(rows, texts, strict=True):
        print(f"{row.name:14} {row.sweeps:3} sweeps {row.judge_nats:7.3f} nats {row.distinct_2:6.3f}  {text!r}")
