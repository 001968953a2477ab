"""Options that several of the trainer's commands have, and what comes of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import TrainingConfig
    from trainer.data import Corpus

# What needs torch is imported when a command runs.


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """`--config`, `--profile`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; flags win over them")
    parser.add_argument("--profile", help="onesweep (default) or blocktrain")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """`--data`, `--threads`."""
    parser.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text, file or folder (default: Python's docs)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda[:N]", help="where to train (default: %(default)s)")


def config_of(options: argparse.Namespace, **flags: Any) -> TrainingConfig:  # noqa: ANN401 - of any setting
    """Settings of a training: those of the file, and over them the flags. Raises ConfigError, InputError."""
    from trainer.config import load_config
    from trainer.threads import set_threads

    set_threads(options.threads)
    for name in ("steps", "seed"):
        flags.setdefault(name, getattr(options, name, None))
    return load_config(options.config, options.profile, **flags)


def corpus_of(options: argparse.Namespace) -> Corpus:
    """The text that the options name. Raises DataError."""
    from trainer.data import load_corpus
    from trainer.threads import set_threads

    set_threads(options.threads)
    return load_corpus(options.data)


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


def assignments(text: str) -> dict[str, list[str]]:
    """NAME=VALUE[,VALUE], any number of them, parted by spaces."""
    return dict(choices(word) for word in text.split())


def words(text: str) -> list[str]:
    """WORD[,WORD]."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """N[,N], whole numbers."""
    return [int(part) for part in text.split(",")]


def decimals(text: str) -> tuple[float, ...]:
    """N[,N]."""
    return tuple(float(part) for part in text.split(","))


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Those values that the command line has."""
    return {name: value for name, value in values.items() if value is not None}


def print_json(record: dict[str, Any]) -> None:
    """Print what programs read."""
    import json

    print(json.dumps(record, indent=2))
