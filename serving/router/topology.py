"""The topology: which host holds which blocks, where each listens, and where the router does. One TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from serving.router.request import DEFAULT_ROUTER
from stages.device import AUTO, is_device_name
from stages.errors import InputError, TopologyError, one_of
from stages.settings import from_toml, limits, read_toml
from stages.wire.channel import check_name, parse_address
from stages.wire.tls import Tls

if TYPE_CHECKING:
    from stages.importing.importing import StageHost

FIRST_HOST_PORT = 7701
MAX_HOSTS = 64
ROUTER_END = "router"  # no host is called so


@dataclass(frozen=True)
class HostEntry:
    """One host. `address` is what others dial; `listen` what it binds, if that differs."""

    name: str
    address: str
    blocks: tuple[int, ...] = field(metadata=limits(least=0))
    listen: str
    device: str | None = None  # what it computes on, unless its command says so; None = `auto`

    @property
    def span(self) -> str:
        return ",".join(map(str, self.blocks))

    @property
    def is_first(self) -> bool:
        """True where a sweep begins here."""
        return self.blocks[0] == 0


@dataclass(frozen=True)
class Topology:
    """Hosts that hold all blocks between them, some of them maybe twice, and the router that uses them."""

    hosts: tuple[HostEntry, ...]
    router: str = DEFAULT_ROUTER
    checkpoint: Path | None = None
    # Directory of `onesweep certs`; None = plain text.
    certificates: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(f"a topology has 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        for host in self.hosts:
            check_host_name(host.name)
        for what in ("name", "address"):
            values = [getattr(host, what) for host in self.hosts]
            doubled = sorted({value for value in values if values.count(value) > 1})
            if doubled:
                raise TopologyError(f"two hosts have the {what} {doubled[0]!r}: give each its own")
        self._check_blocks()

    @property
    def blocks(self) -> int:
        """Blocks of a whole model."""
        return max(host.blocks[-1] for host in self.hosts) + 1

    def host(self, name: str) -> HostEntry:
        """The host called `name`. Raises TopologyError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TopologyError(
            f"no host {name!r} in the topology{one_of(name, [h.name for h in self.hosts], 'there are')}"
        )

    @property
    def addresses(self) -> set[str]:
        """The addresses of its router and its hosts."""
        return {self.router, *(host.address for host in self.hosts)}

    @property
    def replicated(self) -> set[str]:
        """Names of hosts whose blocks another one holds, too."""
        spans = [host.blocks for host in self.hosts]
        return {host.name for host in self.hosts if spans.count(host.blocks) > 1}

    def successors(self, host: HostEntry) -> list[str]:
        """Addresses of the hosts that may come after `host` in a sweep; none for one that holds all blocks."""
        if len(host.blocks) == self.blocks:
            return []
        due = (host.blocks[-1] + 1) % self.blocks
        others = [other for other in self.hosts if len(other.blocks) < self.blocks]
        return [other.address for other in others if other.blocks[0] == due]

    def tls_of(self, name: str) -> Tls | None:
        """The certificate of a host, or of `router`."""
        if self.certificates is None:
            return None
        return Tls(self.certificates / "ca.pem", self.certificates / f"{name}.pem", self.certificates / f"{name}.key")

    @property
    def client_tls(self) -> Tls | None:
        """The authority that a client needs to verify the router."""
        return Tls(self.certificates / "ca.pem") if self.certificates else None

    def _check_blocks(self) -> None:
        for host in self.hosts:
            if not host.blocks:
                raise TopologyError(f"host {host.name!r} has no blocks")
            if list(host.blocks) != list(range(host.blocks[0], host.blocks[0] + len(host.blocks))):
                raise TopologyError(f"host {host.name!r} holds {host.span}: a host holds neighbouring blocks, in order")
        begins = {host.blocks[0] for host in self.hosts}
        for host in self.hosts:
            due = host.blocks[-1] + 1
            if due < self.blocks and due not in begins:
                raise TopologyError(
                    f"no host begins with block {due}, which must follow {host.name!r} ({host.span}): "
                    "a host continues where another one ends"
                )
        if 0 not in begins:
            raise TopologyError("block 0 is missing: a sweep begins there")
        ends = {host.blocks[-1] + 1 for host in self.hosts}
        for host in self.hosts:
            if host.blocks[0] and host.blocks[0] not in ends:
                raise TopologyError(f"no host ends with block {host.blocks[0] - 1}, so {host.name!r} is never reached")

    def to_toml(self) -> str:
        """The file that `read_topology` reads. Raises InputError for a path that is not UTF-8."""
        lines = [f"checkpoint = {_quoted(str(self.checkpoint))}", ""] if self.checkpoint else []
        lines += ["[tls]", f"directory = {_quoted(str(self.certificates))}", ""] if self.certificates else []
        lines += ["[router]", f"listen = {_quoted(self.router)}"]
        for host in self.hosts:
            lines += ["", "[[hosts]]", f"name = {_quoted(host.name)}", f"address = {_quoted(host.address)}"]
            lines += [f"listen = {_quoted(host.listen)}"] if host.listen != host.address else []
            lines += [f"blocks = [{', '.join(map(str, host.blocks))}]"]
            lines += [f"device = {_quoted(host.device)}"] if host.device else []
        return "\n".join(lines) + "\n"


def check_host_name(name: str) -> None:
    """Raise InputError unless a host can be called so."""
    if check_name(name, "host name") in ("router", "http"):
        raise TopologyError(f"a host cannot be called {name!r}: give it another name")


def local_topology(
    hosts: int, blocks: int, checkpoint: Path, first_port: int = FIRST_HOST_PORT, replicas: int = 1
) -> Topology:
    """`hosts` hosts on loopback that share out `blocks` blocks as evenly as they go, each of them `replicas` times."""
    if not 1 <= hosts <= blocks:
        raise InputError(f"{hosts} hosts cannot share {blocks} blocks: choose 1 to {blocks} hosts")
    count = hosts * replicas
    if not 1 <= replicas <= MAX_HOSTS // hosts:
        raise InputError(f"{replicas} replicas of {hosts} hosts: choose 1 to {MAX_HOSTS // hosts}")
    if not 2 <= first_port <= 65536 - count:
        raise InputError(
            f"port {first_port - 1} leaves no room for {count} hosts after it: choose 1 to {65535 - count}"
        )
    cuts = [round(i * blocks / hosts) for i in range(hosts + 1)]
    entries = []
    for i in range(count):
        which, copy = divmod(i, replicas)
        name = f"host-{which + 1}" + (f"-{copy + 1}" if replicas > 1 else "")
        address = f"127.0.0.1:{first_port + i}"
        entries.append(HostEntry(name, address, tuple(range(cuts[which], cuts[which + 1])), address))
    return Topology(tuple(entries), f"127.0.0.1:{first_port - 1}", checkpoint)


def read_topology(path: Path) -> Topology:
    """Read a topology file. Raises TopologyError that names the file and what to change."""
    table = read_toml(path, "the topology", TopologyError)
    try:
        return _parse(table, path.parent.absolute())
    except InputError as error:
        raise TopologyError(f"{path}: {error}") from None


def _parse(table: dict[str, Any], base: Path) -> Topology:
    _only(table, {"router", "hosts", "checkpoint", "tls"}, "the topology")
    router, tls = table.get("router", {}), table.get("tls", {})
    _only(router, {"listen"}, "[router]")
    _only(tls, {"directory"}, "[tls]")
    hosts = table.get("hosts")
    if not isinstance(hosts, list):
        raise TopologyError("there is no [[hosts]] entry")
    listen = _text(router, "listen", DEFAULT_ROUTER, "[router]")
    parse_address(listen, "router listen")
    directory = base / _text(table, "checkpoint", "", "the topology") if "checkpoint" in table else None
    certificates = base / _text(tls, "directory", "certs", "[tls]") if "tls" in table else None
    return Topology(tuple(_host(entry, i) for i, entry in enumerate(hosts)), listen, directory, certificates)


def _host(entry: dict[str, Any], index: int) -> HostEntry:
    where, given = f"host {index + 1}", entry
    if isinstance(entry, dict):
        given = {"name": f"host-{index + 1}", "listen": entry.get("address", ""), **entry}
    host = from_toml(HostEntry, given, where, error=TopologyError)
    for what, value in (("address", host.address), ("listen", host.listen)):
        parse_address(value, f"{where} ({host.name}): {what}")
    if host.device not in (None, AUTO) and not is_device_name(host.device):
        device = host.device[:40]
        raise TopologyError(f"{where} ({host.name}): device must be auto, cpu, cuda or cuda:N, not {device!r}")
    return host


def _text(table: dict[str, Any], key: str, default: str, where: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise TopologyError(f"{where}: {key} must be text in quotes, not {value!r}")
    return value


def _quoted(text: str) -> str:
    """A TOML string. JSON's escapes are TOML's, but for DEL; what is no UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{text!r} is not UTF-8 and cannot be written into a topology: rename it") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _only(table: object, known: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise TopologyError(f"{where} must be a section")
    unknown = sorted(set(table) - known)
    if unknown:
        raise TopologyError(f"{where} has an unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")


# Machines that come and go: in which order they make a ring, and which blocks each of them holds.

Span: TypeAlias = tuple[int, ...]
ALL_ORDERS = 8  # machines, of which every order is tried: 40,320; of more, the nearest comes next
UNKNOWN_MS = 1000.0  # for a trip that could not be measured
WORTH_MS, WORTH_SHARE = 5.0, 0.1  # that another order than the last one must spare: a new cut is sent anew


def ring_order(names: Sequence[str], trips_ms: Mapping[tuple[str, str], float]) -> tuple[str, ...]:
    """Machines in the order in which a token takes them with the least delay.

    :param names: in the order of before, which stays where another one spares little.
    :param trips_ms: one way, from one to another; those of the router are from and to ROUTER_END.
    """

    def delay_ms(order: Sequence[str]) -> float:
        # the first host and the router get the last one's token; a prompt comes from the router
        pairs = [*pairwise((ROUTER_END, *order, ROUTER_END)), *([(order[-1], order[0])] if order[1:] else [])]
        return sum(trips_ms.get(pair, UNKNOWN_MS) for pair in pairs)

    def by_nearest(first: str) -> tuple[str, ...]:
        order, left = [first], [name for name in names if name != first]
        while left:
            order.append(min(left, key=lambda name: trips_ms.get((order[-1], name), UNKNOWN_MS)))
            left.remove(order[-1])
        return tuple(order)

    orders = permutations(names) if len(names) <= ALL_ORDERS else map(by_nearest, names)
    best = min(orders, key=delay_ms)
    before_ms = delay_ms(names)
    return best if before_ms - delay_ms(best) > max(WORTH_MS, WORTH_SHARE * before_ms) else tuple(names)


def placed(
    held: Mapping[str, Span], machines: Mapping[str, StageHost], sizes: Sequence[int]
) -> tuple[dict[str, Span], list[Span]]:
    """Blocks that each machine is to hold, and the runs of blocks that none has room for.

    :param held: blocks of machines, of those that are gone, too.
    :param machines: those that are there, by name, with all their room: what they hold is in it.
    :param sizes: bytes of each block.

    Who holds blocks keeps them. What is missing goes to a machine without any, to one whose blocks another holds, too,
    or to a neighbour, beside its own. All others become replicas, or relieve one that holds several of one of them.
    """
    spans = {name: span for name, span in held.items() if name in machines}

    def fits(name: str, span: Span) -> bool:
        return sum(sizes[block] for block in span) <= machines[name].memory_bytes

    def is_alone(name: str) -> bool:
        return [*spans.values()].count(spans[name]) == 1

    def take(run: Span) -> bool:
        free = [name for name in machines if (name not in spans or not is_alone(name)) and fits(name, run)]
        if free:
            spans[max(free, key=lambda name: (name not in spans, machines[name].speed))] = run
            return True
        for name, span in spans.items():
            both = tuple(sorted((*span, *run)))
            if is_alone(name) and len(both) == both[-1] - both[0] + 1 and fits(name, both):
                spans[name] = both
                return True
        return False

    def need(span: Span) -> tuple[int, float]:
        """More for blocks that fewer machines hold, then for those that their machines take longer for."""
        speeds = [machines[name].speed for name, other in spans.items() if other == span]
        return -len(speeds), sum(sizes[block] for block in span) / sum(speeds)

    for run in _missing_runs(spans, len(sizes)):
        if not take(run):
            for block in run:
                take((block,))
    missing = _missing_runs(spans, len(sizes))
    for name in machines:
        able = sorted({span for span in spans.values() if fits(name, span)})
        if name not in spans and able:
            spans[name] = max(able, key=need)
        for other, span in [*spans.items()] if name not in spans else ():
            ends = [end for end in (span[-1:], span[:1]) if fits(name, end)]
            if len(span) > 1 and is_alone(other) and ends:
                spans[name], spans[other] = ends[0], tuple(block for block in span if block not in ends[0])
                break
    return spans, missing


def _missing_runs(spans: Mapping[str, Span], blocks: int) -> list[Span]:
    """Blocks that nobody holds, neighbours together."""
    runs, there = list[Span](), {block for span in spans.values() for block in span}
    for block in range(blocks):
        if block not in there:
            follows = bool(runs) and runs[-1][-1] == block - 1
            runs[-1:] = [(*runs[-1], block)] if follows else [*runs[-1:], (block,)]
    return runs
