"""The commands `bench wan`, `bench warm` and `bench first-token`, and their settings. Help reads this file."""

import argparse
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onesweep.loadtest.commands import CHECKPOINT, absolute, add_measurement, say
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.loadtest.workload.arms import (
    BYTES,
    LENGTH_FLAGS,
    LEVELS,
    TOKENS,
    Arm,
    Length,
    ModeChoice,
    parse_choices,
    parse_lengths,
    parse_names,
)
from onesweep.loadtest.workload.prompts import Prompts, parse_prompts
from onesweep.loadtest.workload.testbed import default_hosts
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.settings import flag, from_flags, setting
from onesweep.stages.signals import ends_cleanly

MAX_AT_ONCE = 64  # requests in flight that a router takes by default
MAX_SEED = (1 << 63) - 1  # half of a request's range: seeds count up from the first one
MAX_IDLE_S = 3600  # windows and sessions have long fallen back


TEXT_CHOICES = tuple(map(ModeChoice, ("sweep", "chunked", "ar", "ar-speculative")))
TEXT_LENGTHS = (Length(32), Length(128))


def _modes(*default: str, help: str, shown: str | None = None) -> Any:  # noqa: ANN401 - a field
    choices, shown = tuple(map(ModeChoice, default)), shown or ",".join(default)
    return setting(choices, help, name="--modes", metavar="M[,M]", shown=shown, type=parse_choices)


@dataclass(frozen=True)
class WanSettings:
    """Settings of `onesweep bench wan`."""

    profiles: tuple[str, ...] = field(
        metadata=flag(
            "networks, such as links-60; loopback: no lab", name="--profile", metavar="P[,P]", type=parse_names
        )
    )
    profiles_file: Path | None = setting(None, "file with more profiles", name="--profiles")
    # Empty: TEXT_CHOICES, or all modes of drawing.
    choices: tuple[ModeChoice, ...] = _modes(
        help="with settings after a colon: sweep:fp32, ar-speculative:lookup+int8, resample:ngram, steps:int8",
        shown="sweep,chunked,ar,ar-speculative; of pictures chain,steps,local",
    )
    temperature: float | None = setting(None, "of every request", metavar="T", shown="the router's default")
    # Turns of each arm, after one that warms up; `at_once` requests each.
    requests: int = setting(10, "turns of each arm", metavar="R", least=1)
    at_once: int = setting(1, "requests in a turn", least=1, most=MAX_AT_ONCE)
    # Every arm begins with this seed and counts on from it, so that arms are asked for the same texts.
    seed: int = setting(0, "seed of the first request", metavar="S", least=0, most=MAX_SEED)
    # None: three, or one for each block where there are fewer.
    hosts: int | None = setting(None, "hosts that share the blocks", shown="3")
    checkpoint: Path = field(default=SHIPPED.resolve(), metadata=CHECKPOINT)
    backend: str = setting("torch", "backend of the hosts", metavar="B")
    # Above 0: each arm also after this many idle seconds.
    idle_s: float = setting(0.0, "also measure after idle seconds", shown="0: no", least=0, most=MAX_IDLE_S)
    control: bool = setting(True, "do not compare the lab with plain loopback")
    # From --bytes, --max-tokens or --levels, and from --text and --prompt; empty: the bundle's (`settled`).
    lengths: tuple[Length, ...] = ()
    prompts: tuple[Prompts, ...] = ()

    @property
    def host_count(self) -> int:
        return self.hosts or default_hosts(self.checkpoint)

    def arms(self) -> list[Arm]:
        idles = [0.0] + ([self.idle_s] if self.idle_s else [])
        return [
            Arm(choice, length, idle, prompts, self.temperature)
            for prompts in self.prompts
            for idle in idles
            for choice in self.choices
            for length in self.lengths
        ]


@dataclass(frozen=True)
class WarmSettings:
    """Settings of `onesweep bench warm`."""

    profile: str = setting("links-60", "network", metavar="P")
    choices: tuple[ModeChoice, ...] = _modes("sweep", "ar", help="as in bench wan")
    checkpoint: Path = field(default=SHIPPED.resolve(), metadata=CHECKPOINT)
    max_bytes: int = setting(128, "bytes to generate", name="--bytes")
    # Each deployment has every situation once for each mode.
    rounds: int = setting(5, "deployments started", metavar="R", least=1)
    idle_s: float = setting(15.0, "length of the pause", least=0, most=MAX_IDLE_S)
    keep_warm: bool = setting(True, "without the messages that keep idle links warm")


@dataclass(frozen=True, kw_only=True)
class FirstTokenSettings:
    """Settings of `onesweep bench first-token`."""

    checkpoint: Path = field(metadata=flag("with an AR model", metavar="DIR", type=absolute))
    profile: str = setting("links-60", "network", metavar="P")
    prompt_symbols: int = setting(1000, "bytes for models of bytes", name="--prompt-tokens")
    text: Path | None = setting(None, "source of the prompt", shown="text that ships with Python")
    # Of each arm, after one that warms up.
    requests: int = setting(5, "requests of each arm", metavar="R", least=1)
    codecs: tuple[str, ...] = setting(("fp32", "int8"), "codecs of hidden states", name="--codec", metavar="C[,C]")


def add_wan(wan: argparse.ArgumentParser) -> None:
    add_measurement(wan, WanSettings, html=True)
    lengths = wan.add_mutually_exclusive_group()
    for unit, help in (
        (BYTES, "bytes to generate (32,128)"),
        (TOKENS, "tokens to generate, in place of --bytes"),
        (LEVELS, "steps from noise to picture, of a bundle that draws (12)"),
    ):
        read = partial(parse_lengths, unit=unit)
        lengths.add_argument(LENGTH_FLAGS[unit], dest="lengths", type=read, metavar="N[,N]", help=help)
    wan.set_defaults(lengths=())
    wan.add_argument("--text", default="", metavar="T[,T]", help="prompts: novel, copying (novel)")
    own = "prompts of your own, one a file"
    wan.add_argument("--prompt", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help=own)


add_warm = partial(add_measurement, settings=WarmSettings)
add_first_token = partial(add_measurement, settings=FirstTokenSettings)


def run_wan(options: argparse.Namespace) -> int:
    from onesweep.loadtest.latency.links import LINKS
    from onesweep.loadtest.latency.report import report
    from onesweep.loadtest.latency.rows import wan_table
    from onesweep.loadtest.latency.run import check_wan, measure_wan, settled, wan_record

    prompts = parse_prompts(options.text, options.prompt) if options.text or options.prompt else ()
    settings = settled(from_flags(WanSettings, options, lengths=options.lengths, prompts=prompts))
    check_report_options(options)
    profiles = check_wan(settings)
    with ends_cleanly():
        figures = measure_wan(settings, profiles, say)
    print(wan_table(figures.rows))
    if figures.links:
        print("\nthe lab's links, plain sockets:\n" + LINKS.aligned(figures.links))
    if figures.control:
        print("\nthe lab against plain loopback:\n" + wan_table(figures.control))
    record = wan_record(settings, figures)
    write_report(options, record, lambda: report(record))
    return int(any(row["failures"] for row in figures.rows))


def run_warm(options: argparse.Namespace) -> int:
    from onesweep.loadtest.latency.first_token import WARM, measure_warm
    from onesweep.loadtest.latency.run import check_warm
    from onesweep.loadtest.report.record import origin

    settings = from_flags(WarmSettings, options)
    profile = check_warm(settings)
    check_report_options(options)
    say(f"{profile.name}: {settings.rounds} deployments for each mode ...")
    with ends_cleanly():
        rows = measure_warm(settings, profile)
    print(WARM.aligned(rows))
    write_report(options, {"bench": "warm", "profile": profile.name, "rows": rows, **origin()})
    return 0


def run_first_token(options: argparse.Namespace) -> int:
    from onesweep.loadtest.lab.profile import profile_named
    from onesweep.loadtest.latency.first_token import first_token_table, measure_first_token, prompt_for
    from onesweep.loadtest.report.record import origin

    settings = from_flags(FirstTokenSettings, options)
    profile = profile_named(settings.profile)
    check_report_options(options)
    prompt, alphabet = prompt_for(settings, profile)
    with ends_cleanly():
        rows, turns = measure_first_token(settings, profile, prompt, alphabet, say)
    print(first_token_table(rows, turns))
    record = {"profile": profile.name, "prompt_symbols": settings.prompt_symbols, "rows": rows, "turns": turns}
    write_report(options, {"bench": "first-token", **origin(), **record})
    return int(any(row["failed"] for row in (*rows, *turns)))
