"""Links: one process reads every node's packets and delivers each when it is due."""

import contextlib
import gc
import heapq
import json
import os
import random
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from loadtest.lab.namespaces import LabError, prctl
from loadtest.lab.profile import Link
from stages.errors import file_errors

# The arithmetic of a directed link: the delivery time of a packet that arrives now, or its loss.

DROPPED = -1


class Channel:
    """A link in use: a queue that drains at the link's rate, then a delay. Times are nanoseconds of one clock.

    A packet leaves once all earlier ones have left and its own bits are out; it is delivered a delay later, never
    before an earlier packet.
    """

    def __init__(self, link: Link, seed: str) -> None:
        self.link = link
        self.loss = link.loss
        self.ns_per_byte = 8000 / link.rate_mbps if link.rate_mbps else 0.0
        # the queue keeps its size in bytes, as a router's does: packets in it wait longer
        self.queue_ns = round((link.queue_bytes or 0) * self.ns_per_byte)
        self.delay_ns = round(link.delay_ms * 1e6)
        self.jitter_ns = round(link.jitter_ms * 1e6)
        self.random = random.Random(seed).random
        self.free_ns = 0
        self.last_ns = 0

    def admit(self, now_ns: int, size: int) -> int:
        """Delivery time of a packet of `size` bytes that arrives at `now_ns`, or DROPPED."""
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
        self.last_ns = max(delivery_ns, self.last_ns)
        return self.last_ns


# Changes to a running lab's links: datagrams to the process that carries its packets.

REPLY_S = 5.0
MAX_BYTES = 1 << 16  # of an order
CREDENTIALS = struct.Struct("3i")  # a sender's process, user and group, certified by the kernel

Ends = tuple[str, str]  # addresses of a directed link's source and destination


def open_orders(pid: int) -> socket.socket:
    """Open the socket on which a lab process receives orders. Its name has no file and ends with the process."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    orders.bind(_name(pid))
    orders.setblocking(False)
    return orders


def apply_order(orders: socket.socket, channels: Mapping[Ends, Channel]) -> None:
    """Change the links named in a datagram from this user, and confirm."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        order, ancillary, _, sender = orders.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
        users = [CREDENTIALS.unpack(data)[1] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        if users != [os.geteuid()]:
            return
        table = json.loads(order)
        for source, destination in table["links"]:
            channel = channels[source, destination]
            channel.loss = 1.0 if table["cut"] else channel.link.loss
        orders.sendto(b"done", sender)


def send_order(pid: int, links: Sequence[Ends], cut: bool) -> None:
    """Have a lab's process cut or restore these links. Raises LabError."""
    no_answer = file_errors(LabError, f"the lab process {pid} does not answer")
    with no_answer, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.settimeout(REPLY_S)
        own.bind("")  # the kernel chooses a name for the answer
        own.sendto(json.dumps({"links": links, "cut": cut}).encode(), _name(pid))
        own.recv(MAX_BYTES)


def _name(pid: int) -> str:
    return f"\0onesweep-wan-{pid}"


PR_SET_TIMERSLACK = 29
BATCH = 64  # packets read from one node before the other nodes and due packets get a turn
# A wait ends some 20 to 30 microseconds late, so packets due that soon leave at once: the error is the same, with fewer
# waits.
EARLY_NS = 20_000

# Under load, packets collect during a nap of this share of the shortest link's delay: a wake-up costs several times as
# much as a packet, and the programs under test need the same cores.
LONGEST_NAP_S, SHORTEST_NAP_S, NAP_SHARE = 200e-6, 50e-6, 0.02
LOAD_TURNS, LOAD_TURN_NS = 32, 500_000  # load means this many turns in a row, each shorter than this


def forward_packets(devices: dict[str, int], channels: dict[Ends, Channel], orders: socket.socket) -> NoReturn:
    """Read TUN devices and deliver packets by their destination address, until the process ends.

    `devices`: TUN descriptors by node address; `orders`: from `open_orders`. Raises OSError if a device has gone.
    """
    nap_s = min((channel.delay_ns for channel in channels.values()), default=0) * 1e-9 * NAP_SHARE
    nap_s = min(nap_s, LONGEST_NAP_S) if nap_s >= SHORTEST_NAP_S else 0.0
    routes = {
        tun: {
            socket.inet_aton(destination): (channels[source, destination], other)
            for destination, other in devices.items()
            if destination != source
        }
        for source, tun in devices.items()
    }
    raise_priority()
    in_flight: list[tuple[int, int, int, bytes]] = []
    number = 0  # keeps packets with the same delivery time in order
    waiting = [*routes, orders.fileno()]
    # Local names are faster than those of modules and objects.
    turns, since_ns, loaded = 0, 0, False
    clock, read, write, push, pop = time.monotonic_ns, os.read, os.write, heapq.heappush, heapq.heappop
    wait, sleep = select.select, time.sleep
    while True:
        timeout_s = max(0, in_flight[0][0] - clock() - EARLY_NS) / 1e9 if in_flight else None
        ready = wait(waiting, (), (), timeout_s)[0]
        for tun in ready:
            if tun not in routes:
                apply_order(orders, channels)
                continue
            links = routes[tun]
            try:
                for _ in range(BATCH):
                    packet = read(tun, 2048)
                    route = links.get(packet[16:20])
                    if route is None:  # not IPv4, or not for a node of the lab
                        continue
                    due_ns = route[0].admit(clock(), len(packet))
                    if due_ns != DROPPED:
                        number += 1
                        push(in_flight, (due_ns, number, route[1], packet))
            except BlockingIOError:
                pass
        limit_ns = clock() + EARLY_NS
        try:
            while in_flight and in_flight[0][0] <= limit_ns:
                _, _, tun, packet = pop(in_flight)
                write(tun, packet)
        except OSError:  # the node's device was taken down; other due packets go in the next turn
            pass
        turns += 1
        if turns == LOAD_TURNS:
            loaded = limit_ns - since_ns < LOAD_TURNS * LOAD_TURN_NS
            turns, since_ns = 0, limit_ns
        if loaded and nap_s:
            sleep(nap_s)


def raise_priority() -> None:
    """Make this process wake promptly: real-time priority, exact timers, no pauses of its own."""
    gc.collect()
    gc.freeze()
    gc.disable()
    prctl(PR_SET_TIMERSLACK, 1)
    with contextlib.suppress(PermissionError):  # still correct, but late while other programs compute
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
