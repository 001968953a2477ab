"""Network namespaces, made, entered, configured and joined by one process, and the programs that run in them."""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from loadtest.lab.profile import MTU
from stages.errors import ServiceError

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PR_SET_PDEATHSIG = 1
TUN = Path("/dev/net/tun")
DEVICE = "wan"
# Room for packets that wait in the device for the forwarder: more than ever needed, since queues belong to links.
DEVICE_QUEUE = 10_000
END_S = 5.0  # time for processes in namespaces to die
SUBNET = "10.77.0.0/24"
GATEWAY_ADDRESS, HOME_ADDRESS = "192.168.1.1", "192.168.1.10"  # in every home
IP, NFT = ["ip", "-batch", "-"], ["nft", "-f", "-"]
ESTABLISHED = "ct state established,related accept;"
INPUT = f"chain input {{ type filter hook input priority 0; iif lo accept; {ESTABLISHED}"

_libc = ctypes.CDLL(None, use_errno=True)


class LabError(ServiceError):
    """An emulated network cannot be made, or is not as it should be."""


def system_call(result: int) -> None:
    """Raise OSError for a libc call that returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, value: int) -> None:
    system_call(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


@contextlib.contextmanager
def own_namespace() -> Iterator[int]:
    """A fresh network namespace for this thread during a `with` block; its descriptor stays open afterwards."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_call(_libc.unshare(CLONE_NEWNET))
        yield os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        system_call(_libc.setns(home, CLONE_NEWNET))
        os.close(home)


def open_tun() -> int:
    """Open the node's end of every link, a device that lives as long as its descriptor. Call inside the namespace."""
    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def set_network(address: str, closed: Collection[str]) -> None:
    """Give this namespace's node its address and a route to the others. Raises LabError with the output of `ip`.

    :param closed: addresses of nodes whose connections it rejects."""
    _run(
        IP,
        "link set lo up",
        f"address add {address}/32 dev lo",
        f"link set {DEVICE} mtu {MTU} txqueuelen {DEVICE_QUEUE} addrgenmode none up",
        f"route add {SUBNET} dev {DEVICE} src {address}",
    )
    if closed:
        _run(NFT, "table inet lab {", f"{INPUT} ip saddr {{ {', '.join(closed)} }} drop; }}", "}")


def make_home() -> int:
    """Make a namespace behind this thread's, which becomes its gateway: it masquerades the home's packets and lets
    nothing in. Returns the descriptor. Raises LabError."""
    with own_namespace() as home:
        pass
    path = f"/proc/{os.getpid()}/fd/{home}"
    _run(
        IP,
        f"link add home type veth peer name eth0 netns {path}",
        f"address add {GATEWAY_ADDRESS}/24 dev home",
        "link set home up",
    )
    _run(
        ["nsenter", f"--net={path}", "--", *IP],
        "link set lo up",
        f"address add {HOME_ADDRESS}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {GATEWAY_ADDRESS}",
    )
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")  # of this thread's namespace
    forward = f'chain forward {{ type filter hook forward priority 0; {ESTABLISHED} iifname != "home" drop; }}'
    after = f'chain after {{ type nat hook postrouting priority 100; oifname "{DEVICE}" masquerade random; }}'
    _run(NFT, "table inet lab {", f"{INPUT} drop; }}", forward, "}", "table ip lab {", after, "}")
    return home


def _run(command: list[str], *lines: str) -> None:
    """Run a program with lines of input. Raises LabError with its output."""
    try:
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    except FileNotFoundError:
        raise LabError(f"the program {command[0]} is missing: install the package nftables") from None
    if done.returncode:
        raise LabError(f"{command[0]} could not configure the lab's network: {' '.join(done.stderr.split())}")


def processes_in(inodes: set[int]) -> list[int]:
    """Ids of the processes in the namespaces with these inodes, which must be held open."""
    # the kernel reuses the inode of a namespace that has gone
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"{entry.path}/ns/net").st_ino in inodes:
                found.append(int(entry.name))
    return found


def end_processes(inodes: set[int]) -> None:
    """Kill the processes in these namespaces, including those started meanwhile."""
    deadline = time.monotonic() + END_S
    while (running := processes_in(inodes)) and time.monotonic() < deadline:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # a killed process may have forked just before
