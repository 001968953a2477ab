"""The lab process, which owns a lab's namespaces and carries the packets between them.

`python -m loadtest.lab.process` reads its orders from standard input and answers with one line of JSON,
the lab's record or {"error": sentence}. The lab lives as long as the process: nothing in it has a name or file that
could stay behind, and a child, the keeper, kills the lab's programs once the process is gone, however it ended.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from ipaddress import ip_network
from itertools import permutations
from typing import NoReturn

from loadtest.lab.forwarder import Channel, forward_packets, open_orders
from loadtest.lab.lab import Lab, Node
from loadtest.lab.namespaces import (
    HOME_ADDRESS,
    PR_SET_PDEATHSIG,
    SUBNET,
    LabError,
    end_processes,
    make_home,
    open_tun,
    own_namespace,
    prctl,
    set_network,
)
from loadtest.lab.profile import Profile, node_names
from stages.errors import file_errors
from stages.signals import start_ticks


def main() -> None:
    request = json.loads(sys.stdin.readline())
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the lab ends with its parent
        if os.getppid() != request["owner"]:
            sys.exit(1)
        lab = LabProcess(Profile.from_record(request["profile"]), request["hosts"])
        lab.keeper = fork_keeper(lab.inodes, [*lab.tuns, lab.orders.fileno()])
    except (LabError, OSError) as error:
        print(json.dumps({"error": f"cannot create the lab: {error}"}), flush=True)
        sys.exit(1)
    print(json.dumps(asdict(lab.record())), flush=True)
    lab.run()


class LabProcess:
    """Namespaces, devices and links of one lab, as this process holds them. Raises LabError."""

    def __init__(self, profile: Profile, hosts: int) -> None:
        self.profile = profile
        self.addresses = dict(zip(node_names(hosts), map(str, ip_network(SUBNET).hosts()), strict=False))
        self.namespaces = dict[str, int]()
        self.tuns: list[int] = []
        self.keeper = 0
        with file_errors(LabError, "cannot create a network namespace"):
            for name, address in self.addresses.items():
                with own_namespace() as namespace:
                    self.tuns.append(open_tun())
                    set_network(address, [self.addresses[other] for other in profile.closed.get(name, ())])
                    if name in profile.gateways:
                        self.namespaces[name.replace("host", "gateway")], namespace = namespace, make_home()
                    self.namespaces[name] = namespace
        self.inodes = {os.fstat(namespace).st_ino for namespace in self.namespaces.values()}
        self.orders = open_orders(os.getpid())

    def record(self) -> Lab:
        """The record with which another process finds the lab and runs programs in it."""
        own = f"/proc/{os.getpid()}/fd"
        addresses = dict(self.addresses)
        for name in self.profile.gateways:
            addresses[name.replace("host", "gateway")], addresses[name] = addresses[name], HOME_ADDRESS
        places = {name: Node(addresses[name], f"{own}/{held}") for name, held in self.namespaces.items()}
        return Lab(self.profile, places, os.getpid(), start_ticks(os.getpid()))

    def run(self) -> NoReturn:
        """Carry packets until SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        channels = {
            (source, destination): Channel(self.profile.link(one, other), f"{one} to {other}")
            for (one, source), (other, destination) in permutations(self.addresses.items(), 2)
        }
        try:
            forward_packets(dict(zip(self.addresses.values(), self.tuns, strict=True)), channels, self.orders)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_processes(self.inodes)
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)


def fork_keeper(inodes: set[int], not_its: list[int]) -> int:
    """Fork a child that outlives this process until it has killed the programs in the namespaces.

    It holds the namespaces open, so that their inodes are not reused until then. `not_its`: descriptors that it closes.
    """
    # blocked before the fork, so that a signal in the keeper's first moments waits for its sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getpid()
    keeper = os.fork()
    if keeper:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return keeper
    try:
        # an open tun or socket in the keeper would keep the device or the name beyond the lab's end
        for descriptor in (*not_its, 0, 1):
            os.close(descriptor)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            signal.sigwait({signal.SIGTERM})
        end_processes(inodes)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
