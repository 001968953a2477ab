"""A network in memory: machines, the links between them, and connections that carry gRPC calls.

A connection's bytes arrive in order, after the link's delay and at its rate. A cut link holds them and delivers them
once it is restored, as TCP does; if that takes longer than gRPC's keepalive, the connection is lost.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from loadtest.simulation.loop import BEGIN_S, PROCESS, Killed, Process, VirtualLoop, here
from loadtest.simulation.schedule import AHEAD_S, CLIENT_NAMES, FLAP_S, HOSTS, PROCESS_KINDS, PlannedFault
from stages.errors import CheckpointError

if TYPE_CHECKING:
    from loadtest.simulation.calls import MemoryCall, MemoryChannel
    from loadtest.simulation.served import MemoryServer, ServedCall

T = TypeVar("T")
DELAY_S, BYTES_PER_S = 0.03, 12.5e6  # one way
RESEND_S = 0.2  # TCP's least timeout: a restored link carries nothing sooner
KEEPALIVE_S = 15.0  # 10 s from ping to ping, 5 s for the answer (stages/wire/channel.py)
SMALL_BYTES = 64  # of a message that opens, ends or acknowledges
DATABASE = ".sqlite3"
MIDNIGHT_S, MIDNIGHT_IN_S = 20_000 * 86_400.0, 2.0  # the end of a day, and its time after the start
RESET, SILENT = "recvmsg:Connection reset by peer", "keepalive watchdog timeout"


@dataclass
class Direction:
    """One direction between two machines."""

    number: int
    delay_s: float = DELAY_S
    cut: int = 0  # number of faults that cut it now
    free_at: float = 0.0  # when its queue is sent
    last_at: float = 0.0  # when the last bytes arrive
    held: deque[tuple[Process, int, Callable[..., object], tuple[Any, ...]]] = field(default_factory=deque)


class MemoryNetwork:
    """Machines by name, the servers on their addresses, and the connections between them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.servers: dict[str, tuple[Process, MemoryServer]] = {}  # by address
        self.places: dict[str, str] = {}  # the machine of an address
        self.connections: list[Connection] = []
        self.states = set[tuple[str, str]]()  # (kind of lasting fault, machine)
        self._links: dict[tuple[str, str], Direction] = {}
        self.events = 0  # a digest of everything sent: arrival time, link and bytes

    def link(self, source: str, target: str) -> Direction:
        if (source, target) not in self._links:
            self._links[source, target] = Direction(len(self._links))
        return self._links[source, target]

    def send(
        self, link: Direction, size: int, process: Process, call: Callable[..., object], arguments: tuple[Any, ...] = ()
    ) -> None:
        """Make `process`, at the link's other end, call something once `size` bytes have arrived."""
        if link.cut:
            link.held.append((process, size, call, arguments))
            return
        now = self.loop.now_s
        link.free_at = max(link.free_at, now) + size / BYTES_PER_S
        # never at the same moment: a loop runs simultaneous timers in any order
        link.last_at = at = max(link.last_at + 1e-9, link.free_at + link.delay_s)
        self.events = hash((self.events, at, link.number, size))
        process.call_at(at, call, *arguments)

    # Faults.

    def cut(self, source: str, target: str) -> None:
        link = self.link(source, target)
        link.cut += 1
        self.loop.call_later(KEEPALIVE_S, lambda: self.reset((source, target), why=SILENT) if link.cut else None)

    def slow(self, ends: tuple[str, ...], by_s: float) -> None:
        self.link(ends[0], ends[1]).delay_s += by_s

    def repair(self, *ways: tuple[str, ...]) -> None:
        for link in [self.link(source, target) for source, target in ways]:
            link.cut -= 1
            if not link.cut:
                link.free_at = max(link.free_at, self.loop.now_s + RESEND_S)
                held, link.held = link.held, deque()
                for process, size, call, arguments in held:
                    self.send(link, size, process, call, arguments)

    def freeze(self, process: Process) -> None:
        process.halted = True
        self.loop.call_later(KEEPALIVE_S, lambda: self.lose(process, SILENT) if process.halted else None)

    def lose(self, process: Process, why: str) -> None:
        for each in [each for each in self.connections if process in (each.client, each.server)]:
            each.end(why)

    def reset(self, ends: Sequence[str], after_s: float = 0.0, why: str = RESET) -> None:
        """End every connection between two machines, as a middlebox would.

        :param after_s: delay until the accepting side notices."""
        for each in list(self.connections):
            if {each.client.place, each.server.place} == set(ends):
                each.end(why, after_s)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL would: its machine tells the connected peers."""
        process.halted = process.killed = True
        self.servers = {at: (owner, server) for at, (owner, server) in self.servers.items() if owner is not process}
        for each in [each for each in self.connections if process in (each.client, each.server)]:
            self.connections.remove(each)
            other, lost = (each.server, each.lose_server) if each.client is process else (each.client, each.lose_client)
            self.send(self.link(process.place, other.place), SMALL_BYTES, other, lost, (RESET,))
        for handle in process.parked:
            if handle._callback == self.send:  # the answer to a client that connects: its machine resets it
                self.send(*handle._args)


class Connection:
    """A connection between two processes, and the calls on it."""

    def __init__(self, channel: MemoryChannel, server: MemoryServer, process: Process) -> None:
        self.channel, self.network = channel, channel.network
        self.client, self.server, self.serves = channel.process, process, server
        self.there = self.network.link(self.client.place, process.place)
        self.back = self.network.link(process.place, self.client.place)
        self.calls: dict[MemoryCall, None] = {}
        self.served: dict[ServedCall, None] = {}
        self.is_open = True
        self.network.connections.append(self)

    def send(self, size: int, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
        """Send to the server."""
        if self.is_open:
            self.network.send(self.there, size, self.server, self._arrived, (call, arguments))

    def answer(self, size: int, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
        """Send to the client."""
        if self.is_open:
            self.network.send(self.back, size, self.client, self._arrived, (call, arguments))

    def _arrived(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self.is_open:
            call(*arguments)

    def end(self, why: str, after_s: float = 0.0) -> None:
        """Tell the client that the connection is lost, and the server after `after_s` seconds."""
        if self in self.network.connections:
            self.network.connections.remove(self)
        now = self.network.loop.now_s
        self.client.call_at(now, self.lose_client, why)
        self.server.call_at(now + after_s, self.lose_server, why)

    def lose_client(self, why: str) -> None:
        self.is_open = False
        if self.channel.connection is self:
            self.channel.connection = None
        for call in list(self.calls):
            call.lose(why)

    def lose_server(self, _: str) -> None:
        self.is_open = False
        for call in list(self.served):
            call.cancel()


class FaultyWorld(ABC):
    """The processes of one schedule, by name, the network between their machines, and their faults."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.network = loop, MemoryNetwork(loop)
        self.processes: dict[str, Process] = {}
        self.lasting: dict[PlannedFault, Callable[[], object]] = {}  # lasting faults, with the function that ends each
        self.hit = set[str]()  # processes hit by a fault so far, and hosts at the end of a link hit by one
        self.is_over = False  # no more faults begin
        self._writes = Counter[PlannedFault | None]()  # writes during each fault
        self._names, self._contents = dict[int, dict[str, int]](), dict[int, bytes]()  # as synced, by inode

    def sync(self, handle: int) -> None:
        """Replace os.fsync: record what a power cut leaves."""
        number, path = os.fstat(handle).st_ino, Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names[number] = {each.name: each.stat().st_ino for each in path.iterdir()}
            return
        before, self._contents[number] = self._contents.get(number), (content := path.read_bytes())
        if content != before and (share := self.torn()) is not None:
            self._contents[number] = content[: int(len(content) * share)]
            self._names.setdefault(path.parent.stat().st_ino, {})[path.name] = number
            self.tear()

    def torn(self) -> float | None:
        """The share of the running process's next write that reaches the disk, if a fault tears it."""
        fault = next((each for each in self.lasting if (each.kind, each.targets) == ("torn", (here().place,))), None)
        self._writes[fault] += 1
        is_due = fault is not None and self._writes[fault] > fault.strength
        return min(max(1.5 * (fault.strength % 1) - 0.25, 0.0), 1.0) if fault and is_due else None

    def tear(self) -> NoReturn:
        """End the running process in the middle of a write."""
        self.network.kill(here())
        self.change(PlannedFault("power", (here().place,), 0.0, 0.0), begins=True)
        raise Killed

    def unix_s(self) -> float:
        """Replace time.time, with midnight during the faults."""
        place = process.place if (process := PROCESS.get()) else ""
        ahead_s = sum(how_far_s for kind, how_far_s in AHEAD_S.items() if (kind, place) in self.network.states)
        return MIDNIGHT_S - MIDNIGHT_IN_S + self.loop.now_s - BEGIN_S + ahead_s

    def cut_power(self, directory: Path) -> None:
        """Keep only synced names and contents; a database syncs its own files."""
        for path in [each for each in directory.rglob("*") if each.is_file() and DATABASE not in each.name]:
            number = self._names.get(path.parent.stat().st_ino, {}).get(path.name)
            if number is None:
                path.unlink()
            elif number != path.stat().st_ino or self._contents.get(number) != path.read_bytes():
                path.write_bytes(self._contents.get(number, b"torn"))

    def write(self, name: str, change: Callable[..., T], *what: Any) -> T:  # noqa: ANN401
        """Change a machine's disk. Raises CheckpointError if it is full."""
        if ("no-room", name) in self.network.states:
            raise CheckpointError(f"cannot write on {name}: free some space")
        return change(*what)

    @abstractmethod
    def start(self, name: str) -> None:
        """Start a process on the machine `name`."""

    @abstractmethod
    def change(self, fault: PlannedFault, begins: bool) -> None:
        """Begin or end a fault of something specific to this world."""

    def new_process(self, name: str) -> Process:
        process = self.processes[name] = Process(self.loop, name)
        return process

    def begin(self, fault: PlannedFault) -> None:
        """Begin a fault and schedule its end; do nothing once the schedule is over."""
        if self.is_over:
            return
        names, network, self.lasting[fault] = fault.targets, self.network, lambda: None
        self.hit |= {name for name in names if fault.kind in PROCESS_KINDS or name in HOSTS}
        self.loop.call_later(fault.length_s, self.end, fault)
        # the sender of nonsense is unknown, so a whole path is avoided, as when a clock jumps past a short deadline
        if fault.kind in ("broken", "lie") or (fault.kind == "jump" and not self.hit.isdisjoint(CLIENT_NAMES)):
            self.hit.update(HOSTS)
        match fault.kind:
            case "kill" | "replace" | "power":
                network.kill(self.processes[names[0]])
                if fault.kind != "kill":
                    self.change(fault, begins=True)
                self.lasting[fault] = partial(self.revive, names[0])
            case "jump":
                self.processes[names[0]].jump(fault.strength)
            case "untrusted" | "token" | "no-room" | "lie" | "day" | "month":
                network.states.add(state := (fault.kind, names[0]))
                self.lasting[fault] = partial(network.states.discard, state)
                if fault.kind == "untrusted":
                    network.lose(self.processes[names[0]], RESET)
            case "torn":
                self.lasting[fault] = partial(self.revive, names[0])
            case "freeze":
                network.freeze(self.processes[names[0]])
                self.lasting[fault] = self.processes[names[0]].resume
            case "cut" | "one-way":
                ways = (names, names[::-1]) if fault.kind == "cut" else (names,)
                for source, target in ways:
                    network.cut(source, target)
                self.lasting[fault] = partial(network.repair, *ways)
            case "slow-link":
                network.slow(names, fault.strength)
                self.lasting[fault] = partial(network.slow, names, -fault.strength)
            case "reset" | "half-open":
                network.reset(names, fault.length_s)
            case "flap":
                self._flap(fault)
            case _:
                self.change(fault, begins=True)
                self.lasting[fault] = partial(self.change, fault, begins=False)

    def _flap(self, fault: PlannedFault) -> None:
        if fault in self.lasting:
            self.network.reset(fault.targets)
            self.loop.call_later(FLAP_S, self._flap, fault)

    def end(self, fault: PlannedFault) -> None:
        if fault in self.lasting:
            self.lasting.pop(fault)()

    def revive(self, name: str) -> None:
        """Restart a process, if it was killed and not replaced."""
        if self.processes[name].killed:
            self.start(name)

    def end_all(self) -> None:
        """End all lasting faults; no more begin."""
        self.is_over = True
        for fault in list(self.lasting):
            self.end(fault)
