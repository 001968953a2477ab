"""Commands that train and measure models on this machine: `train blocks`, `evaluate`, `init`, `distill` and more."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stages.settings import add_flags, from_flags
from trainer.options import (
    add_config_options,
    add_data_options,
    add_threads_option,
    config_of,
    corpus_of,
    given,
    positive,
    print_json,
    set_threads,
)

if TYPE_CHECKING:
    pass

SIZES = ("parts", "layers", "width", "heads", "context_length")

# Modules that need torch are imported when a command runs: help should not wait for it.


def run_blocks(options: argparse.Namespace) -> int:
    """Train a chain's blocks."""
    from trainer.blocks.train import train_blocks

    config = config_of(options)
    manifest = train_blocks(config, corpus_of(options), options.out, options.block)
    for name, nats in manifest.metrics.get("chain", {}).items():
        if name.endswith("_nats"):
            print(f"{name:32} {nats:.3f}")
    done = sum(part is not None for part in manifest.parts)
    print(f"{options.out}: {done} of {len(manifest.parts)} blocks trained")
    return 0


def run_ar(options: argparse.Namespace) -> int:
    """Train an AR model."""
    from trainer.blocks.train import train_ar

    config = config_of(options)
    stages = config.architecture.parts if options.stages is None else options.stages
    layers = config.architecture.parts * config.architecture.layers if options.layers is None else options.layers
    out = options.out or Path("runs/local" if stages == 1 else "runs/ar")
    manifest = train_ar(config, corpus_of(options), out, layers, stages)
    bits = manifest.metrics["ar"]["valid_next_byte_bits"]
    print(f"{out}: {layers} layers in {stages} stage{'s' * (stages > 1)}, {bits:.3f} bits/byte on validation text")
    return 0


def run_scorer(options: argparse.Namespace) -> int:
    """Train a pipeline whose workers hold one stage each."""
    from trainer.blocks.train import train_scorer

    lookahead = given({name: getattr(options, name) for name in ("refresh_every", "copies")})
    config = config_of(options, lookahead=lookahead)
    manifest = train_scorer(config, corpus_of(options), options.out)
    bits, a = manifest.metrics["ar"]["valid_next_byte_bits"], manifest.own_architecture
    print(f"{options.out}: {a.parts} stages of {a.layers} layers, {bits:.3f} bits/byte on validation text")
    return 0


def run_evaluate(options: argparse.Namespace) -> int:
    """Score checkpoints on validation text."""
    from trainer.blocks.evaluate import Scorer, bundle_divergences, checkpoints

    corpus = corpus_of(options)
    scorer = Scorer(corpus, options.windows, options.min_context, options.steps)
    results = [scorer.score(path) for directory in options.checkpoints for path in checkpoints(directory)]
    divergences = [
        found
        for directory in options.checkpoints
        for found in bundle_divergences(directory, corpus, options.windows, options.min_context, options.temperature)
    ]
    if options.json:
        text = {"name": corpus.name, "valid_bytes": len(corpus.valid)}
        settings = {"windows": options.windows, "min_context": options.min_context, "steps_per_block": options.steps}
        records = {
            "checkpoints": [asdict(result) for result in results],
            "divergences": [asdict(found) for found in divergences],
        }
        print_json({"text": text, **settings, **records})
        return 0
    for result in results:
        print(f"{result.directory} ({result.kind} {result.digest[:12]}): {result.description}")
        for score in result.scores:
            print(f"  {score.name:50} {score.bits_per_byte:8.3f} bits/byte of {score.bytes:,} bytes")
        if not result.trained_on_this_text:
            print("  note: trained on other text than lies beside this validation text")
    for found in divergences:
        print(
            f"drafter {found.drafter} against scorer {found.scorer} at temperature {found.temperature:g}: total "
            f"variation {found.total_variation:.3f}, KL {found.kl_bits:.3f} bits a symbol (reverse "
            f"{found.reverse_kl_bits:.3f})"
        )
    return 0


def run_init(options: argparse.Namespace) -> int:
    """Write a checkpoint with random weights."""
    from stages.model.architecture import Architecture
    from trainer.blocks.checkpoint_dir import create_untrained

    architecture = Architecture(**given({name: getattr(options, name) for name in SIZES}))
    manifest = create_untrained(options.directory, options.kind, architecture, options.seed)
    for part in manifest.parts:
        assert part is not None
        print(f"{part.file}  {part.bytes:,} bytes")
    total = sum(part.bytes for part in manifest.parts if part is not None)
    print(f"{options.directory}: {len(manifest.parts)} parts, {total:,} bytes, random weights")
    return 0


def run_distill(options: argparse.Namespace) -> int:
    """Distil a drafter, or continue a distillation."""
    from trainer.distill.distill import distill
    from trainer.distill.draft_head import distill_head
    from trainer.distill.settings import DistillSettings

    set_threads(options.threads)
    settings = from_flags(DistillSettings, options)
    if settings.head:
        file = distill_head(settings, lambda line: print(line, flush=True))
        print(f"{file}: the hosts of a checkpoint that has it draft by themselves")
        return 0
    manifest = distill(settings, lambda line: print(line, flush=True))
    found = manifest.metrics["distilled"]
    print(
        f"{settings.folder}: {found['symbols']} symbols in {found['minutes']} minutes; on text of the model's own "
        f"KL {found['written_kl_bits']:.3f} bits, TV {found['written_total_variation']:.3f}; "
        f"{found['draft_ms']} ms a guess"
    )
    return 0


def run_tokenizer(options: argparse.Namespace) -> int:
    """Make a tokenizer of some text."""
    from stages.checkpoint.checkpoint import replace_file
    from trainer.blocks.data import load_corpus
    from trainer.blocks.tokens import train_tokenizer

    corpus = load_corpus(options.data)
    tokenizer = train_tokenizer(corpus.train, options.vocabulary)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.out, lambda path: path.write_text(tokenizer.json, encoding="utf-8"))
    spelled = corpus.in_tokens(tokenizer)
    print(f"{options.out}: {tokenizer.vocabulary} tokens, {len(corpus.valid) / len(spelled.valid):.2f} bytes in each")
    return 0


def run_halve(options: argparse.Namespace) -> int:
    """Store weights in 16 bits."""
    from stages.checkpoint.checkpoint import halve, require_new

    require_new(options.out)
    manifest = halve(options.checkpoint, options.out)
    total = sum(part.bytes for part in manifest.parts if part is not None)
    print(f"{options.out}: {len(manifest.parts)} parts, {total:,} bytes")
    return 0


def add_halve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new checkpoint")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text, file or folder (Python's docs)")
    parser.add_argument("--vocabulary", type=int, metavar="N", default=2048, help="tokens (%(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("runs/tokenizer.json"), help="the file (%(default)s)"
    )


def add_blocks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _training_options(parser)
    add("--out", type=Path, metavar="DIR", default=Path("runs/chain"), help="the checkpoint (%(default)s)")
    add("--block", type=int, metavar="N", help="only this block (all that are not done yet)")


def add_ar(parser: argparse.ArgumentParser) -> None:
    _training_options(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the checkpoint (runs/ar; runs/local for one stage)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model (as many as the chain has)")
    parser.add_argument(
        "--stages", type=int, metavar="N", help="stages to cut it into (as many as the chain has blocks)"
    )


def add_scorer(parser: argparse.ArgumentParser) -> None:
    _training_options(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("runs/scorer"), help="the checkpoint (%(default)s)"
    )
    parser.add_argument("--refresh-every", type=int, metavar="STEPS", help="steps between two exchanges of the stages")
    parser.add_argument("--copies", choices=("fp32", "int8"), help="format of the exchanged stages")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CKPT", help="a checkpoint, or a bundle of them")
    add_data_options(parser)
    parser.add_argument("--windows", type=int, metavar="N", default=24, help="evenly spaced windows (%(default)s)")
    parser.add_argument("--min-context", type=int, default=64, metavar="BYTES", help="read but not scored in each")
    parser.add_argument("--steps", type=int, metavar="N", default=4, help="Euler steps in each block (%(default)s)")
    parser.add_argument("--temperature", type=positive, metavar="T", default=1.0, help="of drafter and scorers (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=("chain", "ar"), default="chain")
    _size_options(parser)
    parser.add_argument("--seed", type=int, metavar="N", default=0)


def _training_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_data_options(parser)
    help = "tokenizer.json: train on its tokens (bytes without it)"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each block, or of the AR model")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights, batches and noise (0)")


def _size_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=int, metavar="N", help="blocks, or stages")
    parser.add_argument("--layers", type=int, metavar="N", help="layers in each part")
    parser.add_argument("--width", type=int, metavar="N")
    parser.add_argument("--heads", type=int, metavar="N")
    parser.add_argument("--context-length", type=int, metavar="N")


def add_distill(parser: argparse.ArgumentParser) -> None:
    from trainer.distill.settings import DistillSettings

    add_flags(parser, DistillSettings)
    add_threads_option(parser)
