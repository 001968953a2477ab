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
    what.add_argument("--export", type=Path, metavar="DIR", help="train nothing: export a checkpoint that hosts serve")
    add("--trains", choices=("slots", "block"), default="slots", help="slots (default): pretrained weights stay frozen")
    add("--anchor-head", choices=("own", "last"), default="last", help="head of the next-token loss of --trains block")
    add("--anchor", type=float, metavar="W", help="weight of that loss (0.3)")
    add("--rank", type=int, default=32, metavar="N", help="rank of the slots' updates (32)")
    add("--steps", type=int, metavar="N")
    add("--seed", type=int, metavar="N")
    add("--json", action="store_true", help="print JSON")


def run_graft(options: argparse.Namespace) -> int:
    """Train a block, or export the chain."""
    from onesweep.stages.device import check_device
    from onesweep.trainer.blocks.data import within_memory

    with within_memory(check_device(options.device), "give fewer sequences in --config"):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from onesweep.trainer.grafting.store import GraftSettings
    from onesweep.trainer.grafting.training import open_graft, train_block

    options.profile = options.profile or "graft"
    config = config_of(options, anchor=options.anchor)
    graft = open_graft(options.checkpoint, options.out, options.rank, config, corpus_of(options), options.device)
    if options.block is None:
        _export(options, graft)
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
