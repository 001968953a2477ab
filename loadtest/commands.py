"""Commands that measure: `bench` and what it can measure, and the commands of the folders below."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


T = TypeVar("T")


def register(subparsers: Subparsers) -> None:
    from loadtest.chaos import commands as chaos
    from loadtest.first_token.commands import register_first_token
    from loadtest.frontier import commands as frontier
    from loadtest.fuzz import commands as fuzz
    from loadtest.load import commands as load
    from loadtest.parity.commands import register_parity
    from loadtest.quality import commands as quality
    from loadtest.quality.infill_report import register_infill
    from loadtest.rounds_bench.commands import register_rounds_bench
    from loadtest.wan import commands as wan
    from loadtest.wan_bench.commands import register_wan
    from serving.shipped import SHIPPED

    load.register(subparsers)
    wan.register(subparsers)
    quality.register(subparsers)
    frontier.register(subparsers)
    chaos.register(subparsers)
    fuzz.register(subparsers)

    bench = subparsers.add_parser("bench", help="measure what serving costs on this machine")
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)

    overhead = benches.add_parser("overhead", help="latency over pure compute, on loopback")
    overhead.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    overhead.add_argument("--requests", type=int, default=20, metavar="R", help="requests of each mode (20)")
    overhead.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    overhead.add_argument("--hosts", default="", metavar="H[,H]", help="hosts that share the blocks (1,3)")
    overhead.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    overhead.set_defaults(run=run_overhead)

    memory = benches.add_parser("memory", help="what a loaded block takes over an idle server")
    memory.add_argument("--checkpoint", type=Path, metavar="DIR", help="hosts of this one, full of sessions, instead")
    memory.add_argument("--session-mb", type=int, default=64, metavar="MB", help="of sessions that these hold (64)")
    memory.add_argument("--block-mb", type=int, default=200, metavar="MB", help="size of the block, about (200)")
    memory.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    memory.set_defaults(run=run_memory)

    stage = benches.add_parser("stage", help="one step of one part: backends against this machine's multiply-adds")
    stage.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    stage.add_argument("--slots", type=int, default=128, metavar="N", help="noisy slots of a piece (128)")
    stage.add_argument("--batch", default="1,4,16", metavar="N[,N]", help="pieces computed together (1,4,16)")
    stage.add_argument("--threads", type=int, default=1, metavar="T", help="processor threads (1)")
    stage.add_argument("--text", type=Path, metavar="FILE", help="what losses are measured on (the probe text)")
    stage.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    stage.set_defaults(run=run_stage)

    losses = benches.add_parser("losses", help="what backends and codecs cost an AR model in nats, and save")
    losses.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    losses.add_argument("--text", type=Path, required=True, metavar="FILE", help="held-out text")
    losses.add_argument("--backends", default="", metavar="B[,B]", help="what computes (all that are installed)")
    losses.add_argument("--codecs", default="fp32,int8", metavar="C[,C]", help="of hidden states (fp32,int8)")
    losses.add_argument("--symbols", type=int, default=4096, metavar="N", help="bytes or tokens to read (4096)")
    losses.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    losses.set_defaults(run=run_losses)

    batching = benches.add_parser("batching", help="many requests at once against a bare torch loop of that batch")
    batching.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    batching.add_argument("--batch", type=int, default=16, metavar="N", help="requests at once (16)")
    batching.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    batching.add_argument("--rounds", type=int, default=5, metavar="R", help="times that each is measured (5)")
    batching.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    batching.set_defaults(run=run_batching)

    audit = benches.add_parser("audit", help="how soon audits find a host that computes wrongly, and what they cost")
    audit.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    audit.add_argument("--share", type=float, default=0.05, metavar="S", help="of sweeps that are audited (0.05)")
    audit.add_argument("--modes", default="sweep,chunked,ar", metavar="M[,M]", help="for the cost (sweep,chunked,ar)")
    audit.add_argument("--sweeps", type=int, default=100, metavar="N", help="within which a liar should be found (100)")
    audit.add_argument("--rounds", type=int, default=5, metavar="R", help="liars to find (5)")
    audit.add_argument("--requests", type=int, default=40, metavar="R", help="of each mode, for the cost (40)")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    audit.set_defaults(run=run_audit)

    seeing = benches.add_parser("seeing", help="what metrics, traces and JSON logs cost, on loopback")
    seeing.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    seeing.add_argument("--modes", default="sweep,ar", metavar="M[,M]", help="(sweep,ar)")
    seeing.add_argument("--users", type=int, default=4, metavar="U", help="requests at once (4)")
    seeing.add_argument("--requests", type=int, default=2, metavar="R", help="of each user, in a turn (2)")
    seeing.add_argument("--bytes", type=int, default=64, metavar="N", help="bytes to generate (64)")
    seeing.add_argument("--rounds", type=int, default=40, metavar="R", help="turns of each deployment (40)")
    seeing.add_argument("--hosts", type=int, default=3, metavar="H", help="hosts that share the blocks (3)")
    seeing.add_argument("--watched", default="off,default,all", metavar="W,W", help="share traced: default 0.01, all 1")
    seeing.add_argument("--scrape-s", type=float, default=1.0, metavar="S", help="pause between scrapes (1)")
    seeing.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    seeing.set_defaults(run=run_seeing)

    shapes = benches.add_parser("shapes", help="large shapes with random weights, stage by stage")
    shapes.add_argument("--widths", default="512,2048,4096", metavar="D[,D]", help="model widths (512,2048,4096)")
    shapes.add_argument("--profile", default="links-60", metavar="P", help="links whose floor is added (links-60)")
    shapes.add_argument("--slots", type=int, default=128, metavar="N", help="output tokens of a sweep (128)")
    shapes.add_argument("--steps", type=int, default=1, metavar="K", help="Euler steps in each block (1)")
    shapes.add_argument("--dtype", default="fp32", metavar="T", help="fp32 or bf16 (fp32)")
    shapes.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    shapes.set_defaults(run=run_shapes)

    sampler = benches.add_parser("sampler", help="what a chain writes with other samplers, scored by the AR model")
    sampler.add_argument("--data", type=Path, required=True, metavar="PATH", help="held-out text: a file or a folder")
    sampler.add_argument("--weights", type=Path, default=SHIPPED, metavar="DIR", help="bundle (shipped weights)")
    sampler.add_argument("--chain", type=Path, metavar="DIR", help="another chain than the bundle's")
    sampler.add_argument("--count", type=int, default=48, metavar="N", help="prompts (48)")
    sampler.add_argument("--bytes", type=int, default=64, metavar="N", help="bytes to generate (64)")
    sampler.add_argument("--prompt-bytes", type=int, default=64, metavar="N", help="bytes of a prompt (64)")
    sampler.add_argument("--base", default="default", metavar="V", help="what variants change one thing of (default)")
    sampler.add_argument(
        "--variants", default="", metavar="V[,V]", help="KEY=VALUE[:KEY=VALUE] each (one for each choice)"
    )
    sampler.add_argument("--seed", type=int, default=0, metavar="S", help="of the first text; the next has S + 1 (0)")
    sampler.add_argument("--threads", type=int, default=1, metavar="T", help="processor threads (1)")
    sampler.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    sampler.set_defaults(run=run_sampler)

    warm = benches.add_parser("warm", help="first requests: after the start, a pause, a reconnect")
    warm.add_argument("--profile", default="links-60", metavar="P", help="network (links-60)")
    warm.add_argument("--modes", default="sweep,ar", metavar="M[,M]", help="as in bench wan (sweep,ar)")
    warm.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    warm.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    warm.add_argument("--rounds", type=int, default=5, metavar="R", help="deployments started (5)")
    warm.add_argument("--idle-s", type=float, default=5.0, metavar="S", help="length of the pause (5)")
    warm.add_argument("--no-keep-warm", action="store_true", help="without the messages that keep idle links warm")
    warm.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    warm.set_defaults(run=run_warm)

    register_wan(benches)
    register_parity(benches)
    register_first_token(benches)
    register_infill(benches)
    register_rounds_bench(benches)


def run_overhead(options: argparse.Namespace) -> int:
    from loadtest.overhead import OverheadSettings, check_settings, measure_overhead, overhead_record, overhead_table

    checkpoint = options.checkpoint.resolve()
    settings = OverheadSettings(checkpoint, numbers(options.hosts, "--hosts"), options.requests, options.bytes)
    check_settings(settings)
    return _measure(
        options,
        f"{settings.requests} requests of each mode, {settings.max_bytes} bytes each ...",
        lambda: list(measure_overhead(settings)),
        overhead_table,
        lambda figures: overhead_record(settings, figures),
    )


def run_stage(options: argparse.Namespace) -> int:
    from loadtest.stage import StageBenchSettings, check_stage_settings, measure_stage, stage_record, stage_table

    try:
        batches = tuple(int(count) for count in options.batch.split(","))
    except ValueError:
        raise InputError(f"--batch {options.batch!r} must be numbers such as 1,4,16") from None
    checkpoint = options.checkpoint.resolve()
    settings = StageBenchSettings(checkpoint, options.slots, batches, options.threads, options.text)
    check_stage_settings(settings)
    return _measure(
        options,
        f"one part of {checkpoint.name}, each backend in a process of its own ...",
        lambda: measure_stage(settings),
        lambda report: stage_table(settings, report),
        lambda report: stage_record(settings, report),
    )


def run_memory(options: argparse.Namespace) -> int:
    from loadtest.host_memory import hosts_record, hosts_table, measure_hosts
    from loadtest.memory import measure_memory, memory_record, memory_table

    if options.session_mb < 1:
        raise InputError(f"--session-mb must be at least 1, not {options.session_mb}")
    if options.checkpoint is not None:
        return _measure(
            options,
            f"starting hosts for sessions of {options.session_mb} MB ...",
            lambda: measure_hosts(options.checkpoint.resolve(), options.session_mb),
            hosts_table,
            hosts_record,
        )
    if options.block_mb < 1:
        raise InputError(f"--block-mb must be at least 1, not {options.block_mb}")
    return _measure(
        options,
        f"writing a block of about {options.block_mb} MB, starting two servers ...",
        lambda: measure_memory(options.block_mb),
        memory_table,
        memory_record,
    )


def run_losses(options: argparse.Namespace) -> int:
    from loadtest.pipeline_losses import (
        LossSettings,
        check_losses,
        installed_backends,
        losses_record,
        losses_table,
        measure_losses,
    )

    settings = LossSettings(
        options.checkpoint.resolve(),
        options.text,
        tuple(options.backends.split(",")) if options.backends else installed_backends(),
        tuple(options.codecs.split(",")),
        options.symbols,
    )
    check_losses(settings)
    return _measure(
        options,
        f"{settings.symbols} symbols through {', '.join(settings.backends)} ...",
        lambda: list(measure_losses(settings)),
        lambda rows: losses_table(settings, rows),
        lambda rows: losses_record(settings, rows),
    )


def run_batching(options: argparse.Namespace) -> int:
    from loadtest.batching import BatchingSettings, batching_record, batching_table, measure_batching

    settings = BatchingSettings(options.checkpoint.resolve(), options.batch, options.bytes, options.rounds)
    return _measure(
        options,
        f"{settings.batch} requests at once, {settings.max_bytes} bytes each, {settings.rounds} times ...",
        lambda: measure_batching(settings),
        batching_table,
        lambda figures: batching_record(settings, figures),
    )


def run_audit(options: argparse.Namespace) -> int:
    from loadtest.audits import AuditSettings, audit_record, audit_table, measure_audits

    counts = (options.sweeps, options.rounds, options.requests)
    modes = tuple(options.modes.split(","))
    settings = AuditSettings(options.checkpoint.resolve(), options.share, modes, *counts)
    return _measure(
        options,
        f"{settings.rounds} routers look for a liar, then {settings.requests} requests of each mode ...",
        lambda: measure_audits(settings),
        lambda figures: audit_table(settings, figures),
        lambda figures: audit_record(settings, figures),
    )


def run_seeing(options: argparse.Namespace) -> int:
    from loadtest.seeing import SeeingBench, check_seeing, measure_seeing, seeing_record, seeing_table

    modes, watched = tuple(options.modes.split(",")), tuple(options.watched.split(","))
    counts = (options.users, options.requests, options.bytes, options.rounds)
    bench = SeeingBench(options.checkpoint.resolve(), modes, *counts, options.hosts, watched, options.scrape_s)
    check_seeing(bench)
    return _measure(
        options,
        f"{len(watched)} deployments take turns, {bench.rounds} rounds ...",
        lambda: measure_seeing(bench),
        seeing_table,
        lambda figures: seeing_record(bench, figures),
    )


def run_sampler(options: argparse.Namespace) -> int:
    from loadtest.sampling.study import SamplerStudy, check_study, measure_sampler, sampler_record, sampler_table
    from loadtest.sampling.variant import USUAL, Variant, parse_variant, parse_variants

    base = parse_variant(options.base, Variant())
    study = SamplerStudy(
        options.weights.resolve(),
        options.data,
        parse_variants(options.variants or USUAL, base),
        options.chain,
        options.count,
        options.bytes,
        options.prompt_bytes,
        options.seed,
        options.threads,
    )
    check_study(study)
    return _measure(
        options,
        f"{study.count} texts of {study.max_bytes} bytes for each variant ...",
        lambda: list(measure_sampler(study, lambda name: print(f"  {name}", file=sys.stderr, flush=True))),
        sampler_table,
        lambda rows: sampler_record(study, rows),
    )


def run_shapes(options: argparse.Namespace) -> int:
    from loadtest.shapes import ShapesSettings, check_shapes, measure_shapes, shapes_record, shapes_table
    from loadtest.wan.profile import profile_named

    settings = ShapesSettings(
        numbers(options.widths, "--widths"),
        profile_named(options.profile),
        options.slots,
        options.steps,
        options.dtype,
    )
    check_shapes(settings)
    return _measure(
        options,
        f"one block after the other, {settings.slots} slots ...",
        lambda: list(measure_shapes(settings)),
        lambda figures: shapes_table(settings, figures),
        lambda figures: shapes_record(settings, figures),
    )


def run_warm(options: argparse.Namespace) -> int:
    from loadtest.wan.profile import profile_named
    from loadtest.wan_bench.arms import parse_choices
    from loadtest.wan_bench.warm import WarmSettings, check_warm, measure_warm, warm_table
    from serving.modes import MODES

    settings = WarmSettings(
        profile_named(options.profile),
        parse_choices(options.modes, MODES),
        options.checkpoint.resolve(),
        options.bytes,
        options.rounds,
        options.idle_s,
        keep_warm=not options.no_keep_warm,
    )
    check_warm(settings)
    return _measure(
        options,
        f"{settings.profile.name}: {settings.rounds} deployments for each mode ...",
        lambda: measure_warm(settings),
        warm_table,
        lambda rows: {"bench": "warm", "profile": settings.profile.name, "rows": rows},
    )


def _measure(
    options: argparse.Namespace,
    words: str,
    measure: Callable[[], T],
    table: Callable[[T], str],
    record: Callable[[T], Any],
) -> int:
    """Say what comes, measure it, print it, and write it where `--json` says."""
    from loadtest.destination import check_destination, write_json

    if options.json:
        check_destination(options.json)
    print(words, flush=True)
    figures = measure()
    print(table(figures))
    if options.json:
        write_json(options.json, record(figures))
    return 0


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of "1,3". Raises InputError."""
    try:
        return tuple(int(count) for count in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"{flag} {text!r} must be numbers such as 1,3") from None
