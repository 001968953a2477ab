"""Commands that train and measure on this machine, `train text`, `train pictures`, `evaluate`...; flags, settings and
text loading of all trainer commands."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.device import all_cores, check_device
from stages.errors import InputError, file_errors
from stages.limits import MAX_THREADS
from stages.progress import counted
from stages.settings import add_flags, check_destination, flag, from_flags, from_toml, read_toml, setting
from stages.signals import ends_at_once

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig
    from trainer.blocks.data import Corpus

# A command imports modules that need torch only when it runs: `--help` should not wait for it.

MAX_COUNT = 2**31


@dataclass(frozen=True)
class SharedFlags:
    """Flags that commands share; each command names the ones it has."""

    config: Path | None = setting(None, "settings in TOML; flags override them")
    data: Path | None = setting(None, "UTF-8 text, file or folder (Python's docs)", metavar="PATH")
    tokenizer: Path | None = setting(None, "tokenizer.json: train on its tokens (bytes without it)")
    steps: int | None = setting(None, "training steps per part, or per worker", minimum=1, maximum=MAX_COUNT)
    threads: int | None = setting(None, "processor threads (all cores)", minimum=1, maximum=MAX_THREADS)
    device: str = setting("cpu", "where to train", metavar="cpu|cuda[:N]")
    json: bool = setting(False, "print JSON")


def add_own_and_shared(parser: argparse.ArgumentParser, own: type[Any], shared: str) -> None:
    """Add a command's own flags, and the named fields of SharedFlags."""
    add_flags(parser, own)
    add_flags(parser, SharedFlags, shared.split())


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Settings of a training: the file's, overridden by the flags. Raises ConfigError, InputError."""
    from trainer.blocks.config import load_config

    return load_config(options.config, steps=from_flags(SharedFlags, options).steps)


def corpus_of(options: argparse.Namespace) -> Corpus:
    """Load the text that the options name, with the device of its batches. Raises ConfigError, DataError."""
    from trainer.blocks.data import load_corpus

    set_threads(options)
    flags = from_flags(SharedFlags, options)
    device = check_device(flags.device or "cpu")
    return replace(load_corpus(flags.data, flags.tokenizer), device=device)


def set_threads(options: argparse.Namespace) -> None:
    """Set the number of threads, by default one per core that this process may use.

    The same number on the same machine gives the same weights, bit for bit. Raises InputError.
    """
    import torch

    torch.set_num_threads(from_flags(SharedFlags, options).threads or all_cores())


# Text


@dataclass(frozen=True)
class TextTraining:
    kind: Literal["chain", "ar", "scorer", "local"] = field(
        metadata=flag("blocks; a pipeline end to end, or stage by stage; a model of one block's size", name="kind")
    )
    out: Path | None = setting(None, "the checkpoint (runs/KIND)", metavar="DIR")
    block: int | None = setting(None, "train only this block of a chain (all unfinished ones)")


add_text = partial(add_own_and_shared, own=TextTraining, shared="config data tokenizer steps threads device")


def run_text(options: argparse.Namespace) -> int:
    with ends_at_once():  # importing torch takes seconds
        from trainer.blocks.config import RoundSettings
        from trainer.blocks.train import train_ar, train_blocks, train_scorer

    flags, config, corpus = from_flags(TextTraining, options), config_of(options), corpus_of(options)
    if config.rounds != RoundSettings():
        print("[rounds] is ignored: it applies only to `train coordinate` and `train simulate`", file=sys.stderr)
    out = flags.out or Path("runs") / flags.kind
    if flags.kind == "chain":
        manifest = train_blocks(config, corpus, out, flags.block)
        for name, nats in manifest.metrics.get("chain", {}).items():
            if name.endswith("_nats"):
                print(f"{name:32} {nats:.3f}")
        done = sum(part is not None for part in manifest.parts)
        print(f"{out}: {done} of {len(manifest.parts)} blocks trained")
        return 0
    if flags.block is not None:
        raise InputError(f"--block applies only to a chain: the parts of {flags.kind} are trained together")
    if flags.kind == "scorer":
        manifest = train_scorer(config, corpus, out)
    else:
        manifest = train_ar(config, corpus, out, config.architecture.parts if flags.kind == "ar" else 1)
    bits, a = manifest.metrics["ar"]["valid_next_byte_bits"], manifest.own_architecture
    stages = f"{counted(a.parts, 'stage')} of {counted(a.layers, 'layer')}"
    print(f"{out}: {stages}, {bits:.3f} bits/byte on validation text")
    return 0


@dataclass(frozen=True)
class TokenizerTraining:
    vocabulary: int = setting(2048, "tokens")
    out: Path = setting(Path("runs/tokenizer.json"), "output file")


add_tokenizer = partial(add_own_and_shared, own=TokenizerTraining, shared="data")


def run_tokenizer(options: argparse.Namespace) -> int:
    from stages.checkpoint.files import replace_file
    from trainer.blocks.data import load_corpus, train_tokenizer

    flags, corpus = from_flags(TokenizerTraining, options), load_corpus(options.data)
    with file_errors(InputError, f"cannot write {flags.out}", "choose another --out FILE"):
        flags.out.parent.mkdir(parents=True, exist_ok=True)
    check_destination(flags.out, "--out")
    tokenizer = train_tokenizer(corpus.train, flags.vocabulary)
    replace_file(flags.out, lambda path: path.write_text(tokenizer.json, encoding="utf-8"))
    tokenized = corpus.in_tokens(tokenizer)
    print(f"{flags.out}: {tokenizer.vocabulary} tokens, {len(corpus.valid) / len(tokenized.valid):.2f} bytes per token")
    return 0


@dataclass(frozen=True)
class Evaluation:
    checkpoints: tuple[Path, ...] = field(
        metadata=flag("checkpoint, or a bundle of them", name="checkpoints", nargs="+", metavar="CKPT")
    )
    windows: int = setting(24, "evenly spaced windows to score", minimum=1)
    min_context: int = setting(64, "context at each window's start, read but not scored", metavar="BYTES", minimum=1)
    steps: int = setting(4, "Euler steps per block", minimum=1)


add_evaluate = partial(add_own_and_shared, own=Evaluation, shared="data threads json")


def run_evaluate(options: argparse.Namespace) -> int:
    """Score checkpoints on validation text."""
    from stages.checkpoint.bundle import find_bundle
    from trainer.blocks.evaluate import Scorer

    flags, corpus = from_flags(Evaluation, options), corpus_of(options)
    scorer = Scorer(corpus, flags.windows, flags.min_context, flags.steps)
    results = [scorer.score(path) for directory in flags.checkpoints for path in find_bundle(directory).models.values()]
    if options.json:
        text = {"name": corpus.name, "valid_bytes": len(corpus.valid)}
        settings = {"windows": flags.windows, "min_context": flags.min_context, "steps_per_block": flags.steps}
        record = {"text": text, **settings, "checkpoints": [asdict(result) for result in results]}
        print(json.dumps(record, indent=2))
        return 0
    for result in results:
        print(f"{result.directory} ({result.kind} {result.digest[:12]}): {result.description}")
        for score in result.scores:
            print(f"  {score.name:50} {score.bits_per_byte:8.3f} bits/byte over {score.bytes:,} bytes")
        if not result.trained_on_this_text:
            print("  note: not trained on the training part of this text")
    return 0


# Pictures


@dataclass(frozen=True)
class PictureTraining:
    kind: Literal["chain", "steps", "local"] = field(
        metadata=flag("blocks; an undivided net; one of a block's size", name="kind")
    )
    data: Path = field(metadata=flag("npz file, or a folder with a subfolder per class", metavar="PATH"))
    out: Path | None = setting(None, "the checkpoint (runs/pictures/KIND)", metavar="DIR")
    # A net for all noise levels.
    start: Path | None = setting(None, "for a chain: net from which all blocks start", metavar="CKPT")
    block: int | None = setting(None, "for a chain: train only this block")


add_pictures = partial(add_own_and_shared, own=PictureTraining, shared="config steps threads device")


def run_pictures(options: argparse.Namespace) -> int:
    with ends_at_once():
        from trainer.pictures.data import load_pictures
        from trainer.pictures.training import PictureConfig, train_picture_blocks, train_undivided

    set_threads(options)
    flags = from_flags(PictureTraining, options)
    config = from_toml(PictureConfig, read_toml(options.config) if options.config else {}, str(options.config))
    config = replace(config, steps=from_flags(SharedFlags, options).steps or config.steps)
    pictures = replace(load_pictures(flags.data), device=check_device(options.device or "cpu"))
    out = flags.out or Path("runs/pictures") / flags.kind
    if flags.kind == "chain":
        manifest = train_picture_blocks(config, pictures, out, flags.block, flags.start)
    elif flags.block is not None or flags.start is not None:
        raise InputError(f"--block and --start apply only to a chain: {flags.kind} is trained as a whole")
    else:
        manifest = train_undivided(config, pictures, out, flags.kind == "steps")
    for name, losses in manifest.metrics.items():
        print(f"{name:10} loss on validation pictures {next(iter(losses.values())):.4f}")
    done = sum(part is not None for part in manifest.parts)
    print(f"{out}: {done} of {len(manifest.parts)} parts trained")
    return 0


# Checkpoints


def add_halve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new checkpoint")


def run_halve(options: argparse.Namespace) -> int:
    from stages.checkpoint.checkpoint import halve
    from stages.checkpoint.files import require_new

    require_new(options.out)
    manifest = halve(options.checkpoint, options.out)
    total = sum(part.bytes for part in manifest.parts if part is not None)
    print(f"{options.out}: {len(manifest.parts)} parts, {total:,} bytes")
    return 0
