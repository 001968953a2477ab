"""Model commands: `import`, `inspect`, and `run`, which imports a model once, starts local hosts and opens a chat."""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from serving.cli.chat import ChatSettings, add_chat_options, given_prompt, talk
from serving.cli.generate import check_request
from serving.cli.parser import check_positive
from stages.errors import CheckpointError, InputError, MissingCheckpoint, ServiceError, exists, file_errors, quoted
from stages.progress import ProgressLine, counted
from stages.settings import from_flags
from stages.signals import ends_at_once, ends_cleanly
from stages.wire.secret_files import user_directory

if TYPE_CHECKING:
    from stages.host.plan import HostPlan
    from stages.importing.cut import StageHost
    from stages.model.architecture import Weights

# A command imports modules that need gRPC only when it runs.

HOSTS = 3
# Files that an import reads from a folder, and next to a GGUF file.
PUBLISHED = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*.jinja")
COMPANIONS = ("tokenizer.json", "LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*")
DIGITS = 16
MIN_CHAT = 32  # tokens: the template's own, and a few words each way


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that imports a model."""
    parser.add_argument("--context", type=int, metavar="N", help="context length in tokens (the model's, up to 8192)")
    what = "of layers: 4 bytes a number, 2 bytes, 8 bits or 4 (those of a rounded GGUF file, else float32)"
    parser.add_argument("--weights", choices=["float32", "bfloat16", "q8", "q4"], help=what)


def add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("model", type=Path, metavar="MODEL", help="a .gguf file, a Hugging Face folder or a checkpoint")
    add_chat_options(run)
    run.add_argument("--hosts", type=int, metavar="N", help=f"hosts on this machine that share the model ({HOSTS})")
    run.add_argument("--blocks", type=int, metavar="N", help="stages to split the model into (one per host)")
    run.add_argument("--threads", type=int, metavar="N", help="of each host (all cores; 1 for bfloat16)")
    add_import_options(run)


def add_import(pretrained: argparse.ArgumentParser) -> None:
    add = pretrained.add_argument
    add("source", type=Path, metavar="SOURCE", help="a Hugging Face folder or a .gguf file")
    add("--blocks", type=int, default=3, metavar="N", help="stages, one per host (3)")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    add("--speeds", type=positive_numbers, metavar="X,X", help="relative speed of each stage's host (all equal)")
    add("--memory-mb", type=positive_numbers, metavar="MB,MB", help="memory for weights on each host (unlimited)")
    add_import_options(pretrained)
    what = "drafter on the last host: copy:q8, copy:q4, a smaller MODEL with the same tokens or none"
    add("--drafter", metavar="MODEL", help=f"{what} (the largest copy that fits)")
    add("--untrained", action="store_true", help="the weights are random: do not check the loss")


def positive_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers above 0, separated by commas. Raises ArgumentTypeError."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a list of numbers above 0, such as 4,1,1")
    return numbers


def run_run(options: argparse.Namespace) -> int:
    from serving.cli.deployment import temporary_deployment
    from serving.cli.ports import free_port_block
    from serving.client.client import AsyncClient
    from serving.router.topology import local_topology

    check_positive(options, "hosts", "blocks", "context", "threads")
    settings, prompt = from_flags(ChatSettings, options), given_prompt(options)
    check_request(**settings.request)
    if options.hosts and options.blocks:
        local_topology(options.hosts, options.blocks, options.model)
    progress = ProgressLine()
    with ends_cleanly(), closing(progress):
        checkpoint, plan = find_checkpoint(options, options.blocks or options.hosts or HOSTS, progress)
        if options.blocks not in (None, plan.parts):
            raise InputError(f"{options.model} has {plan.parts} blocks, not {options.blocks}: import it again")
        hosts = options.hosts or min(HOSTS, plan.parts)
        threads = options.threads or plan.shared_threads
        topology = local_topology(hosts, plan.parts, checkpoint, free_port_block(hosts + 1) + 1)
        megabytes = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) / 1e6
        count = counted(len(topology.hosts), "host")
        loading = f"loading {megabytes:.0f} MB of weights into {count} on this machine"
        progress.at(loading)
        with temporary_deployment(
            topology, checkpoint, threads=threads, waiting=lambda why: progress.at(loading)
        ) as deployment:
            progress.say(f"{count} ready; router {topology.router}")
            return talk(partial(AsyncClient, topology.router), settings, prompt, deployment.check_alive)


def run_import(options: argparse.Namespace) -> int:
    if not exists(options.source):
        raise InputError(f"{options.source} does not exist: give a Hugging Face folder or a .gguf file")
    with closing(ProgressLine()) as progress:
        progress.at(f"reading {options.source}")  # importing torch takes seconds
        with ends_at_once():
            from serving.modes.chat_template import ChatTemplate
            from stages.importing.cut import host_shares
            from stages.importing.importing import ImportSettings, import_model, summary

        hosts = host_shares(options.blocks, options.speeds, options.memory_mb)
        given = (options.source, options.out, options.blocks, options.context, options.untrained, hosts)
        settings = ImportSettings(*given, options.weights, drafter=options.drafter, check_template=ChatTemplate)
        imported = import_model(settings, progress)
    print(summary(imported))
    positions = imported.text_architecture.positions
    short = f"a context of {positions} tokens has no room for a chat: import it with a longer --context"
    print(short if positions < MIN_CHAT else f"chat with it: onesweep run {quote(str(options.out))}")
    return 0


def find_checkpoint(
    options: argparse.Namespace, blocks: int, progress: ProgressLine, hosts: Sequence[StageHost] = ()
) -> tuple[Path, HostPlan]:
    """The MODEL as a checkpoint, imported if necessary, now or earlier, and a host's plan of it. Raises OnesweepError.

    :param blocks: the number to cut it into, if it is imported.
    :param hosts: the host of each stage, if known; an earlier import's cut for hosts of these names stays.
    """
    from stages.host.plan import plan_host

    check_model(options)
    model: Path = options.model
    if (plan := plan_of(model)) is None:
        cache = user_directory("XDG_CACHE_HOME", ".cache")
        model = import_once(cache, model, blocks, options.context, options.weights, progress, hosts)
        plan = plan_host(model, (0,))
    return model.resolve(), plan


def check_model(options: argparse.Namespace) -> None:
    """Raise InputError or CheckpointError for a MODEL that is no checkpoint that generates, and cannot be imported."""
    model: Path = options.model
    if plan := plan_of(model):
        if plan.draws:
            raise InputError(f"{model} draws pictures: `onesweep up --checkpoint {model}`, then `onesweep draw CLASS`")
        for name in ("context", "weights"):
            if getattr(options, name) is not None:
                raise InputError(f"{model} is a checkpoint with its own {name}: leave out --{name}, or import it again")
        return
    if not model.is_file() and not (model / "config.json").is_file():
        there = "is not a model" if exists(model) else "does not exist"
        raise InputError(f"{model} {there}: give a .gguf file, a Hugging Face folder, a checkpoint or a bundle")
    with ends_at_once():
        from stages.importing.importing import open_source

    open_source(model).check()


def plan_of(model: Path) -> HostPlan | None:
    """Plan of the first host of a checkpoint or bundle; None if MODEL is neither. Raises OnesweepError."""
    from stages.host.plan import plan_host

    try:
        return plan_host(model, (0,))
    except MissingCheckpoint:
        return None


# Imported models, by the digest of their source.


def import_once(
    directory: Path,
    source: Path,
    blocks: int,
    context: int | None,
    weights: Weights | None,
    progress: ProgressLine,
    hosts: Sequence[StageHost] = (),
) -> Path:
    """The complete checkpoint of a source in a directory of imports; imports it if it is not there.

    Raises OnesweepError.
    """
    progress.at(f"reading {source}", 0.0)
    # Without the hosts' speeds, which vary between measurements: hosts keep the cut of the first.
    entry = directory / _key(source, blocks, context, weights, [host.name for host in hosts])
    with _locked(entry, progress):
        # Only the lock's holder makes such directories, so none of these is in use.
        for left in directory.glob(f".{entry.name}.*"):  # left by an import that was killed
            shutil.rmtree(left, ignore_errors=True)
        if entry.exists() and not is_whole(entry):
            progress.say(f"{entry} is damaged: importing {source} again")
            shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            progress.say(f"importing {source} once, into {directory}")
            from serving.modes.chat_template import ChatTemplate
            from stages.importing.importing import ImportSettings, import_model
            from stages.memory import trim

            # In this process: an error in the source ends the command with its own sentence and exit code.
            # on one machine, a trip costs less than drafting with a copy
            drafter, given = None if hosts else "none", (source, entry, blocks, context, False, hosts, weights)
            import_model(ImportSettings(*given, drafter=drafter, check_template=ChatTemplate), progress)
            trim()
        progress.say(f"{source.name}, split into {counted(blocks, 'block')}, is in {entry}")
    return entry


@contextmanager
def _locked(entry: Path, progress: ProgressLine) -> Iterator[None]:
    """Lock an entry for one process at a time. Raises ServiceError."""
    with file_errors(ServiceError, f"cannot keep models in {entry.parent}", "set XDG_CACHE_HOME to another directory"):
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_name(f"{entry.name}.lock").open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another run is importing this model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(source: Path, blocks: int, context: int | None, weights: Weights | None, hosts: Sequence[str]) -> str:
    """Raises ServiceError for a file that cannot be read."""
    if source.is_dir():
        paths = [path for pattern in PUBLISHED + COMPANIONS for path in source.glob(pattern)]
    else:
        # a model may have several files, whose names differ in their number
        parts = re.sub(r"-\d{5}(?=-of-\d{5})", "-?????", glob.escape(source.name))
        paths = [path for pattern in (parts, *COMPANIONS) for path in source.parent.glob(pattern)]
    paths = sorted({path for path in paths if path.is_file()})
    # With the version: a later one may write other files from the same source.
    files = list(zip((path.name for path in paths), _digests(paths), strict=True))
    record = json.dumps([version("onesweep"), blocks, context, weights, files, *hosts])
    return hashlib.sha256(record.encode()).hexdigest()[:DIGITS]


def is_whole(checkpoint: Path) -> bool:
    """True if every file of an imported model and of the model next to it is there and has its digest."""
    from stages.checkpoint.manifest import read_manifest

    near = checkpoint / "local"
    try:
        manifest = read_manifest(checkpoint)
        expected = {part.file: part.sha256 for part in manifest.parts if part} | manifest.files
        has_all = manifest.complete and _digests([checkpoint / name for name in expected]) == [*expected.values()]
        return has_all and (not near.exists() or is_whole(near))
    except (CheckpointError, ServiceError):
        return False


def _digests(paths: list[Path]) -> list[str]:
    """SHA-256 of each file. Raises ServiceError."""
    from stages.checkpoint.files import file_digest

    with file_errors(ServiceError), ThreadPoolExecutor() as threads:
        return list(threads.map(file_digest, paths))


def add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--verify", action="store_true", help="load all parts: check digests, shapes, loss gate")
    inspect.add_argument("--source", type=Path, metavar="MODEL", help="source to compare with, using transformers")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def run_inspect(options: argparse.Namespace) -> int:
    if (file := options.directory).is_file():
        is_own = file.name == "manifest.json"
        how = f"give its directory, {file.parent}" if is_own else f"`onesweep import {file} --out DIR` reads models"
        raise InputError(f"{file} is a file: {how}")
    with ends_at_once():
        from stages.checkpoint.inspect import describe, record, verify

    if options.source is not None:
        from stages.importing.parity import compare_with_source, require_source

        imported = require_source(options.directory, options.source)
    print(json.dumps(record(options.directory), indent=2) if options.json else describe(options.directory))
    output = sys.stderr if options.json else sys.stdout
    checks = verify(options.directory) if options.verify else []
    for check in checks:
        print(check, file=output)
    failed = sum(not check.ok for check in checks)
    if checks:
        print(f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} passed", file=output)
    if options.source is not None:
        comparison = compare_with_source(*imported, options.source)
        print(comparison, file=output)
        failed += not comparison.holds
    return 1 if failed else 0
