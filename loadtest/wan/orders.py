"""Cutting and mending links of a lab while it is up: datagrams to the process that carries its packets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from loadtest.wan.channel import Channel
from loadtest.wan.namespace import LabError

ANSWER_S = 5.0
MOST_BYTES = 4096
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, as the kernel vouches for them."""

Ends = tuple[str, str]
"""Addresses of a directed link's source and destination."""


def open_orders(pid: int) -> socket.socket:
    """Where a lab process listens for orders. A name without a file: it goes with the process."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    orders.bind(_name(pid))
    orders.setblocking(False)
    return orders


def take_order(orders: socket.socket, channels: Mapping[Ends, Channel]) -> None:
    """Cut or mend what a datagram says, if this user sent it, and confirm."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        order, ancillary, _, sender = orders.recvmsg(MOST_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
        users = [CREDENTIALS.unpack(data)[1] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        if users != [os.geteuid()]:
            return
        table = json.loads(order)
        for source, destination in table["links"]:
            channel = channels[source, destination]
            channel.loss = 1.0 if table["cut"] else channel.link.loss
        orders.sendto(b"done", sender)


def give_order(pid: int, links: Sequence[Ends], cut: bool) -> None:
    """Have the process of a lab drop every packet of these links, or carry them again. Raises LabError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.settimeout(ANSWER_S)
        own.bind("")  # the kernel finds a name for the answer
        try:
            own.sendto(json.dumps({"links": links, "cut": cut}).encode(), _name(pid))
            own.recv(16)
        except OSError as error:
            raise LabError(f"the lab process {pid} does not answer: {error}") from None


def _name(pid: int) -> str:
    return f"\0onesweep-wan-{pid}-orders"
