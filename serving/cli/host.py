"""`onesweep host`: one block host, in its place of a topology, or by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from serving.router.topology import read_topology
from stages.errors import InputError
from stages.host.settings import HostSettings, StageSettings
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import start_log
from stages.wire.flags import add_registry_flags, add_server_options, open_registry
from stages.wire.registry import registry_settings
from stages.wire.tls import security_of


def add_host(host: argparse.ArgumentParser) -> None:
    add = host.add_argument
    add("name", metavar="NAME", nargs="?", help="its name in the topology, accounts and errors (stage- and the blocks)")
    add("--topology", type=Path, metavar="FILE", help="the hosts: this is one of them")
    add("--checkpoint", type=Path, metavar="DIR", help="a checkpoint or bundle (the topology's)")
    add("--blocks", metavar="N[,N]", help="without a topology: consecutive blocks that this host holds")
    add("--listen", metavar="HOST:PORT", help="without a topology")
    add("--next", metavar="HOST:PORT[,...]", help="hosts that may come after this one; after the last, the first")
    add_registry_flags(host)
    add("--advertise", metavar="HOST:PORT", help="what others dial, for the registry (--listen)")
    add_flags(host, HostSettings)
    add_flags(host, StageSettings)
    add_server_options(host)


def run_host(options: argparse.Namespace) -> int:
    from stages.host.server import serve

    settings = _of_topology(options) if options.topology else _alone(options)
    start_log(settings.seeing.log_format, settings.host.name)
    serve(settings)
    return 0


def _of_topology(options: argparse.Namespace) -> StageSettings:
    """A host whose place a topology says. Raises OnesweepError."""
    told = {f"--{name}": getattr(options, name) for name in ("blocks", "listen", "next", "registry", "advertise")}
    if given := [flag for flag, value in told.items() if value is not None]:
        raise InputError(f"the topology says where a host is: leave {given[0]} out")
    if options.name is None:
        raise InputError("onesweep host: NAME is missing: which host of the topology is this?")
    topology = read_topology(options.topology)
    host = topology.host(options.name)
    checkpoint = options.checkpoint or topology.checkpoint
    if checkpoint is None:
        raise InputError(f"{options.topology} names no checkpoint: add one, or give --checkpoint")
    options.device = options.device or host.device
    return from_flags(
        StageSettings,
        options,
        checkpoint=checkpoint,
        blocks=host.blocks,
        listen=host.listen,
        next=tuple(topology.successors(host)),
        host=_limits(options, host.name),
        security=security_of(options, topology.tls_of(host.name)),
    )


def _alone(options: argparse.Namespace) -> StageSettings:
    """A host whose place its options say. Raises InputError."""
    needed = {"--checkpoint": options.checkpoint, "--blocks": options.blocks, "--listen": options.listen}
    if missing := [flag for flag, value in needed.items() if value is None]:
        raise InputError(f"onesweep host: {missing[0]} is missing; --topology says where hosts are")
    blocks = _blocks(options.blocks)
    registry = registry_settings(options)
    if registry is not None and options.next is not None:
        raise InputError("--next and --registry both say who comes next: give one of them")
    if registry is None and options.advertise is not None:
        raise InputError("--advertise says what a registry hands out: name one with --registry")
    following = tuple(options.next.split(",")) if options.next else ()
    if len(set(following)) < len(following):
        raise InputError(f"--next {options.next!r} names a host twice: name each once")
    name = options.name or "-".join(["stage", *sorted({str(block) for block in (*blocks[:1], *blocks[-1:])})])
    return from_flags(
        StageSettings,
        options,
        checkpoint=options.checkpoint,
        blocks=blocks,
        listen=options.listen,
        next=following,
        host=_limits(options, name),
        security=security_of(options),
        registry=open_registry(registry) if registry else None,
        advertise=options.advertise,
    )


def _limits(options: argparse.Namespace, name: str) -> HostSettings:
    device = options.device or None  # empty where a script has none to name
    return from_flags(HostSettings, argparse.Namespace(**vars(options) | {"device": device}), name=name)


def _blocks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--blocks {text!r} must be numbers such as 0 or 0,1") from None
