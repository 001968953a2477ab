"""The topology: which host holds which blocks, where each listens, and where the router does. One TOML file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import InputError, TopologyError
from stages.transport import check_name, parse_address

DEFAULT_ROUTER = "127.0.0.1:7700"
FIRST_HOST_PORT = 7701
MAX_HOSTS = 64


@dataclass(frozen=True)
class HostEntry:
    """One host. `address` is what others dial; `listen` what it binds, if that differs."""

    name: str
    address: str
    blocks: tuple[int, ...]
    listen: str

    @property
    def span(self) -> str:
        return ",".join(map(str, self.blocks))


@dataclass(frozen=True)
class Topology:
    """A ring of hosts in the order of their blocks, and the router that uses it."""

    hosts: tuple[HostEntry, ...]
    router: str = DEFAULT_ROUTER
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(f"a topology has 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        for host in self.hosts:
            if check_name(host.name, "host name") in ("router", "http"):
                raise TopologyError(f"a host cannot be called {host.name!r}: give it another name")
        for what in ("name", "address"):
            values = [getattr(host, what) for host in self.hosts]
            doubled = sorted({value for value in values if values.count(value) > 1})
            if doubled:
                raise TopologyError(f"two hosts have the {what} {doubled[0]!r}: give each its own")
        self._check_blocks()

    @property
    def blocks(self) -> int:
        return sum(len(host.blocks) for host in self.hosts)

    def host(self, name: str) -> HostEntry:
        """The host called `name`. Raises TopologyError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TopologyError(f"no host {name!r} in the topology; there are {', '.join(h.name for h in self.hosts)}")

    def successor(self, host: HostEntry) -> str | None:
        """Address of the next host in the ring; None where one host is the whole ring."""
        if len(self.hosts) == 1:
            return None
        return self.hosts[(self.hosts.index(host) + 1) % len(self.hosts)].address

    def _check_blocks(self) -> None:
        due = 0
        for host in self.hosts:
            if not host.blocks:
                raise TopologyError(f"host {host.name!r} has no blocks")
            for block in host.blocks:
                if block < due:
                    raise TopologyError(f"block {block} is held twice (again by {host.name!r}): give each to one host")
                if block > due:
                    raise TopologyError(f"block {due} is missing before {host.name!r}: hosts come in block order")
                due += 1

    def to_toml(self) -> str:
        """The file that `read_topology` reads. Raises InputError for a path that is not UTF-8."""
        lines = [f"checkpoint = {_quoted(str(self.checkpoint))}", ""] if self.checkpoint else []
        lines += ["[router]", f"listen = {_quoted(self.router)}"]
        for host in self.hosts:
            lines += ["", "[[hosts]]", f"name = {_quoted(host.name)}", f"address = {_quoted(host.address)}"]
            lines += [f"listen = {_quoted(host.listen)}"] if host.listen != host.address else []
            lines += [f"blocks = [{', '.join(map(str, host.blocks))}]"]
        return "\n".join(lines) + "\n"


def local_topology(hosts: int, blocks: int, checkpoint: Path, first_port: int = FIRST_HOST_PORT) -> Topology:
    """`hosts` hosts on loopback that share out `blocks` blocks as evenly as they go."""
    if not 1 <= hosts <= blocks:
        raise InputError(f"{hosts} hosts cannot share {blocks} blocks: choose 1 to {blocks} hosts")
    if not 2 <= first_port <= 65536 - hosts:
        raise InputError(
            f"port {first_port - 1} leaves no room for {hosts} hosts after it: choose 1 to {65535 - hosts}"
        )
    cuts = [round(i * blocks / hosts) for i in range(hosts + 1)]
    entries = []
    for i in range(hosts):
        address = f"127.0.0.1:{first_port + i}"
        entries.append(HostEntry(f"host-{i + 1}", address, tuple(range(cuts[i], cuts[i + 1])), address))
    return Topology(tuple(entries), f"127.0.0.1:{first_port - 1}", checkpoint)


def read_topology(path: Path) -> Topology:
    """Read a topology file. Raises TopologyError that names the file and what to change."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"cannot read the topology {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TopologyError(f"{path} is not TOML: {error}") from None
    try:
        return _parse(table, path.parent.absolute())
    except InputError as error:
        raise TopologyError(f"{path}: {error}") from None


def _parse(table: dict[str, Any], base: Path) -> Topology:
    _only(table, {"router", "hosts", "checkpoint"}, "the topology")
    router = table.get("router", {})
    _only(router, {"listen"}, "[router]")
    hosts = table.get("hosts")
    if not isinstance(hosts, list):
        raise TopologyError("there is no [[hosts]] entry")
    listen = _text(router, "listen", DEFAULT_ROUTER, "[router]")
    parse_address(listen, "router listen")
    directory = base / _text(table, "checkpoint", "", "the topology") if "checkpoint" in table else None
    return Topology(tuple(_host(entry, i) for i, entry in enumerate(hosts)), listen, directory)


def _host(entry: dict[str, Any], index: int) -> HostEntry:
    where = f"host {index + 1}"
    _only(entry, {"name", "address", "listen", "blocks"}, where)
    name, address = _text(entry, "name", where.replace(" ", "-"), where), _text(entry, "address", "", where)
    if not address:
        raise TopologyError(f'{where} ({name}) has no address = "HOST:PORT"')
    listen = _text(entry, "listen", address, where)
    for what, value in (("address", address), ("listen", listen)):
        parse_address(value, f"{where} ({name}): {what}")
    blocks = entry.get("blocks")
    if not isinstance(blocks, list) or any(not isinstance(b, int) or isinstance(b, bool) or b < 0 for b in blocks):
        raise TopologyError(f"{where} ({name}): blocks must be a list of numbers such as [0]")
    return HostEntry(name, address, tuple(blocks), listen)


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
