"""Commands that train nets that draw: `train pictures blocks`, `whole`, `local`, `experts`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.options import add_threads_option, given, set_threads

if TYPE_CHECKING:
    from stages.checkpoint.manifest import Manifest
    from trainer.pictures.data import PictureSet
    from trainer.pictures.training import PictureConfig

SIZES = ("patch", "parts", "layers", "features", "heads")
SETTINGS = ("steps", "batch", "seed", "learning_rate")

# Modules that need torch are imported when a command runs: help should not wait for it.


def run_blocks(options: argparse.Namespace) -> int:
    """Train a chain's blocks."""
    from trainer.pictures.training import train_picture_blocks

    config, pictures = _begin(options)
    return _end(options, train_picture_blocks(config, pictures, options.out, options.block, options.start))


def run_whole(options: argparse.Namespace) -> int:
    """Train the undivided net."""
    from trainer.pictures.training import train_undivided

    config, pictures = _begin(options)
    return _end(options, train_undivided(config, pictures, options.out, config.parts, options.start))


def run_local(options: argparse.Namespace) -> int:
    """Train a net of one block's size for all noise levels."""
    from dataclasses import replace

    from trainer.pictures.training import train_undivided

    config, pictures = _begin(options)
    # As many layers x pictures as all blocks together.
    config = replace(config, steps=config.steps * config.parts)
    return _end(options, train_undivided(config, pictures, options.out, 1, options.start))


def run_experts(options: argparse.Namespace) -> int:
    """Train experts and their router net."""
    from trainer.pictures.experts import train_experts

    config, pictures = _begin(options)
    manifest = train_experts(config, pictures, options.out, options.experts, options.expert, options.start)
    return _end(options, manifest)


def _begin(options: argparse.Namespace) -> tuple[PictureConfig, PictureSet]:
    from stages.settings import from_toml, read_toml
    from trainer.pictures.data import load_pictures
    from trainer.pictures.training import PictureConfig

    set_threads(options.threads)
    base = from_toml(PictureConfig, read_toml(options.config), str(options.config)) if options.config else None
    flags = given({name: getattr(options, name) for name in (*SIZES, *SETTINGS)})
    if "learning_rate" in flags:
        flags["matrix_learning_rate"] = flags["learning_rate"]
    return from_toml(PictureConfig, flags, "flags", base or PictureConfig()), load_pictures(options.data)


def _end(options: argparse.Namespace, manifest: Manifest) -> int:
    for name, losses in manifest.metrics.items():
        print(f"{name:10} loss on validation pictures {next(iter(losses.values())):.4f}")
    done = sum(part is not None for part in manifest.parts)
    print(f"{options.out}: {done} of {len(manifest.parts)} parts trained")
    return 0


def add_blocks(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, Path("runs/pictures/chain"), "a net for all noise levels: every block begins with its weights")
    parser.add_argument("--block", type=int, metavar="N", help="only this block (all that are not done yet)")


def add_whole(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, Path("runs/pictures/steps"), "an undivided net to go on from")


def add_local(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, Path("runs/pictures/local"), "a net of this kind to go on from")


def add_experts(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, Path("runs/pictures/experts"), "a net for all noise levels: every expert begins with it")
    parser.add_argument(
        "--experts", type=int, metavar="N", default=3, help="clusters of the pictures, a net each (%(default)s)"
    )
    parser.add_argument(
        "--expert",
        type=int,
        metavar="N",
        help="only this expert, or the router net by the number after the last (all that are not done yet)",
    )


def _add_options(parser: argparse.ArgumentParser, out: Path, start: str) -> None:
    parser.add_argument("--data", type=Path, metavar="PATH", required=True, help="npz, or a folder for each class")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="of a block; one net for all takes PARTS times more, and experts share as much out",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="pictures in a step")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights, batches and noise")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="peak rate")
    parser.add_argument("--patch", type=int, metavar="N", help="pixels along a side of a patch")
    parser.add_argument("--parts", type=int, metavar="N", help="blocks of the chain, stages of the undivided net")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of a block")
    parser.add_argument("--features", type=int, metavar="N", help="width of the net")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads")
    add_threads_option(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", default=out, help="the checkpoint (%(default)s)")
    parser.add_argument("--start", type=Path, metavar="CKPT", help=start)
