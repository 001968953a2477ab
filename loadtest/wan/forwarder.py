"""Links where the kernel has none: one process reads every node's packets and writes each when it is due."""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import select
import socket
import time

from loadtest.wan.channel import DROPPED, Channel
from loadtest.wan.namespace import prctl
from loadtest.wan.orders import take_order

PR_SET_TIMERSLACK = 29
SO_SNDBUFFORCE = 32
BATCH = 64
"""Packets read from one node before the others, and what is due, have their turn."""
EARLY_NS = 20_000
"""A wait ends some 20 to 30 microseconds late, so what is due that soon goes at once: as far from right, with fewer
waits."""

LONGEST_NAP_S, SHORTEST_NAP_S, NAP_SHARE = 200e-6, 50e-6, 0.02
"""Under load, packets are gathered for a nap of that share of the shortest link's delay: a wake-up costs several times
what a packet does, and the programs under test compute on the same cores."""
LOAD_TURNS, LOAD_TURN_NS = 32, 500_000
"""Load is that many turns in a row that took less each."""


class Forwarder:
    """Reads TUN devices and delivers packets by their destination address until the process ends."""

    def __init__(
        self,
        devices: dict[str, int],
        channels: dict[tuple[str, str], Channel],
        control: socket.socket,
        orders: socket.socket,
    ) -> None:
        """`devices`: TUN descriptors by node address; `channels`: links by addresses of source and destination.

        `control` tells counters, `orders` takes what links are to be cut and mended.
        """
        self.channels = channels
        self.control, self.orders = control, orders
        self.undelivered = 0
        nap_s = min((channel.delay_ns for channel in channels.values()), default=0) * 1e-9 * NAP_SHARE
        self.nap_s = min(nap_s, LONGEST_NAP_S) if nap_s >= SHORTEST_NAP_S else 0.0
        self.ways = {
            tun: {
                socket.inet_aton(destination): (channels[source, destination], other)
                for destination, other in devices.items()
                if destination != source
            }
            for source, tun in devices.items()
        }

    def run(self) -> None:
        """Never returns. Raises OSError when a device has gone."""
        hurry()
        flying: list[tuple[int, int, int, bytes]] = []
        number = 0  # keeps packets of one delivery time in order
        waiting = [*self.ways, self.control.fileno(), self.orders.fileno()]
        # Names of this function are found faster than those of modules and objects.
        turns, since_ns, loaded = 0, 0, False
        clock, read, write, push, pop = time.monotonic_ns, os.read, os.write, heapq.heappush, heapq.heappop
        ways, control, wait, sleep, nap_s = self.ways, self.control.fileno(), select.select, time.sleep, self.nap_s
        orders = self.orders.fileno()
        while True:
            timeout_s = max(0, flying[0][0] - clock() - EARLY_NS) / 1e9 if flying else None
            ready = wait(waiting, (), (), timeout_s)[0]
            for tun in ready:
                if tun == control:
                    self._tell()
                    continue
                if tun == orders:
                    take_order(self.orders, self.channels)
                    continue
                links = ways[tun]
                try:
                    for _ in range(BATCH):
                        packet = read(tun, 2048)
                        way = links.get(packet[16:20])
                        if way is None:  # not IPv4, or for nobody here
                            continue
                        due_ns = way[0].admit(clock(), len(packet))
                        if due_ns != DROPPED:
                            number += 1
                            push(flying, (due_ns, number, way[1], packet))
                except BlockingIOError:
                    pass
            limit_ns = clock() + EARLY_NS
            while flying and flying[0][0] <= limit_ns:
                _, _, tun, packet = pop(flying)
                try:
                    write(tun, packet)
                except OSError:  # somebody took the node's device down
                    self.undelivered += 1
            turns += 1
            if turns == LOAD_TURNS:
                loaded = limit_ns - since_ns < LOAD_TURNS * LOAD_TURN_NS
                turns, since_ns = 0, limit_ns
            if loaded and nap_s:
                sleep(nap_s)

    def _tell(self) -> None:
        """Counters of every link to whoever asks."""
        with contextlib.suppress(OSError):
            connection, _ = self.control.accept()
            with connection:
                # All of it fits, so that packets never wait for whoever asked.
                connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4_000_000)
                connection.setblocking(False)
                counters = [[*ends, channel.counters()] for ends, channel in self.channels.items()]
                connection.sendall(json.dumps(counters).encode())


def hurry() -> None:
    """Wake this process as soon as it is due: real-time priority, exact timers, no pauses of its own."""
    gc.collect()
    gc.freeze()
    gc.disable()
    prctl(PR_SET_TIMERSLACK, 1)
    with contextlib.suppress(PermissionError):  # still right, but late when other programs compute
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
