"""Network namespaces: made, entered, configured and joined by one process, and the programs that run in them."""

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from loadtest.lab.profile import MTU, Link, Profile
from stages.errors import ServiceError

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PR_SET_PDEATHSIG = 1
TUN = Path("/dev/net/tun")
DEVICE = "wan"
# Packets that wait in the device for the forwarder: more than it ever leaves there, for queues belong to links.
DEVICE_QUEUE = 10_000
SUBNET = "10.77.0.0/24"

_libc = ctypes.CDLL(None, use_errno=True)


class LabError(ServiceError):
    """An emulated network that cannot be made, or is not as it should be."""


def system_call(result: int) -> None:
    """Raises OSError for a libc call that returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, value: int) -> None:
    system_call(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def node_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


@contextlib.contextmanager
def own_namespace() -> Iterator[int]:
    """A fresh network namespace around this thread for the length of a `with` block; its descriptor outlives that."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_call(_libc.unshare(CLONE_NEWNET))
        yield os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        system_call(_libc.setns(home, CLONE_NEWNET))
        os.close(home)


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """This thread in another namespace for the length of a `with` block."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_call(_libc.setns(namespace, CLONE_NEWNET))
        yield
    finally:
        system_call(_libc.setns(home, CLONE_NEWNET))
        os.close(home)


def open_tun() -> int:
    """The node's end of every link: a device that goes with its descriptor. Called inside the namespace."""
    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def tun_lines(address: str) -> list[str]:
    """Lines for `ip -batch` that give a node its address and the way to the others."""
    return [
        *address_lines(address),
        f"link set {DEVICE} mtu {MTU} txqueuelen {DEVICE_QUEUE} addrgenmode none up",
        f"route add {SUBNET} dev {DEVICE} src {address}",
    ]


def address_lines(address: str) -> list[str]:
    return ["link set lo up", f"address add {address}/32 dev lo"]


def batch(program: str, lines: list[str]) -> None:
    """Run lines of `ip` or `tc` in this namespace. Raises LabError with what the program said."""
    done = subprocess.run([program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{program} could not set the lab's network: {' '.join(done.stderr.split())}")


def processes_in(inodes: set[int], address_of: dict[int, str] | None = None) -> list[int]:
    """Ids of the processes in the namespaces with these inodes.

    `address_of`: each must have this address, too. A kernel gives the inode of a namespace that has gone to a new one,
    so where nothing keeps the lab's namespaces alive, the inode alone proves nothing.
    """
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            inode = os.stat(f"{entry.path}/ns/net").st_ino
            if inode in inodes and (address_of is None or _has_address(entry.path, address_of[inode])):
                found.append(int(entry.name))
    return found


def end_processes(inodes: set[int], address_of: dict[int, str] | None = None, within_s: float = 5.0) -> None:
    """Kill what runs in these namespaces, and what that starts meanwhile."""
    deadline = time.monotonic() + within_s
    while (running := processes_in(inodes, address_of)) and time.monotonic() < deadline:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # what is killed may have forked just before


def start_ticks(pid: int) -> int:
    """When a process started, which with its id names it for good; 0 for one that has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(others[18])


def _has_address(process: str, address: str) -> bool:
    return f" {address}\n" in Path(f"{process}/net/fib_trie").read_text()


# TCP's congestion control of a namespace.


IPV4 = Path("/proc/sys/net/ipv4")


def set_tcp(congestion: str, slow_start_after_idle: bool) -> None:
    """Set the namespace that this thread is in. Raises LabError for a congestion control that cannot be had."""
    available: list[str] = []
    try:
        (IPV4 / "tcp_slow_start_after_idle").write_text(f"{int(slow_start_after_idle)}\n")
        available = (IPV4 / "tcp_available_congestion_control").read_text().split()
        (IPV4 / "tcp_congestion_control").write_text(f"{congestion}\n")
    except FileNotFoundError:  # what the kernel says of a name it does not know
        raise LabError(
            f"this kernel has no congestion control {congestion!r}; it has {', '.join(sorted(available))} "
            f"(others are modules: modprobe tcp_{congestion})"
        ) from None
    except OSError as error:
        raise LabError(
            f"cannot set congestion control {congestion!r} under {IPV4}: {error.strerror}; a lab needs /proc/sys "
            f"writable, and {congestion} in net.ipv4.tcp_allowed_congestion_control"
        ) from None


@contextlib.contextmanager
def allowed(congestion: str) -> Iterator[None]:
    """Let new namespaces use it for the length of a `with` block, in the machine's own namespace.

    Elsewhere a kernel refuses what is not on this list, and one that was built for BBR does not have cubic there. The
    list is read when a namespace is set, not later. Where it cannot be written, `set_tcp` says what is the matter.
    """
    path = IPV4 / "tcp_allowed_congestion_control"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context(path.open())
            fcntl.flock(lock, fcntl.LOCK_EX)  # two labs must not take each other's change for the machine's own
            before = lock.read()
            if congestion not in before.split():
                path.write_text(f"{before.strip()} {congestion}\n")
                stack.callback(path.write_text, before)
        yield


# Links by the kernel's netem: a veth pair for every two nodes, shaped at both ends

NO_LIMIT_MBPS = 10_000.0  # netem keeps packets in order only under a rate
MIN_PACKETS = 1000
# Both ends of a pair have it: without ARP, a sender puts its own address where the receiver's belongs.
HARDWARE = "02:00:00:00:00:4d"
TRIAL = "ip link add wan0-1 type veth peer name wan1-0 && tc qdisc add dev wan0-1 root netem delay 1ms rate 1mbit"


def netem_works() -> bool:
    """True where this kernel and user can make such a link, found by making one in a namespace of its own."""
    return subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True).returncode == 0


def shape_line(device: str, link: Link, loss: float | None = None, slower: float = 1.0) -> str:
    """The line for `tc -batch` that makes a device's outgoing packets a link, or one of another loss and lower rate."""
    rate_mbps = (link.rate_mbps or NO_LIMIT_MBPS) / slower
    loss = link.loss if loss is None else loss
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
        # one segment a packet, or netem would count 64 KB of a socket as one
        lines.append(f"link set {name} arp off addrgenmode none gso_max_segs 1 up")
        lines.append(f"route add {node_address(other)}/32 dev {name} src {node_address(node)}")
    return lines


def make_mesh(namespaces: list[int], paths: list[str], profile: Profile, names: tuple[str, ...], shape: bool) -> None:
    """Join namespaces; without `shape` by links that neither delay nor drop. Raises LabError."""
    # all pairs first: a route needs the device that the other node's turn makes
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
