"""The command `bench wan`, and its settings, which are its flags. Help reads this file: nothing heavy here."""

import argparse
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.commands import CHECKPOINT, MAX_AT_ONCE, MAX_SEED, add_measurement, check_names, run_bench
from loadtest.workload.prompts import BYTES, LEVELS, TOKENS, Length, Prompts
from loadtest.workload.testbed import default_hosts
from serving.client.variants import ModeVariant, parse_variants
from serving.router.topology import SHIPPED
from stages.errors import InputError
from stages.settings import flag, from_flags, setting

LENGTH_FLAGS = {BYTES: "--bytes", TOKENS: "--max-tokens", LEVELS: "--levels"}


def parse_lengths(text: str, unit: str = BYTES) -> tuple[Length, ...]:
    """The output lengths, or levels, of "N,N". Raises InputError."""
    option, counts = LENGTH_FLAGS[unit], text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise InputError(f"{option} {text!r} must be numbers from 1, such as 32,256")
    check_names(option, counts)
    return tuple(Length(int(count), unit) for count in counts)


@dataclass(frozen=True)
class WanSettings:
    """Settings of `bench wan`."""

    profiles: tuple[str, ...] = field(
        metadata=flag("networks, such as links-60, or FILE:NAME; loopback: no lab", name="--profile", metavar="P[,P]")
    )
    # Empty: the usual ones, or all modes of drawing.
    variants: tuple[ModeVariant, ...] = setting(
        (),
        "with settings after a colon: sweep:fp32, ar-speculative:draft=8:int8, resample:chunk=32, steps:int8",
        name="--modes",
        metavar="M[,M]",
        shown="sweep,chunked,ar,ar-speculative,local:copy; of pictures all",
        type=parse_variants,
    )
    # Empty: a topology names the hosts. Else machines join with a ticket.
    links: tuple[str, ...] = setting(
        (), "machines that join, by links direct, reversed, relayed", name="--links", metavar="L[,L]", shown="no join"
    )
    texts: tuple[str, ...] = setting((), "prompts: novel, copying", name="--text", metavar="T[,T]", shown="novel")
    temperature: float | None = setting(None, "of every request", metavar="T", shown="the router's default")
    # Turns of each variant, after one that warms up; `at_once` requests each.
    requests: int = setting(10, "turns of each variant", metavar="R", least=1)
    at_once: int = setting(1, "requests in a turn", least=1, most=MAX_AT_ONCE)
    # Every variant begins with this seed and counts on from it, so that all are asked for the same texts.
    seed: int = setting(0, "seed of the first request", metavar="S", least=0, most=MAX_SEED)
    # None: three, or one for each block where there are fewer.
    hosts: int | None = setting(None, "hosts that share the blocks", least=1, shown="3")
    checkpoint: Path = field(default=SHIPPED, metadata=CHECKPOINT)
    # From --bytes, --max-tokens or --levels; and of `texts`, or the classes of what draws. Empty: the bundle's.
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
        (TOKENS, "tokens to generate, in place of --bytes"),
        (LEVELS, "steps from noise to picture, of a bundle that draws (12)"),
    ):
        read = partial(parse_lengths, unit=unit)
        lengths.add_argument(LENGTH_FLAGS[unit], dest="lengths", type=read, metavar="N[,N]", help=help)
    wan.set_defaults(lengths=())


def run_wan(options: argparse.Namespace) -> int:
    from loadtest.latency.run import measure_wan, settled

    settings = from_flags(WanSettings, options, lengths=options.lengths)
    return run_bench(options, lambda: measure_wan(settled(settings)))
