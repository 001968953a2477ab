"""Ports that are free, and kept from other processes that look for some at the same time."""

import contextlib
import socket
import subprocess
import sys

import pytest

from serving.cli import ports
from serving.cli.ports import free_port_block, port_free

SHARED = range(32_000, 32_064)
"""So few that two processes that do not share would collide."""
OTHER = f"""
import sys
from serving.cli import ports
ports.PORTS = {SHARED!r}
print(*(ports.free_port_block(4) for _ in range(4)), flush=True)
sys.stdin.read()
"""


def test_two_processes_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PORTS", SHARED)
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        theirs = [int(first) for first in other.stdout.readline().split()]
        ours = [free_port_block(4) for _ in range(4)]
        assert len({first + i for first in theirs + ours for i in range(4)}) == 32
        other.communicate()


def test_a_port_in_use_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PORTS", SHARED)
    first = free_port_block(2)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
        monkeypatch.setattr(ports, "PORTS", range(first, first + 100))
        ports._kept.pop().close()
        assert not port_free("127.0.0.1", first)
        assert free_port_block(3) >= first + 2
    assert port_free("127.0.0.1", first)
    with contextlib.suppress(OSError), socket.create_server(("::1", first), family=socket.AF_INET6):  # or no IPv6 here
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **kind: [(socket.AF_INET6,)])
        assert not port_free("localhost", first), "the name may mean ::1 alone"
