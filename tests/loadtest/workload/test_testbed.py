"""A deployment in the nodes of a lab, here one whose nodes are all this machine; and a host of it that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.profile import Link
from loadtest.latency.interleave import Seat, take_turns
from loadtest.workload.arms import Arm, Length, ModeChoice
from loadtest.workload.testbed import Network, deployed, ring_topology
from serving.cli.deployment import MODULE
from serving.cli.ports import free_port_block
from stages.errors import InputError, ServiceError

HOSTS = ("host-1", "host-2")


class Pretence:
    """A lab without links. `placed`: which node was asked to run something."""

    def __init__(self) -> None:
        self.placed: list[str] = []

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def command(self, node: str, argv: list[str]) -> list[str]:
        self.placed.append(node)
        return ["env", f"PLACED={node}", *argv]


def network(lab: Pretence, hosts: int = 2) -> Network:
    return Network("here", hosts, free_port_block(hosts + 1), lab)  # type: ignore[arg-type]


def test_every_process_runs_in_its_node_and_a_host_killed_in_the_run_is_told_of(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Pretence()
    monkeypatch.setattr(Network, "link", lambda *_: Link())
    with deployed(network(lab), bundle, host_options=("--queue", "9")) as testbed:
        deployment = testbed.deployment
        assert deployment is not None
        assert [host.name for host in deployment.topology.hosts] == list(HOSTS)
        assert lab.placed[:3] == [*HOSTS, "router"]
        for name, pid in deployment.processes.items():
            assert f"PLACED={name}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            assert command[1:4] == MODULE
            assert ("--queue" in command) == (name != "router")
            assert "--insecure" in command

        facts = testbed.facts()
        assert (facts.hosts, "sweep" in facts.modes) == (2, True)
        seats = [Seat(testbed, Arm(ModeChoice(mode), Length(8))) for mode in ("sweep", "ar")]
        errors = []
        for number, (_, [sample]) in enumerate(take_turns(seats, 3, 0)):
            errors.append(sample.error)
            if number == 1:
                deployment.kill("host-2")
        assert len(errors) == 6
        assert errors[:2] == ["", ""]
        assert "host-2 ended" in errors[2]
        assert "started again" in errors[2]
        assert errors[3:] == ["", "", ""]


def test_a_flag_that_is_refused_is_the_last_word(bundle: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"host-[12] ended: unrecognized arguments: --no-such-flag"),
        deployed(network(Pretence()), bundle, host_options=("--no-such-flag",)),
    ):
        pytest.fail("it started")


def test_more_nodes_than_blocks(bundle: Path) -> None:
    with pytest.raises(InputError, match="3 hosts cannot share 2 blocks"):
        ring_topology(network(Pretence(), 3), bundle)
