"""The trainer's commands: `train`, `evaluate`, `init`, and those of rounds over the network."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command_options import (
    add_config_options,
    add_data_options,
    config_of,
    corpus_of,
    decimals,
    given,
    numbers,
    positive,
    print_json,
    words,
)
from trainer.distill.commands import register_distill
from trainer.grafting.commands import add_graft_options, run_graft
from trainer.planning.commands import register_plan
from trainer.rounds.commands import register_rounds
from trainer.rounds.train_commands import (
    add_audit_options,
    add_experiment_options,
    add_rounds_options,
    run_audit,
    run_experiment,
    run_rounds,
)

if TYPE_CHECKING:
    from trainer.config import TrainingConfig

# What needs torch is imported when a command runs: `onesweep --help` should not wait for it.


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of `onesweep`."""
    train = subparsers.add_parser("train", help="train blocks or an AR model, watch a training, measure its memory")
    kinds = train.add_subparsers(title="what", metavar="WHAT", required=True)
    _add(kinds, "blocks", run_blocks, _blocks_options, "train the blocks of a chain, one at a time")
    _add(
        kinds, "ar", run_ar, _ar_options, "train an autoregressive model end to end, on the same data, steps and batch"
    )
    _add(kinds, "scorer", run_scorer, _scorer_options, "train a pipeline stage by stage, each through frozen copies")
    _add(kinds, "graft", run_graft, add_graft_options, "make a block of a chain from a stage of a pretrained model")
    _add(kinds, "arms", run_arms, _arms_options, "compare ways of training a pipeline, over several seeds")
    _add(kinds, "ideas", run_ideas, _ideas_options, "a local model with deep features or a plan, against it alone")
    _add(
        kinds,
        "rounds",
        run_rounds,
        add_rounds_options,
        "rounds of workers on this machine, virtual or real, compared in a table",
    )
    _add(
        kinds,
        "experiment",
        run_experiment,
        add_experiment_options,
        "answer one question on rounds with a small model, over several seeds",
    )
    _add(
        kinds,
        "audit",
        run_audit,
        add_audit_options,
        "prove from their log that rounds lost no update and merged none twice",
    )
    _add(kinds, "memory", run_memory, _memory_options, "measure what one block's training holds against the whole")
    _add(kinds, "watch", run_watch, _watch_options, "follow a training that was started with --listen")
    _add(subparsers, "evaluate", run_evaluate, _evaluate_options, "bits per byte of checkpoints on held-out text")
    _add(subparsers, "init", run_init, _init_options, "a checkpoint with random weights, for capacity tests")
    register_rounds(subparsers)
    register_plan(subparsers)
    register_distill(subparsers)


def run_blocks(options: argparse.Namespace) -> int:
    """Train a chain's blocks."""
    from stages.errors import InputError
    from trainer.local import train_blocks, train_blocks_ahead
    from trainer.progress import Progress
    from trainer.service import listening

    if options.lookahead and options.block is not None:
        raise InputError("with --lookahead all blocks are trained side by side: leave out --block")
    progress, config = Progress(), config_of(options, context=options.context)
    with listening(options.listen, progress):
        if options.lookahead:
            manifest = train_blocks_ahead(config, corpus_of(options), options.out, progress)
        else:
            manifest = train_blocks(config, corpus_of(options), options.out, options.block, progress)
    for name, nats in manifest.metrics.get("chain", {}).items():
        if name.endswith("_nats"):
            print(f"{name:32} {nats:.3f}")
    done = sum(part is not None for part in manifest.parts)
    print(f"{options.out}: {done} of {len(manifest.parts)} blocks trained")
    return 0


def run_ar(options: argparse.Namespace) -> int:
    """Train an AR model."""
    from trainer.local import train_ar
    from trainer.progress import Progress
    from trainer.service import listening

    progress, config = Progress(), config_of(options)
    stages = config.architecture.parts if options.stages is None else options.stages
    layers = config.architecture.parts * config.architecture.layers if options.layers is None else options.layers
    out = options.out or Path("runs/local" if stages == 1 else "runs/ar")
    with listening(options.listen, progress):
        manifest = train_ar(config, corpus_of(options), out, layers, stages, progress)
    bits = manifest.metrics["ar"]["valid_next_byte_bits"]
    print(f"{out}: {layers} layers in {stages} stage{'s' * (stages > 1)}, {bits:.3f} bits/byte on validation text")
    return 0


def run_scorer(options: argparse.Namespace) -> int:
    """Train a pipeline whose workers hold one stage each."""
    from trainer.local import train_scorer
    from trainer.progress import Progress
    from trainer.service import listening

    lookahead = given({name: getattr(options, name) for name in ("refresh_every", "copies", "features")})
    progress, config = Progress(), config_of(options, lookahead=lookahead)
    with listening(options.listen, progress):
        manifest = train_scorer(config, corpus_of(options), options.out, progress)
    bits, a = manifest.metrics["ar"]["valid_next_byte_bits"], manifest.byte_architecture
    print(f"{options.out}: {a.parts} stages of {a.layers} layers, {bits:.3f} bits/byte on validation text")
    return 0


def run_arms(options: argparse.Namespace) -> int:
    """Train every arm for every seed; what is done already is only measured."""
    from trainer.arms import arms_named, table, train_arm

    arms, config = arms_named(options.arms), config_of(options)
    corpus = corpus_of(options)
    results = [train_arm(arm, options.seeds, config, corpus, options.out) for arm in arms]
    if options.json:
        print_json({"arms": [result.to_record() for result in results]})
    else:
        print("\n".join(table(results)))
    return 0


def run_ideas(options: argparse.Namespace) -> int:
    """Train a local model with an idea and without it, for each seed; what is done already is only measured."""
    from trainer.ideas.report import table
    from trainer.ideas.trial import Trial, run_trial

    names = ("idea", "checkpoint", "from_local", "features", "lags", "sigmas", "chunk", "rolled", "prompts")
    trial = Trial(**{name: getattr(options, name) for name in (*names, "prompt_bytes", "written_bytes")})
    report = run_trial(trial, options.seeds, config_of(options), corpus_of(options), options.out)
    if options.json:
        print_json(report.to_record())
    else:
        print("\n".join(table(report)))
    return 0


def run_memory(options: argparse.Namespace) -> int:
    """Measure one training step's memory three ways."""
    from trainer.memory import measure_training

    sizes = {name: getattr(options, name) for name in ("parts", "layers", "width", "heads", "context_bytes", "context")}
    config = config_of(options, sequences=options.sequences, architecture=given(sizes))
    if options.workers:
        return _measure_workers(options, config)
    uses = measure_training(config, corpus_of(options))
    block, blocks = uses["block"].total, config.architecture.parts
    ratios = {f"block / {name}": block / uses[name].total for name in ("end to end", "ar")}
    if options.json:
        print_json({"bytes": {name: use.to_record() for name, use in uses.items()}, "ratios": ratios})
        return 0
    print(f"{'MiB':12}" + "".join(f"{key:>12}" for key in uses["block"].to_record()))
    for name, use in uses.items():
        print(f"{name:12}" + "".join(f"{value / 2**20:12.1f}" for value in use.to_record().values()))
    for name, ratio in ratios.items():
        print(f"{name} = {ratio:.3f} (1/{blocks} = {1 / blocks:.3f})")
    return 0


def _measure_workers(options: argparse.Namespace, config: TrainingConfig) -> int:
    """Measure worker processes."""
    from trainer.rounds.footprint import measure_workers

    found = measure_workers(config, options.data, options.workers)
    if options.json:
        print_json({"blocks": {count: footprint.to_record() for count, footprint in found.items()}})
        return 0
    print("| blocks | layers in each | process, MiB | of it the model's | of end to end | 1/B + 10 % |")
    print("|---|---|---|---|---|---|")
    layers = config.architecture.parts * config.architecture.layers
    for count, each in found.items():
        print(
            f"| {count} | {layers // count} | {each.peak / 2**20:.0f} | {each.held / 2**20:.0f} "
            f"| {each.held / found[1].held:.3f} | {1 / count + 0.1:.3f} |"
        )
    return 0


def run_watch(options: argparse.Namespace) -> int:
    """Print a training's progress until it ends; 1 if it failed, 130 if it was stopped."""
    import asyncio

    from trainer.progress import State
    from trainer.watch import describe, follow

    async def watch() -> State:
        state = State.STARTING
        async for moment in follow(options.address, options.interval):
            print(describe(moment), flush=True)
            state = moment.state
        return state

    return {State.FAILED: 1, State.STOPPED: 130}.get(asyncio.run(watch()), 0)


def run_evaluate(options: argparse.Namespace) -> int:
    """Score checkpoints on validation text."""
    from trainer.divergence import bundle_divergences
    from trainer.scores import Scorer, checkpoints

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
            "checkpoints": [result.to_record() for result in results],
            "divergences": [found.to_record() for found in divergences],
        }
        print_json({"text": text, **settings, **records})
        return 0
    for result in results:
        print(f"{result.directory} ({result.kind} {result.digest[:12]}): {result.description}")
        for score in result.scores:
            print(f"  {score.name:46} {score.bits_per_byte:8.3f} bits/byte of {score.bytes:,} bytes")
        if not result.trained_on_this_text:
            print("  note: trained on other text than lies beside this validation text")
    for found in divergences:
        print(
            f"drafter {found.drafter} against scorer {found.scorer} at temperature {found.temperature:g}: total "
            f"variation {found.total_variation:.3f}, KL {found.kl_bits:.3f} bits/byte (reverse "
            f"{found.reverse_kl_bits:.3f}); `verified` takes about {found.verified_sweeps:.0f} sweeps for 256 bytes"
        )
    return 0


def run_init(options: argparse.Namespace) -> int:
    """Write a checkpoint with random weights."""
    from stages.architecture import Architecture
    from trainer.untrained import create_untrained

    names = ("parts", "layers", "width", "heads", "context_bytes", "context")
    architecture = Architecture(**given({name: getattr(options, name) for name in names}))
    manifest = create_untrained(options.directory, options.kind, architecture, options.seed)
    for part in manifest.parts:
        assert part is not None
        print(f"{part.file}  {part.bytes:,} bytes")
    total = sum(part.bytes for part in manifest.parts if part is not None)
    print(f"{options.directory}: {len(manifest.parts)} parts, {total:,} bytes, random weights")
    return 0


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    options: Callable[[argparse.ArgumentParser], None],
    summary: str,
) -> None:
    parser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    options(parser)
    parser.set_defaults(run=run)


def _blocks_options(parser: argparse.ArgumentParser) -> None:
    _training_options(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/chain"), help="the checkpoint (default: %(default)s)")
    parser.add_argument("--block", type=int, metavar="N", help="only this one (default: all that are not done yet)")
    parser.add_argument("--context", choices=("own", "chained"), help="what a block reads: bytes, or features")
    parser.add_argument(
        "--lookahead", action="store_true", help="side by side, each learning from the last head (chained only)"
    )


def _ar_options(parser: argparse.ArgumentParser) -> None:
    _training_options(parser)
    parser.add_argument("--out", type=Path, help="the checkpoint (default: runs/ar; runs/local for one stage)")
    parser.add_argument("--layers", type=int, help="layers in all (default: as many as the chain has)")
    parser.add_argument("--stages", type=int, help="cut into so many parts (default: as many as the chain has blocks)")


def _scorer_options(parser: argparse.ArgumentParser) -> None:
    _training_options(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/scorer"), help="the checkpoint (default: %(default)s)")
    parser.add_argument("--refresh-every", type=int, metavar="STEPS", help="between two exchanges of the stages")
    parser.add_argument("--copies", choices=("fp32", "int8"), help="how the stages travel then")
    parser.add_argument("--features", choices=("live", "copies"), help="what a stage reads of those before it")


def _arms_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_data_options(parser)
    parser.add_argument("--arms", type=words, default=["one-block", "end-to-end", "own-losses", "lookahead-10"])
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="N[,N]")
    parser.add_argument("--steps", type=int, help="steps of each arm")
    parser.add_argument("--out", type=Path, default=Path("runs/arms"), help="one folder an arm and seed")
    parser.add_argument("--json", action="store_true", help="for programs")


def _ideas_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_data_options(parser)
    parser.add_argument("--idea", choices=("lagged", "planned"), required=True)
    parser.add_argument("--checkpoint", type=Path, default=Path("weights"), help="the bundle of the frozen models")
    parser.add_argument("--from-local", action="store_true", help="start from the bundle's local model")
    parser.add_argument("--features", choices=("ar", "scorer", "local"), default="ar", help="lagged: whose")
    parser.add_argument("--lags", type=numbers, default=(1, 8, 32), metavar="N[,N]", help="lagged: bytes")
    parser.add_argument("--sigmas", type=decimals, default=(10.0, 3.0, 1.0, 0.5, 0.15), help="planned: ends of a plan")
    parser.add_argument("--chunk", type=int, default=32, help="planned: bytes of a plan (default: %(default)s)")
    parser.add_argument("--rolled", type=float, default=1.0, help="planned: denoise from so many times sigma_end")
    parser.add_argument("--prompts", type=int, default=64, help="planned: texts to write (default: %(default)s)")
    parser.add_argument("--prompt-bytes", type=int, default=64)
    parser.add_argument("--written-bytes", type=int, default=128)
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="N[,N]")
    parser.add_argument("--steps", type=int, help="steps of each arm")
    parser.add_argument("--out", type=Path, default=Path("runs/ideas"), help="one folder an arm and seed")
    parser.add_argument("--json", action="store_true", help="for programs")


def _memory_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_data_options(parser)
    _size_options(parser)
    parser.add_argument("--sequences", type=int, help="windows in a batch")
    parser.add_argument(
        "--workers", type=numbers, metavar="B[,B]", help="instead: real worker processes, the layers in B blocks"
    )
    parser.add_argument("--json", action="store_true", help="bytes, for programs")


def _watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="least time between two lines")


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CKPT", help="a checkpoint, or a bundle of them")
    add_data_options(parser)
    parser.add_argument("--windows", type=int, default=24, help="evenly spaced windows (default: %(default)s)")
    parser.add_argument("--min-context", type=int, default=64, metavar="BYTES", help="read but not scored in each")
    parser.add_argument("--steps", type=int, default=4, help="Euler steps in each block (default: %(default)s)")
    parser.add_argument("--temperature", type=positive, default=1.0, help="of drafter and scorers (default: 1)")
    parser.add_argument("--json", action="store_true", help="for programs")


def _init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=("chain", "ar"), default="chain")
    _size_options(parser)
    parser.add_argument("--seed", type=int, default=0)


def _training_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_data_options(parser)
    parser.add_argument("--steps", type=int, help="steps of each block, or of the AR model")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--listen", metavar="HOST:PORT", help="tell `train watch` how far it is (loopback only)")


def _size_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=int, help="blocks, or stages")
    parser.add_argument("--layers", type=int, help="layers in each part")
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--context-bytes", type=int, metavar="N")
    parser.add_argument("--context", choices=("own", "chained"))
