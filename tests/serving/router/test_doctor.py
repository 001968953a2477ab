"""`onesweep doctor`: real hosts on loopback, and what is said of bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.cli.ports import free_port_block
from serving.router.doctor import Diagnosis, Endpoint, MeasuredLink, Report, judge
from serving.router.topology import Topology, local_topology
from tests.conftest import Run, until


def topology_of(checkpoint: Path) -> Topology:
    return local_topology(3, 3, checkpoint, free_port_block(4) + 1)


def examined(topology: Topology, tmp_path: Path, onesweep: Run) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "topology.toml"
    path.write_text(topology.to_toml())
    ended = onesweep("doctor", "--topology", path, "--json")
    return ended.code, json.loads(ended.out)


def bad(report: dict[str, Any]) -> list[str]:
    return [f"{f['where']}: {f['message']}" for f in report["findings"] if f["is_bad"]]


def test_a_healthy_ring_has_no_bad_findings(bundles: Path, servers: Any, tmp_path: Path, onesweep: Run) -> None:
    topology = topology_of(bundles / "own")
    servers.ring(topology, bundles / "own")
    _, report = examined(topology, tmp_path, onesweep)
    assert hops_of(report) == [
        ("router", "host-1"),
        ("host-1", "host-2"),
        ("host-2", "host-3"),
        ("host-3", "host-1"),
        ("host-3", "router"),
    ]
    assert all(0 < hop["rtt_min_ms"] <= hop["rtt_ms"] and hop["rate_mbps"] > 0 for hop in report["hops"])
    assert [machine["name"] for machine in report["machines"]] == ["router", "host-1", "host-2", "host-3"]
    assert len({machine["chain_digest"] for machine in report["machines"][1:]}) == 1
    assert not bad(report), "however busy the machine is"
    ended = onesweep("doctor", "--topology", tmp_path / "topology.toml")
    assert (ended.code, "full state ms" in ended.out) == (0, True)


def test_a_host_that_is_down_is_named_and_the_others_are_measured(
    bundles: Path, servers: Any, tmp_path: Path, onesweep: Run
) -> None:
    topology = topology_of(bundles / "own")
    first, second, _ = topology.hosts
    for host in (first, second):
        servers.stage(bundles / "own", host.blocks, host.listen, topology.successors(host), name=host.name)
    until(lambda: ("host-1", "host-2") in hops_of(examined(topology, tmp_path, onesweep)[1]))
    code, report = examined(topology, tmp_path, onesweep)
    assert code == 1
    assert any(line.startswith("host-3: host host-3 at") and "check that it runs" in line for line in bad(report))
    assert any(line.startswith("host-2 -> host-3:") for line in bad(report))


def hops_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(hop["source"], hop["target"]) for hop in report["hops"]]


# Judgements


def machine(name: str = "host-1", **changes: Any) -> Endpoint:
    system = {"version": "1", "system": "Linux", "congestion_control": "cubic", "slow_start_after_idle": "0"}
    weights = {"backend": "cpu", "chain_digest": "c", "ar_digest": "a", "scorer_digest": "s", "blocks": (0, 1)}
    fields = {"address": "x:1", "clock_offset_ms": 0.0, "ready": True, **system, **weights, **changes}
    return Endpoint(name=name, **fields)


def judged(*hops: MeasuredLink, **changes: Any) -> list[Diagnosis]:
    report = Report(
        [machine("router", chain_digest="", ar_digest="", scorer_digest=""), machine(), machine("host-2", **changes)],
        [*hops],
    )
    judge(report)
    return report.findings


GOOD = {"rtt_ms": 60.0, "rtt_min_ms": 60.0, "state_ms": 62.0, "rate_mbps": 100.0}


@pytest.mark.parametrize(
    ("hop", "machine_changes", "says"),
    [
        ({"rate_mbps": 2.0, "state_ms": 135.0}, {}, "2.0 Mbit/s: a full state takes 74 ms; try --set codec=int4"),
        ({"state_ms": 122.0}, {}, "a full state takes 122.0 ms instead of 61.5"),
        ({}, {"congestion_control": "reno"}, "congestion control reno: set net.ipv4.tcp_congestion_control"),
        ({}, {"clock_offset_ms": -2000.0}, "its clock is off by -2.0 s"),
        ({}, {"version": "0"}, "runs onesweep 0, this machine 1: use one version"),
        ({}, {"backend": "cuda"}, "the hosts compute differently (host-1 cpu, host-2 cuda)"),
        (
            {},
            {"backend": "cuda (NVIDIA H100)"},
            "they hold the same blocks (0,1) and compute differently: a text that one continues for another may change",
        ),
        ({}, {"chain_digest": "d"}, "different chain checkpoints (host-1 c, host-2 d)"),
        ({}, {"ar_digest": ""}, "different ar checkpoints (host-1 a, host-2 (none))"),
        ({}, {"scorer_digest": "t"}, "different scorer checkpoints (host-1 s, host-2 t)"),
    ],
)
def test_a_bad_finding_comes_with_advice(hop: dict[str, float], machine_changes: dict[str, Any], says: str) -> None:
    findings = judged(MeasuredLink("host-1", "host-2", **{**GOOD, **hop}), **machine_changes)
    assert any(finding.is_bad and says in finding.message for finding in findings), findings
