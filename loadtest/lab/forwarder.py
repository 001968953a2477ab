"""Links: one process reads every node's packets and writes each when it is due."""

import contextlib
import gc
import heapq
import json
import os
import random
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from loadtest.lab.namespaces import prctl
from loadtest.lab.profile import Link

# The arithmetic of a directed link: when a packet that comes now is delivered, or that it is dropped.

DROPPED = -1


class Channel:
    """A link in use: a queue that empties at the link's rate, then a delay. Times are nanoseconds of one clock.

    A packet leaves when all before it have left and its own bits are out; it is delivered a delay later, never before
    one that was sent earlier.
    """

    def __init__(self, link: Link, seed: str) -> None:
        self.link = link
        self.loss = link.loss
        self.ns_per_byte = 8000 / link.rate_mbps if link.rate_mbps else 0.0
        # the queue keeps its bytes, as that of a router does: what waits there waits longer
        self.queue_ns = round((link.queue_bytes or 0) * self.ns_per_byte)
        self.delay_ns = round(link.delay_ms * 1e6)
        self.jitter_ns = round(link.jitter_ms * 1e6)
        self.random = random.Random(seed).random
        self.free_ns = 0
        self.last_ns = 0

    def admit(self, now_ns: int, size: int) -> int:
        """Delivery time of a packet of `size` bytes that comes at `now_ns`, or DROPPED."""
        if self.loss and self.random() < self.loss:
            return DROPPED
        start_ns = self.free_ns if self.free_ns > now_ns else now_ns
        departure_ns = start_ns + round(size * self.ns_per_byte)
        if departure_ns - now_ns > self.queue_ns and start_ns > now_ns:
            return DROPPED
        self.free_ns = departure_ns
        delivery_ns = departure_ns + self.delay_ns
        if self.jitter_ns:
            delivery_ns += round((2 * self.random() - 1) * self.jitter_ns)
        if delivery_ns < self.last_ns:
            delivery_ns = self.last_ns
        self.last_ns = delivery_ns
        return delivery_ns


Ends = tuple[str, str]  # addresses of a directed link's source and destination
MOST_BYTES = 1 << 16  # of an order


def obey(order: bytes, channels: Mapping[Ends, Channel]) -> None:
    """Cut the links that an order names, or mend them."""
    table = json.loads(order)
    for source, destination in table["links"]:
        channel = channels[source, destination]
        channel.loss = 1.0 if table["cut"] else channel.link.loss


PR_SET_TIMERSLACK = 29
BATCH = 64  # packets read from one node before the others, and what is due, have their turn
# A wait ends some 20 to 30 microseconds late, so what is due that soon goes at once: as far from right, with fewer
# waits.
EARLY_NS = 20_000

# Under load, packets are gathered for a nap of that share of the shortest link's delay: a wake-up costs several times
# what a packet does, and the programs under test compute on the same cores.
LONGEST_NAP_S, SHORTEST_NAP_S, NAP_SHARE = 200e-6, 50e-6, 0.02
LOAD_TURNS, LOAD_TURN_NS = 32, 500_000  # load is that many turns in a row that took less each


def carry(devices: dict[str, int], channels: dict[Ends, Channel], orders: int, answers: int) -> NoReturn:
    """Read TUN devices and deliver packets by their destination address, until no more orders can come.

    `devices`: TUN descriptors by node address; `orders`: descriptor of those that `obey` takes; `answers`: of a byte
    for each. Raises OSError when a device has gone.
    """
    nap_s = min((channel.delay_ns for channel in channels.values()), default=0) * 1e-9 * NAP_SHARE
    nap_s = min(nap_s, LONGEST_NAP_S) if nap_s >= SHORTEST_NAP_S else 0.0
    ways = {
        tun: {
            socket.inet_aton(destination): (channels[source, destination], other)
            for destination, other in devices.items()
            if destination != source
        }
        for source, tun in devices.items()
    }
    hurry()
    flying: list[tuple[int, int, int, bytes]] = []
    number = 0  # keeps packets of one delivery time in order
    waiting = [*ways, orders]
    # Names of this function are found faster than those of modules and objects.
    turns, since_ns, loaded = 0, 0, False
    clock, read, write, push, pop = time.monotonic_ns, os.read, os.write, heapq.heappush, heapq.heappop
    wait, sleep = select.select, time.sleep
    while True:
        timeout_s = max(0, flying[0][0] - clock() - EARLY_NS) / 1e9 if flying else None
        ready = wait(waiting, (), (), timeout_s)[0]
        for tun in ready:
            if tun == orders:
                if not (order := read(orders, MOST_BYTES)):
                    sys.exit(0)
                obey(order, channels)
                write(answers, b"\n")
                continue
            links = ways[tun]
            try:
                for _ in range(BATCH):
                    packet = read(tun, 2048)
                    way = links.get(packet[16:20])
                    if way is None:  # not IPv4, or for no node of the lab
                        continue
                    due_ns = way[0].admit(clock(), len(packet))
                    if due_ns != DROPPED:
                        number += 1
                        push(flying, (due_ns, number, way[1], packet))
            except BlockingIOError:
                pass
        limit_ns = clock() + EARLY_NS
        try:
            while flying and flying[0][0] <= limit_ns:
                _, _, tun, packet = pop(flying)
                write(tun, packet)
        except OSError:  # the node's device was taken down; what else is due goes in the next turn
            pass
        turns += 1
        if turns == LOAD_TURNS:
            loaded = limit_ns - since_ns < LOAD_TURNS * LOAD_TURN_NS
            turns, since_ns = 0, limit_ns
        if loaded and nap_s:
            sleep(nap_s)


def hurry() -> None:
    """Wake this process as soon as it is due: real-time priority, exact timers, no pauses of its own."""
    gc.collect()
    gc.freeze()
    gc.disable()
    prctl(PR_SET_TIMERSLACK, 1)
    with contextlib.suppress(PermissionError):  # still right, but late when other programs compute
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
