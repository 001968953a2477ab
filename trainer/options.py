"""Command-line options that several of the trainer's commands share, and the settings and text they name."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import InputError

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig
    from trainer.blocks.data import Corpus

# Modules that need torch are imported when a command runs: help should not wait for it.

MAX_THREADS = 1024


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """`--config`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; flags win over them")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """`--data`, `--threads`."""
    parser.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text, file or folder (Python's docs)")
    add_threads_option(parser)


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    """`--threads`."""
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads (all cores)")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda[:N]", help="where to train (%(default)s)")


def config_of(options: argparse.Namespace, **flags: Any) -> TrainingConfig:  # noqa: ANN401 - of any setting
    """Settings of a training: the file's, and over them the flags. Raises ConfigError, InputError."""
    from trainer.blocks.config import load_config

    set_threads(options.threads)
    for name in ("steps", "seed"):
        flags.setdefault(name, getattr(options, name, None))
    return load_config(options.config, **flags)


def corpus_of(options: argparse.Namespace) -> Corpus:
    """The text that the options name. Raises DataError."""
    from trainer.blocks.data import load_corpus

    set_threads(options.threads)
    return load_corpus(options.data, getattr(options, "tokenizer", None))


def set_threads(count: int | None) -> int:
    """Compute with `count` threads, by default one for each core that this process may use; return the number.

    The same number on the same machine gives the same weights, bit for bit. Raises InputError.
    """
    import torch

    if count is not None and not 1 <= count <= MAX_THREADS:
        raise InputError(f"--threads must be from 1 to {MAX_THREADS}, not {count}")
    threads = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def positive(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {text}")
    return value


def choices(text: str) -> tuple[str, list[str]]:
    """NAME=VALUE[,VALUE]."""
    name, equals, values = text.partition("=")
    if not equals or not all(parts := values.split(",")):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE[,VALUE], not {text!r}")
    return name, parts


def numbers(text: str) -> list[int]:
    """N[,N], whole numbers."""
    return [int(part) for part in text.split(",")]


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The values that the command line has."""
    return {name: value for name, value in values.items() if value is not None}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def print_json(record: dict[str, Any]) -> None:
    """Print a record for programs."""
    print(json.dumps(record, indent=2))
