"""Links by the kernel's netem: a veth pair for every two nodes, shaped at both ends."""

from __future__ import annotations

import math
import subprocess

from loadtest.lab.namespaces import address_lines, batch, inside, node_address
from loadtest.lab.profile import MTU, Link, Profile

NO_LIMIT_MBPS = 10_000.0  # netem keeps packets in order only under a rate
MIN_PACKETS = 1000
# Both ends of a pair have it: without ARP, a sender puts its own address where the receiver's belongs.
HARDWARE = "02:00:00:00:00:4d"
TRIAL = "ip link add wan0-1 type veth peer name wan1-0 && tc qdisc add dev wan0-1 root netem delay 1ms rate 1mbit"


def netem_works() -> bool:
    """True where this kernel and user can make such a link, found by making one in a namespace of its own."""
    return subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True).returncode == 0


def shape_line(device: str, link: Link, cut: bool = False) -> str:
    """The line for `tc -batch` that makes a device's outgoing packets a link; with `cut`, one that drops them all."""
    rate_mbps = link.rate_mbps or NO_LIMIT_MBPS
    loss = 1.0 if cut else link.loss
    words = [f"qdisc replace dev {device} root netem limit {packet_limit(link)} delay {link.delay_ms * 1000:.0f}us"]
    words += [f"{link.jitter_ms * 1000:.0f}us"] if link.jitter_ms else []
    words += [f"loss {loss * 100:.6f}%"] if loss else []
    return " ".join([*words, f"rate {rate_mbps * 1e6:.0f}bit"])


def packet_limit(link: Link) -> int:
    """Packets that a link holds: netem counts those on their way with those in the queue, and packets, not bytes."""
    if link.rate_mbps is None or link.queue_bytes is None:
        return max(MIN_PACKETS, math.ceil(NO_LIMIT_MBPS * 125 * (link.delay_ms + link.jitter_ms) / MTU) + MIN_PACKETS)
    flying_bytes = link.rate_mbps * 125 * (link.delay_ms + link.jitter_ms)
    return max(1, math.ceil((flying_bytes + link.queue_bytes) / MTU))


def device_name(source: int, destination: int) -> str:
    return f"wan{source}-{destination}"


def mesh_lines(node: int, paths: list[str]) -> list[str]:
    """Lines for `ip -batch` in a node's namespace: its address, and pairs to the later nodes. `paths`: namespaces."""
    lines = address_lines(node_address(node))
    for other in range(node + 1, len(paths)):
        end = f"mtu {MTU} address {HARDWARE}"
        name, peer = device_name(node, other), device_name(other, node)
        lines.append(f"link add {name} {end} type veth peer name {peer} {end} netns {paths[other]}")
    return lines


def route_lines(node: int, nodes: int) -> list[str]:
    """Lines for `ip -batch`, once every pair is there: devices up, one packet a segment, a route to each node."""
    lines = []
    for other in (i for i in range(nodes) if i != node):
        name = device_name(node, other)
        lines.append(f"link set {name} arp off addrgenmode none gso_max_segs 1 up")
        lines.append(f"route add {node_address(other)}/32 dev {name} src {node_address(node)}")
    return lines


def make_mesh(namespaces: list[int], paths: list[str], profile: Profile, names: tuple[str, ...], shape: bool) -> None:
    """Join namespaces; without `shape` by links that neither delay nor drop. Raises LabError."""
    for node, namespace in enumerate(namespaces):
        with inside(namespace):
            batch("ip", mesh_lines(node, paths))
    for node, namespace in enumerate(namespaces):
        with inside(namespace):
            batch("ip", route_lines(node, len(namespaces)))
            others = [other for other in range(len(namespaces)) if other != node]
            lines = [shape_line(device_name(node, i), profile.link(names[node], names[i])) for i in others]
            if shape:
                batch("tc", lines)
