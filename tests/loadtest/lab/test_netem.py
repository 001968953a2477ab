"""The kernel's links: what is asked of `ip` and `tc`, and the mesh itself where veth pairs can be made.

Shaping runs where the kernel has netem: then every other test of labs runs on it.
"""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.lab.lab import Lab, temporary_lab
from loadtest.lab.namespaces import TRIAL, netem_works, packet_limit, shape_line
from loadtest.lab.process import UNSHAPED
from loadtest.lab.profile import Link, Profile

pytestmark = pytest.mark.slow


def test_a_link_becomes_a_qdisc() -> None:
    link = Link(delay_ms=17.5, rate_mbps=100, queue_kb=150, jitter_ms=2, loss=0.001)
    assert shape_line("wan0-1", link) == (
        "qdisc replace dev wan0-1 root netem limit 263 delay 17500us 2000us loss 0.100000% rate 100000000bit"
    )
    assert packet_limit(link) == -(-(12_500 * 19.5 + 150_000) // 1500)


def test_a_link_without_rate_still_has_one_for_the_order() -> None:
    assert (
        shape_line("d", Link(delay_ms=10))
        == "qdisc replace dev d root netem limit 9334 delay 10000us rate 10000000000bit"
    )


def test_the_trial_fails_for_want_of_netem_and_of_nothing_else(needs_lab: None) -> None:
    make, _, shape = TRIAL.partition(" && ")
    assert shape.startswith("tc qdisc add dev wan0-1 root netem ")
    if not netem_works():
        without = subprocess.run(["unshare", "--net", "sh", "-c", make], capture_output=True, text=True)
        with_it = subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True)
        wants = ("qdisc kind is unknown", "not permitted", "tc: not found")
        assert without.returncode or any(want in with_it.stderr for want in wants)


@pytest.fixture
def mesh(needs_lab: None) -> Any:
    """Nodes that are joined as for netem, without netem."""
    trial = ["unshare", "--net", "ip", "link", "add", "wan0-1", "type", "veth", "peer", "name", "wan1-0"]
    if subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("this kernel makes no veth pairs (modprobe veth)")
    with temporary_lab(Profile("test", "", Link()), 2, UNSHAPED) as lab:
        yield lab


def test_the_mesh_carries_packets_between_all_nodes(mesh: Lab, programs: Any) -> None:
    for source, destination in (("router", "host-1"), ("host-1", "host-2"), ("host-2", "router")):
        echo = programs.start(mesh, destination, "echo", 5000, ready=True)
        assert len(programs.run(mesh, source, "ping", mesh.address(destination), 5000, 5)) == 5
        echo.kill()
    assert mesh.counters() == {}


def test_no_packet_of_the_mesh_is_larger_than_a_link_s(mesh: Lab, programs: Any, lab_of: Callable[..., Lab]) -> None:
    programs.start(mesh, "host-1", "serve", 5000, ready=True)
    assert programs.run(mesh, "router", "pull", mesh.address("host-1"), 5000, 1, 0.1, 0.3) > 0
    shown = subprocess.run(
        mesh.command("router", ["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True
    ).stdout
    received = {line.split(":")[0].strip(): line.split(":")[1].split() for line in shown.splitlines() if ":" in line}
    size, packets = (int(number) for number in received["wan0-1"][:2])
    assert 1000 < size / packets <= 1514
