"""The lab process: it owns a lab's namespaces, and where the kernel cannot, carries the packets between them.

`python -m loadtest.lab.process` reads what to make from its standard input and answers with one line of JSON,
the lab's record or {"error": sentence}. The lab lives as long as the process does: nothing of it has a name or a file
that could stay behind, and a child, the keeper, kills what runs in the lab once the process is gone, however it ended.
"""

import fcntl
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from loadtest.lab.forwarder import Channel, Forwarder, control_name, open_orders
from loadtest.lab.lab import LOCK, write_record
from loadtest.lab.namespaces import (
    PR_SET_PDEATHSIG,
    LabError,
    allowed,
    batch,
    end_processes,
    make_mesh,
    netem_works,
    node_address,
    open_tun,
    own_namespace,
    prctl,
    set_tcp,
    start_ticks,
    tun_lines,
)
from loadtest.lab.profile import Profile, node_names

NETEM, USER_SPACE, UNSHAPED = "netem", "user space", "unshaped"


def main() -> None:
    request = json.loads(sys.stdin.readline())
    try:
        if request["owner"]:
            die_with(request["owner"])
        lock = take_lock(request["directory"])
        lab = LabProcess(Profile.from_record(request["profile"]), request["hosts"], request["kind"])
        lab.keeper = fork_keeper(lab.inodes, [*lab.tuns, lab.control.fileno(), lab.orders.fileno(), lock])
        record = lab.record()
        if request["directory"]:
            write_record(Path(request["directory"]), record)
    except (LabError, OSError) as error:
        print(json.dumps({"error": f"cannot make the lab: {error}"}), flush=True)
        sys.exit(1)
    print(json.dumps(record), flush=True)
    lab.run()


class LabProcess:
    """Namespaces, devices and links of one lab, as this process holds them. Raises LabError."""

    def __init__(self, profile: Profile, hosts: int, kind: str) -> None:
        self.profile = profile
        self.names = node_names(hosts)
        self.kind = kind or (NETEM if netem_works() else USER_SPACE)
        self.addresses = [node_address(i) for i in range(len(self.names))]
        self.namespaces: list[int] = []
        self.tuns: list[int] = []
        self.keeper = 0
        try:
            # once around all nodes: the machine's own list is changed meanwhile
            with allowed(profile.congestion):
                for address in self.addresses:
                    self._make_node(address)
        except OSError as error:
            raise LabError(f"no network namespace could be made here: {error.strerror}") from None
        if self.kind != USER_SPACE:
            make_mesh(self.namespaces, self.paths, profile, self.names, shape=self.kind == NETEM)
        self.inodes = {os.fstat(namespace).st_ino for namespace in self.namespaces}
        # A name without a file: it goes with the process.
        self.control = socket.socket(socket.AF_UNIX)
        self.control.bind(control_name(os.getpid()))
        self.control.listen()
        self.control.setblocking(False)
        self.orders = open_orders(os.getpid())

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{namespace}" for namespace in self.namespaces]

    def record(self) -> dict[str, Any]:
        """The values that another process needs to find the lab and to run programs in it."""
        nodes = [
            {"name": name, "address": address, "namespace": path, "inode": os.fstat(namespace).st_ino}
            for name, address, path, namespace in zip(
                self.names, self.addresses, self.paths, self.namespaces, strict=True
            )
        ]
        processes = {name: [pid, start_ticks(pid)] for name, pid in (("lab", os.getpid()), ("keeper", self.keeper))}
        return {"kind": self.kind, "profile": self.profile.as_record(), "nodes": nodes, "processes": processes}

    def run(self) -> NoReturn:
        """Carry packets, or sleep where the kernel does, until SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            if self.kind == USER_SPACE:
                devices = dict(zip(self.addresses, self.tuns, strict=True))
                Forwarder(devices, self._channels(), self.control, self.orders).run()
            while True:
                signal.pause()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_processes(self.inodes)
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)

    def _make_node(self, address: str) -> None:
        with own_namespace() as namespace:
            self.namespaces.append(namespace)
            set_tcp(self.profile.congestion, self.profile.slow_start_after_idle)
            if self.kind == USER_SPACE:
                self.tuns.append(open_tun())
                batch("ip", tun_lines(address))

    def _channels(self) -> dict[tuple[str, str], Channel]:
        ends = [(i, j) for i in range(len(self.names)) for j in range(len(self.names)) if i != j]
        return {
            (self.addresses[i], self.addresses[j]): Channel(
                self.profile.link(self.names[i], self.names[j]), f"{self.names[i]} to {self.names[j]}"
            )
            for i, j in ends
        }


def die_with(owner: int) -> None:
    """Have the kernel kill this process when the one that started it ends, or end now if it has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        sys.exit(1)


def take_lock(directory: str) -> int:
    """Hold the directory's lock for life; -1 where there is no directory. Raises LabError if another lab does."""
    if not directory:
        return -1
    lock = os.open(Path(directory) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LabError("a lab is up already; `onesweep wan down` first") from None
    return lock


def fork_keeper(inodes: set[int], not_its: list[int]) -> int:
    """A child that outlives this process for as long as it takes to kill what runs in the namespaces.

    It holds the namespaces open, so that their inodes are theirs until then. `not_its`: descriptors that it closes.
    """
    # blocked before the fork: a signal in the keeper's first moments waits for its sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getpid()
    keeper = os.fork()
    if keeper:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return keeper
    try:
        # an open tun or socket in the keeper would keep the device, or the name, beyond the lab's end
        for descriptor in (*not_its, 0, 1):
            if descriptor >= 0:
                os.close(descriptor)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            signal.sigwait({signal.SIGTERM})
        end_processes(inodes)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
