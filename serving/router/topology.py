"""The topology: the blocks and the address of each host, and the router's address. One TOML file."""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from serving.router.request import DEFAULT_ROUTER
from stages.device import AUTO, is_device_name
from stages.errors import ConfigError, InputError, file_errors, one_of, quoted
from stages.settings import as_written, from_toml, limits, parse_toml
from stages.wire.channel import check_name, parse_address
from stages.wire.tls import Tls

# The weights shipped with the repository: next to the packages in a checkout, inside one of them in a wheel. Resolved,
# because callers compare paths with it.
_HOME = Path(str(files("onesweep"))).resolve()
SHIPPED = _HOME / "weights" if (_HOME / "weights" / "chain").is_dir() else _HOME.parent / "weights"
FIRST_HOST_PORT = 7701
MAX_HOSTS = 64
ETCD = "etcd://"  # prefix of a topology's place outside a file
MAX_SHOWN = 160  # characters of a wrong place shown in an error
ETCD_SHAPE = f"{ETCD}HOST:PORT[,HOST:PORT]/KEY[?ca=FILE&cert=FILE&key=FILE]"


@dataclass(frozen=True)
class HostEntry:
    """One host. Others dial `address`; it binds `listen`, if that differs."""

    name: str
    address: str
    blocks: tuple[int, ...] = field(metadata=limits(minimum=0))
    listen: str
    device: str | None = None  # the device it computes on, unless its command names one; None = `auto`

    @property
    def span(self) -> str:
        return ",".join(map(str, self.blocks))


@dataclass(frozen=True)
class Topology:
    """Hosts that together hold all blocks, some perhaps twice, and the router that uses them."""

    hosts: tuple[HostEntry, ...]
    router: str = DEFAULT_ROUTER
    checkpoint: Path | None = None
    certificates: Path | None = None  # directory of `onesweep certs`; None = plain text

    def __post_init__(self) -> None:
        if not 0 < len(self.hosts) <= MAX_HOSTS:
            raise ConfigError(f"a topology must have 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        for host in self.hosts:
            if check_name(host.name, "host name") in ("router", "http"):
                raise ConfigError(f"a host cannot be called {host.name!r}: give it another name")
        for what in ("name", "address"):
            values = [getattr(host, what) for host in self.hosts]
            doubled = sorted({value for value in values if values.count(value) > 1})
            if doubled:
                raise ConfigError(f"two hosts have the {what} {doubled[0]!r}: give each its own")
        self._check_blocks()

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole model."""
        return max(host.blocks[-1] for host in self.hosts) + 1

    def host(self, name: str) -> HostEntry:
        """The host called `name`. Raises ConfigError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(f"no host {quoted(name)}{one_of(name, [host.name for host in self.hosts], 'available:')}")

    @property
    def addresses(self) -> set[str]:
        """The addresses of the router and the hosts."""
        return {self.router, *(host.address for host in self.hosts)}

    @property
    def replicated(self) -> set[str]:
        """Names of hosts whose blocks another host also holds."""
        spans = [host.blocks for host in self.hosts]
        return {host.name for host in self.hosts if spans.count(host.blocks) > 1}

    def successors(self, host: HostEntry) -> list[str]:
        """Addresses of the hosts that may follow `host` in a sweep; none for a host with all blocks."""
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
        """The certificate authority that a client needs to verify the router."""
        return Tls(self.certificates / "ca.pem") if self.certificates else None

    def _check_blocks(self) -> None:
        for host in self.hosts:
            if list(host.blocks) != list(range(host.blocks[0], host.blocks[0] + len(host.blocks))):
                raise ConfigError(f"host {host.name!r} holds {host.span}: give it consecutive blocks, in order")
        begins = {host.blocks[0] for host in self.hosts}
        for host in self.hosts:
            due = host.blocks[-1] + 1
            if due < self.blocks and due not in begins:
                raise ConfigError(
                    f"no host begins with block {due}, which must follow {host.name!r} ({host.span}): "
                    "a host continues where another one ends"
                )
        if 0 not in begins:
            raise ConfigError("block 0 is missing: a sweep begins there")
        ends = {host.blocks[-1] + 1 for host in self.hosts}
        for host in self.hosts:
            if host.blocks[0] and host.blocks[0] not in ends:
                raise ConfigError(f"no host ends with block {host.blocks[0] - 1}, so {host.name!r} is never reached")

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


def local_topology(
    hosts: int, blocks: int, checkpoint: Path, first_port: int = FIRST_HOST_PORT, replicas: int = 1
) -> Topology:
    """`hosts` hosts on loopback that share `blocks` blocks as evenly as possible, each span held `replicas` times."""
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
    """Read a topology file. Raises ConfigError that names the file and what to change."""
    with file_errors(ConfigError, f"cannot read the topology {path}"):
        return parse_topology(path.read_bytes(), str(path), path.parent.absolute())


@lru_cache(maxsize=1)  # followers read the same text every second, and parsing 64 hosts takes milliseconds
def parse_topology(data: bytes, where: str, folder: Path | None = None) -> Topology:
    """Parse a topology from TOML. Raises ConfigError that names its origin `where` and says what to change.

    :param folder: base of relative paths; None: there are none.
    """
    table = parse_toml(data, where)
    try:
        return _parse(table, folder)
    except InputError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse(table: dict[str, Any], folder: Path | None) -> Topology:
    _only(table, {"router", "hosts", "checkpoint", "tls"}, "the topology")
    router, tls = table.get("router", {}), table.get("tls", {})
    _only(router, {"listen"}, "[router]")
    _only(tls, {"directory"}, "[tls]")
    hosts = table.get("hosts")
    if not isinstance(hosts, list):
        raise ConfigError("there is no [[hosts]] entry")
    listen = _text(router, "listen", DEFAULT_ROUTER, "[router]")
    parse_address(listen, "router listen")
    directory = _path(table, "checkpoint", "", "the topology", folder) if "checkpoint" in table else None
    certificates = _path(tls, "directory", "certs", "[tls]", folder) if "tls" in table else None
    return Topology(tuple(_host(entry, i) for i, entry in enumerate(hosts)), listen, directory, certificates)


def _host(entry: dict[str, Any], index: int) -> HostEntry:
    where, given = f"host {index + 1}", entry
    if isinstance(entry, dict):
        given = {"name": f"host-{index + 1}", **entry, "listen": entry.get("listen", entry.get("address", ""))}
    host = from_toml(HostEntry, given, where)
    for what, value in (("address", host.address), ("listen", host.listen)):
        parse_address(value, f"{where} ({host.name}): {what}")
    if parse_address(host.address)[1] == 0:
        raise ConfigError(f"{where} ({host.name}): address {host.address!r} has no port that others can dial")
    if host.device not in (None, AUTO) and not is_device_name(host.device):
        device = host.device[:40]
        raise ConfigError(f"{where} ({host.name}): device must be auto, cpu, cuda or cuda:N, not {device!r}")
    return host


def _text(table: dict[str, Any], key: str, default: str, where: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be a string, not {as_written(value)}")
    return value


def _path(table: dict[str, Any], key: str, default: str, where: str, folder: Path | None) -> Path:
    path = Path(_text(table, key, default, where))
    if folder is None and not path.is_absolute():
        raise ConfigError(f"{where}: {key} {str(path)!r} must be absolute: etcd has no folder to resolve it in")
    return path if folder is None else folder / path


def _quoted(text: str) -> str:
    """A TOML string. JSON's escapes are TOML's except for DEL; text that is not UTF-8 has no escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{text!r} is not UTF-8 and cannot be written into a topology: rename it") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _only(table: object, known: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table with {', '.join(sorted(known))}, not {as_written(table)}")
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{where} has an unknown key {quoted(unknown[0])}; choose from {', '.join(sorted(known))}")
