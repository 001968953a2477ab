"""Commands of a block host: `stage`, `import` and `inspect`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from shlex import quote

from stages.errors import CheckpointError, InputError
from stages.host.settings import HostSettings
from stages.progress import ProgressLine
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import add_observability, observability_of, start_log
from stages.wire.channel import DRAIN_S
from stages.wire.flags import add_registry_flags, add_server_options, open_registry
from stages.wire.registry import registry_settings
from stages.wire.tls import security_of

MAX_THREADS = 1024


def add_stage(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint or bundle")
    stage.add_argument("--blocks", metavar="N[,N]", help="consecutive blocks that this host holds")
    stage.add_argument("--empty", action="store_true", help="start without a checkpoint: wait for a stage")
    stage.add_argument("--listen", required=True, metavar="HOST:PORT")
    stage.add_argument(
        "--next", metavar="HOST:PORT[,...]", help="hosts that may come after this one; after the last, the first"
    )
    stage.add_argument("--name", help="shown in accounts and errors (stage- and the blocks)")
    add_host_options(stage)
    add_registry_flags(stage)
    stage.add_argument("--advertise", metavar="HOST:PORT", help="what others dial, for the registry (--listen)")


def add_import(pretrained: argparse.ArgumentParser) -> None:
    add = pretrained.add_argument
    add("source", type=Path, metavar="SOURCE", help="a Hugging Face folder or a .gguf file")
    add("--blocks", type=int, default=3, metavar="N", help="stages, one a host (3)")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    add("--context", type=int, metavar="N", help="positions to keep (the model's, up to 8192)")
    add("--speeds", type=positive_numbers, metavar="X,X", help="relative speed of each stage's host (all equal)")
    add("--memory-mb", type=positive_numbers, metavar="MB,MB", help="room for weights on each host (any)")
    add(
        "--weights",
        choices=["float32", "bfloat16", "q4"],
        default="float32",
        help="of layers: 4 bytes a number, 2 bytes, or 4 bits (float32)",
    )
    add("--draft-head", type=Path, metavar="FILE", help="of `distill --head`: the last host drafts by it")
    add("--untrained", action="store_true", help="the weights are random: ask for no loss")


def positive_numbers(text: str) -> tuple[float, ...]:
    """Numbers above 0 with commas between them. Raises ArgumentTypeError."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no list of numbers above 0, such as 4,1,1")
    return numbers


def add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--verify", action="store_true", help="load everything: digests, shapes, loss gate")
    inspect.add_argument(
        "--source", type=Path, metavar="MODEL", help="compare with transformers: what it was imported from"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")


def run_stage(options: argparse.Namespace) -> int:
    from stages.host.server import StageSettings, serve

    placed = {"--checkpoint": options.checkpoint, "--blocks": options.blocks}
    if options.empty:
        placed |= {"--next": options.next, "--registry": options.registry}
        if given := [flag for flag, value in placed.items() if value is not None]:
            raise InputError(f"--empty waits for a stage: leave {given[0]} out")
    elif missing := [flag for flag, value in placed.items() if value is None]:
        raise InputError(f"onesweep stage: {missing[0]} is missing; --empty does without it")
    blocks = () if options.empty else parse_blocks(options.blocks)
    seeing = observability_of(options)
    registry = registry_settings(options)
    if registry is not None and options.next is not None:
        raise InputError("--next and --registry both say who comes next: give one of them")
    if registry is None and options.advertise is not None:
        raise InputError("--advertise says what a registry hands out: name one with --registry")
    name = options.name or "-".join(["stage", *sorted({str(block) for block in (*blocks[:1], *blocks[-1:])})])
    host = host_settings(options, name)
    start_log(seeing.log_format, name)
    serve(
        StageSettings(
            options.checkpoint or options.shelf,
            blocks,
            options.listen,
            parse_addresses(options.next),
            host,
            options.threads,
            security_of(options),
            options.shelf,
            open_registry(registry) if registry else None,
            options.advertise,
            options.health,
            seeing,
            options.drain_s,
            options.signers,
        )
    )
    return 0


def run_import(options: argparse.Namespace) -> int:
    progress = ProgressLine()
    progress.at(f"reading {options.source}", 0.0)  # torch takes seconds to import
    from stages.checkpoint.draft_head import add_draft_head
    from stages.importing.importing import ImportSettings, host_shares, import_model, summary

    check_positive(options, "context")
    settings = ImportSettings(
        options.source,
        options.out,
        options.blocks,
        options.context,
        is_untrained=options.untrained,
        hosts=host_shares(options.blocks, options.speeds, options.memory_mb),
        weights=options.weights,
    )
    try:
        imported = import_model(settings, progress)
        if options.draft_head is not None:
            try:
                add_draft_head(options.out, options.draft_head)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {options.out} is imported without a draft head") from None
    finally:
        progress.close()
    print(summary(imported))
    print(f"chat with it: onesweep run {quote(str(options.out))}")
    return 0


def run_inspect(options: argparse.Namespace) -> int:
    from stages.checkpoint.inspect import describe, record, verify

    print(json.dumps(record(options.directory), indent=2) if options.json else describe(options.directory))
    beside = sys.stderr if options.json else sys.stdout
    checks = verify(options.directory) if options.verify else []
    for check in checks:
        print(check, file=beside)
    holds = all(check.ok for check in checks)
    if options.source is not None:
        from stages.checkpoint.inspect import compare_with_source

        comparison = compare_with_source(options.directory, options.source)
        print(comparison, file=beside)
        holds = holds and comparison.holds
    return 0 if holds else 1


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """The options of every block host, wherever its place in the ring is written."""
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads (all cores)")
    add_flags(parser, HostSettings)
    parser.add_argument("--shelf", type=Path, metavar="DIR", help="keep what is deployed there (none: takes nothing)")
    parser.add_argument("--signers", type=Path, metavar="FILE", help="take only what a public key in it signed (any)")
    add_server_options(parser)
    parser.add_argument("--health", metavar="HOST:PORT", help="answer health checks there too, in plain text")
    add_drain_flag(parser)
    add_observability(parser)


def host_settings(options: argparse.Namespace, name: str) -> HostSettings:
    """Settings that these options give. Raises InputError."""
    check_positive(options, "threads", "drain_s")
    # empty where a script has none to name
    given = {"backend": options.backend or None, "device": options.device or None}
    return from_flags(HostSettings, argparse.Namespace(**vars(options) | given), name=name)


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option of every command that starts hosts."""
    # None where it is not given: a topology may say where its hosts compute
    add_flags(parser, HostSettings, only=("device",))


def add_drain_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-s",
        type=float,
        default=DRAIN_S,
        metavar="S",
        help=f"time for running requests to end ({DRAIN_S:g})",
    )


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise InputError unless these options are above 0, and not absurd."""
    for name in names:
        value = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} must be above 0, not {value}")
        if name == "threads" and value is not None and value > MAX_THREADS:
            raise InputError(f"{flag} must be at most {MAX_THREADS}, not {value}")


def parse_addresses(text: str | None) -> tuple[str, ...]:
    """Addresses of "HOST:PORT,HOST:PORT". Raises InputError for one that is named twice."""
    addresses = tuple(text.split(",")) if text else ()
    if len(set(addresses)) < len(addresses):
        raise InputError(f"--next {text!r} names a host twice: name each once")
    return addresses


def parse_blocks(text: str) -> tuple[int, ...]:
    """Block numbers of "0,1". Raises InputError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--blocks {text!r} must be numbers such as 0 or 0,1") from None
