"""Flags that several of the trainer's commands share, and the settings and text they name."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.device import all_cores
from stages.limits import MAX_THREADS
from stages.settings import add_flags, from_flags, setting

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig
    from trainer.blocks.data import Corpus

# Modules that need torch are imported when a command runs: help should not wait for it.

MAX_COUNT = 2**31


@dataclass(frozen=True)
class SharedFlags:
    """A command has those that it names."""

    config: Path | None = setting(None, "settings in TOML; flags win over them")
    data: Path | None = setting(None, "UTF-8 text, file or folder (Python's docs)", metavar="PATH")
    tokenizer: Path | None = setting(None, "tokenizer.json: train on its tokens (bytes without it)")
    steps: int | None = setting(None, "steps of each part, or of each worker", least=1, most=MAX_COUNT)
    threads: int | None = setting(None, "processor threads (all cores)", least=1, most=MAX_THREADS)
    device: str = setting("cpu", "where to train", metavar="cpu|cuda[:N]")
    json: bool = setting(False, "print JSON")


def add_own_and_shared(parser: argparse.ArgumentParser, own: type[Any], shared: str) -> None:
    """Add a command's own flags, and those of these fields of SharedFlags."""
    add_flags(parser, own)
    add_flags(parser, SharedFlags, shared.split())


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Settings of a training: the file's, over them the flags. Raises ConfigError, InputError."""
    from trainer.blocks.config import load_config

    return load_config(options.config, steps=from_flags(SharedFlags, options).steps)


def corpus_of(options: argparse.Namespace) -> Corpus:
    """The text that the options name, and the device of its batches. Raises ConfigError, DataError."""
    from stages.device import check_device
    from trainer.blocks.data import load_corpus

    set_threads(options)
    device = check_device(getattr(options, "device", None) or "cpu")
    return replace(load_corpus(options.data, getattr(options, "tokenizer", None)), device=device)


def set_threads(options: argparse.Namespace) -> None:
    """Compute with as many threads as asked for, by default one for each core that this process may use.

    The same number on the same machine gives the same weights, bit for bit. Raises InputError.
    """
    import torch

    torch.set_num_threads(from_flags(SharedFlags, options).threads or all_cores())


def print_json(record: dict[str, Any]) -> None:
    """Print a record for programs."""
    print(json.dumps(record, indent=2))
