"""The benches: commands `bench host`, `peers`, `wan`, `loadtest`, `chaos` and `quality`, and their settings, which
define their flags. `--help` loads this file, so it imports nothing heavy."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadtest.commands import MAX_SEED, BenchReport, check_names, origin
from loadtest.load.plan import LoadSettings
from loadtest.workload.caller import Access
from loadtest.workload.prompts import BYTES, LEVELS, TOKENS, Length, Prompts
from loadtest.workload.testbed import default_hosts
from serving.client.variants import ModeVariant, parse_variants
from serving.router.topology import SHIPPED
from stages.errors import InputError
from stages.settings import add_flags, check, check_destination, flag, from_flags, setting, write_destination
from stages.wire.secret_files import add_client_options


def add_measurement(command: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Add the options of a command whose settings define its flags, and which writes a record with `--json`."""
    add_flags(command, settings)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def check_needs(options: argparse.Namespace, needs: Mapping[str, str]) -> None:
    """Raise InputError for a flag that would have no effect. needs: a sentence about each, by the setting's name."""
    for name, sentence in needs.items():
        if getattr(options, name) is not None:
            raise InputError(sentence)


def run_bench(options: argparse.Namespace, name: str, bench: Callable[[], BenchReport]) -> int:
    """Measure, print the table and write the record for `--json`; returns the exit code. Raises OnesweepError."""
    from stages.signals import ends_cleanly

    if options.json:
        check_destination(options.json, "--json")
    head = {"bench": name} | origin()  # before the run: it records the machine's load
    with ends_cleanly():
        report = bench()
    print(report.table)
    if options.json:
        write_destination(options.json, json.dumps(head | report.record, indent=2) + "\n")
    return 0 if report.passed else 1


def absolute(text: str) -> Path:
    """A path that stays valid for a server with another working directory."""
    return Path(text).resolve()


MAX_AT_ONCE = 64  # a router's default limit of requests in flight
CHECKPOINT = flag("default: shipped weights", metavar="DIR", shown="", type=absolute)

# `bench host` and `peers`: the performance of hosts on a machine, and of llama.cpp with the same file.


@dataclass(frozen=True)
class HostBenchSettings:
    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    hosts: int | None = setting(None, "hosts that share the parts of the model", minimum=1, shown="3")
    max_tokens: int | None = setting(None, "tokens to generate; for a byte model, bytes", shown="128", minimum=1)
    levels: int = setting(12, "steps from noise to picture, for a bundle that draws", metavar="K", minimum=1)
    batch: int = setting(16, "requests per mode, one by one and then at once", minimum=1, maximum=MAX_AT_ONCE)
    rounds: int = setting(5, "rounds of requests at once", metavar="R", minimum=1)


@dataclass(frozen=True)
class PeerSettings:
    checkpoint: Path = field(metadata=flag("bundle imported from --source", metavar="DIR", type=absolute))
    source: Path = field(metadata=flag("the model file, for llama.cpp", metavar="FILE.gguf", type=absolute))
    rounds: int = setting(3, "rounds, each measuring both in turn", metavar="R", minimum=1)
    rpc: Path | None = setting(
        None, "llama.cpp's build/bin with RPC: also over far links, which needs root", metavar="DIR", type=absolute
    )


add_host = partial(add_measurement, settings=HostBenchSettings)
add_peers = partial(add_measurement, settings=PeerSettings)


def run_host(options: argparse.Namespace) -> int:
    settings = from_flags(HostBenchSettings, options)
    from stages.checkpoint.bundle import bundle_draws

    unused = "max_tokens" if bundle_draws(settings.checkpoint) else "levels"
    check_needs(options, {unused: f"--{unused.replace('_', '-')} has no effect on {settings.checkpoint}: omit it"})
    from loadtest.host.ring import measure_ring  # imports torch, which takes a second: only when it runs

    return run_bench(options, "host", lambda: BenchReport.of_rows(settings, measure_ring(settings)))


def run_peers(options: argparse.Namespace) -> int:
    settings = from_flags(PeerSettings, options)
    from loadtest.host.peers import measure_peers

    return run_bench(options, "peers", lambda: BenchReport.of_rows(settings, measure_peers(settings)))


# `bench wan`: networks, and every mode over them.

LENGTH_FLAGS = {BYTES: "--bytes", TOKENS: "--max-tokens", LEVELS: "--levels"}


def parse_lengths(text: str, unit: str = BYTES) -> tuple[Length, ...]:
    """Parse output lengths or levels as in "N,N". Raises InputError."""
    option, counts = LENGTH_FLAGS[unit], text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise InputError(f"{option} {text!r} must be positive integers, such as 32,256")
    check_names(option, counts)
    return tuple(Length(int(count), unit) for count in counts)


@dataclass(frozen=True)
class WanSettings:
    profiles: tuple[str, ...] = field(
        metadata=flag("profiles, such as links-60, or FILE:NAME; loopback: no lab", name="--profile", metavar="P[,P]")
    )
    # Empty: the usual ones, or all drawing modes.
    variants: tuple[ModeVariant, ...] = setting(
        (),
        "modes, with settings after a colon: sweep:fp32, ar-speculative:draft=8:int8, resample:chunk=32, steps:int8",
        name="--modes",
        metavar="M[,M]",
        shown="sweep,chunked,ar,ar-speculative,local:copy; for pictures, all",
        type=parse_variants,
    )
    # Empty: a topology names the hosts. Otherwise machines join with a ticket.
    links: tuple[str, ...] = setting(
        (), "links of machines that join: direct, reversed, relayed", name="--links", metavar="L[,L]", shown="no join"
    )
    texts: tuple[str, ...] = setting((), "prompts: novel, copying", name="--text", metavar="T[,T]", shown="novel")
    temperature: float | None = setting(None, "temperature of all requests", metavar="T", shown="the router's default")
    # Turns of each variant, with `at_once` requests each, after a warm-up turn.
    requests: int = setting(10, "turns per variant", metavar="R", minimum=1)
    at_once: int = setting(1, "requests per turn, at once", minimum=1, maximum=MAX_AT_ONCE)
    # Every variant counts up from this seed, so that all get the same requests.
    seed: int = setting(0, "seed of the first request", metavar="S", minimum=0, maximum=MAX_SEED)
    # None: three, or one per block if there are fewer.
    hosts: int | None = setting(None, "hosts that share the blocks", minimum=1, shown="3")
    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    # From --bytes, --max-tokens or --levels; and prompts from `texts`, or classes to draw. Empty: the bundle's.
    lengths: tuple[Length, ...] = ()
    prompts: tuple[Prompts, ...] = ()

    @property
    def host_count(self) -> int:
        return self.hosts or default_hosts(self.checkpoint)


def add_wan(wan: argparse.ArgumentParser) -> None:
    add_measurement(wan, WanSettings)
    lengths = wan.add_mutually_exclusive_group()
    for unit, help in (
        (BYTES, "bytes to generate (32,128)"),
        (TOKENS, "tokens to generate, instead of --bytes"),
        (LEVELS, "steps from noise to picture, for a bundle that draws (12)"),
    ):
        read = partial(parse_lengths, unit=unit)
        lengths.add_argument(LENGTH_FLAGS[unit], dest="lengths", type=read, metavar="N[,N]", help=help)
    wan.set_defaults(lengths=())


def run_wan(options: argparse.Namespace) -> int:
    from loadtest.latency.run import measure_wan, with_defaults

    settings = from_flags(WanSettings, options, lengths=options.lengths)
    return run_bench(options, "wan", lambda: measure_wan(with_defaults(settings)))


# `bench loadtest`: many users at once.


def add_loadtest(loadtest: argparse.ArgumentParser) -> None:
    add_measurement(loadtest, LoadSettings)
    loadtest.add_argument("--router", metavar="HOST:PORT", help="use a running deployment instead of starting one")
    add_client_options(loadtest)


def run_loadtest(options: argparse.Namespace) -> int:
    from loadtest.workload.testbed import TestbedSettings, check_testbed
    from serving.modes import MODES

    target = from_flags(TestbedSettings, options, access=Access.of(options))
    settings = from_flags(LoadSettings, options, target=target)
    check(settings, InputError, "--")
    check_names("--mode", settings.modes, MODES)
    check_names("--users", [*map(str, settings.users)])
    for module in ("locust", "gevent"):
        if find_spec(module) is None:
            raise InputError(f"the load test needs {module}: pip install 'onesweep[loadtest]'")
    check_testbed(settings.target)
    from loadtest.load.run import measure_load

    return run_bench(options, "loadtest", lambda: measure_load(settings))


# `bench chaos`: a deployment, a load, and faults.


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """A deployment, a load, and the faults."""

    minutes: float = setting(10.0, "minutes of load", metavar="M", above=0, maximum=7 * 24 * 60)
    profile: str = setting("links-60", "network profile; loopback needs no root, but cannot be cut", metavar="P")
    seed: int = setting(0, "seed for the fault schedule and the prompts", metavar="S", minimum=0, maximum=(1 << 32) - 1)
    length_scale: float = 1.0  # factor on every fault's length: below 1, a test takes less time
    checkpoint: Path | None = setting(None, "bundle to serve", shown="the shipped weights", metavar="DIR")
    requests_at_once: int = 4
    patience_s: float = 60.0  # after which a client gives up a request
    warm_up_s: float = 5.0  # load before the first fault
    simulate: bool = setting(False, "run fault schedules, drawn from --seed onwards, on a tiny model in virtual time")
    schedules: int = setting(1000, "with --simulate: number of schedules", minimum=1, maximum=10_000_000)

    @property
    def seconds(self) -> float:
        return self.minutes * 60


add_chaos = partial(add_measurement, settings=ChaosSettings)


def run_chaos(options: argparse.Namespace) -> int:
    settings = from_flags(ChaosSettings, options)
    if settings.simulate:
        only = "--simulate accepts only --seed and --schedules: omit the other options"
        check_needs(options, dict.fromkeys(("minutes", "profile", "checkpoint"), only))
        from loadtest.simulation.search import search

        return run_bench(options, "chaos", lambda: search(settings.schedules, settings.seed))
    check_needs(options, {"schedules": "--schedules needs --simulate"})
    from loadtest.faults.serving_run import chaos, serving_report

    return run_bench(options, "chaos", lambda: serving_report(chaos(settings)))


# `bench quality`: text and pictures, scored by judges.

JUDGE = Path(__file__).parent / "quality/fashion.safetensors"


@dataclass(frozen=True)
class QualitySettings:
    """Settings of `bench quality`: for text with `prompts`, for pictures with `pictures`."""

    prompts: Path | None = setting(None, "held-out text: a file or folder", metavar="PATH")
    pictures: Path | None = setting(None, "pictures with a test part, instead of text", metavar="PATH", type=absolute)
    # None: all served modes except `auto`.
    modes: str | None = setting(
        None,
        "modes, with settings: sweep:steps=16, resample:ar:chunk=32:candidates=64; for pictures: steps:int8",
        metavar="M[,M]",
        shown="all served",
    )
    count: int = setting(100, "prompts, or pictures per row", minimum=1)
    max_bytes: int = setting(256, "bytes to generate", name="--bytes", minimum=1)
    prompt_bytes: int = 64  # of a prompt
    levels: tuple[int, ...] = setting((12,), "steps from noise to picture", metavar="K[,K]")
    judge: Path = setting(
        JUDGE, "judge of pictures; if missing, it is trained on --pictures", type=absolute, shown="for Fashion-MNIST"
    )
    seed: int = setting(0, "seed of the first request; later ones count up", metavar="S", minimum=0, maximum=MAX_SEED)
    checkpoint: Path | None = setting(None, "bundle to serve", metavar="DIR", shown="shipped weights", type=absolute)
    in_flight: int = 8  # requests at once; with `write`, one
    write: Path | None = setting(None, "file for the frontier that mode auto chooses from: DIR/frontier.json")


add_quality = partial(add_measurement, settings=QualitySettings)


def run_quality(options: argparse.Namespace) -> int:
    settings = from_flags(QualitySettings, options)
    if (settings.prompts is None) == (settings.pictures is None):
        raise InputError("give either --prompts with held-out text, or --pictures")
    if settings.write is not None:
        check_destination(settings.write, "--write")
    if settings.pictures is not None:
        check_needs(options, {"write": "--write needs --prompts", "max_bytes": "--bytes needs --prompts"})
        from loadtest.quality.pictures import measure_pictures as measure
    else:
        check_needs(options, {"levels": "--levels needs --pictures", "judge": "--judge needs --pictures"})
        from loadtest.quality.text import measure_text as measure
    return run_bench(options, "quality", lambda: measure(settings))
