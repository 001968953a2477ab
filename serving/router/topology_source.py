"""Sources of a topology, a file or a key in etcd, and how a running host or router follows one."""

import argparse
import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serving.router.topology import ETCD, ETCD_SHAPE, MAX_SHOWN, Topology, read_topology
from stages.errors import InputError, OnesweepError
from stages.threads import in_thread

log = logging.getLogger(__name__)

# Pause between two reads of one key or file of a few kilobytes. A follower of single changes would have to notice
# that it missed one.
FOLLOW_S = 1.0


class TopologySource(Protocol):
    """A source of a topology; `str` of it is its name in messages."""

    def read(self) -> Topology:
        """The current topology. Raises ConfigError for a wrong one, ServiceError if there is none."""


@dataclass(frozen=True)
class TopologyFile:
    """A TOML file on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> Topology:
        return read_topology(self.path)


def add_topology_option(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--topology` to a command that reads a live ring's topology."""
    what = f"the hosts: a file, or {ETCD_SHAPE} (with these files: TLS)"
    parser.add_argument("--topology", required=required, metavar="WHERE", help=what)


def topology_at(where: str, insecure: bool = False) -> TopologySource:
    """The source that `--topology` names, not read yet. Raises InputError.

    :param insecure: etcd on another machine may be asked in plain text.
    """
    if not where or ("://" in where and not where.startswith(ETCD)):
        raise InputError(f"--topology {where[:MAX_SHOWN]!r} must be a file, or {ETCD_SHAPE}")
    if not where.startswith(ETCD):
        return TopologyFile(Path(where))
    try:
        from serving.router.etcd import EtcdTopology
    except ImportError as error:
        raise InputError(
            f"a topology in etcd needs etcd3gw, which is not installed here ({error}): pip install 'onesweep[etcd]'"
        ) from None
    return EtcdTopology(where, insecure)


def topology_in_file(where: str) -> Topology:
    """The topology that `--topology` names, for a command that does not read etcd. Raises InputError."""
    if where.startswith(ETCD):
        raise InputError("this command takes a topology from a file only; `router`, `host` and `doctor` ask etcd")
    return topology_at(where).read()


async def follow_topology(source: TopologySource, known: Topology, use: Callable[[Topology], None]) -> None:
    """Call `use` whenever the topology of `source` differs from the last one, at first `known`; for ever.

    A topology that cannot be read, or that `use` refuses (InputError), changes nothing; the log says why, once.
    """
    problem = ""
    while True:
        await asyncio.sleep(FOLLOW_S)
        try:
            topology = await in_thread(source.read)
        except OnesweepError as error:
            # each error about a wrong text is a new problem; an outage's wording differs from second to second
            before, problem = problem, str(error) if isinstance(error, InputError) else "outage"
            if problem != before:
                log.warning("the hosts stay unchanged: %s", error)
            continue
        if problem:
            log.info("the topology in %s can be read again", source)
        problem = ""
        if topology != known:
            known = topology
            try:
                use(topology)
            except InputError as error:
                log.warning("the hosts stay unchanged: %s", error)
