"""Memory of the hosts of a checkpoint: the limit, what fills a budget, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import host_memory
from loadtest.host_memory import HostMemory, _filling, _stage_bytes, hosts_table
from serving.cli import main
from serving.topology import local_topology
from stages.bundle import find_bundle
from stages.errors import InputError
from stages.manifest import read_manifest
from stages.parts import session_bytes


def host(peak: int, loading_peak: int = 0, caches: int = 400) -> HostMemory:
    return HostMemory("host-1", 1000, 500, caches, 1100, loading_peak, peak)


@pytest.mark.parametrize(
    ("measured", "met"),
    [(host(1850), True), (host(1851), False), (host(1951, caches=500), False), (host(0, loading_peak=1951), False)],
)
def test_a_host_keeps_to_its_stage_and_budget_and_a_third_less(measured: HostMemory, met: bool) -> None:
    assert measured.limit == 1950
    assert measured.met is met
    assert hosts_table([measured]).splitlines()[-2].endswith("yes" if met else "no")


def test_sessions_fill_the_budget_of_the_largest_host(bundles: Path) -> None:
    directory = find_bundle(bundles / "own").ar
    assert directory is not None
    manifest, hosts = read_manifest(directory), local_topology(2, 3, bundles / "own", 7701).hosts
    assert [len(each.blocks) for each in hosts] == [2, 1]
    budget = 400_000
    filling = _filling(directory, manifest, hosts, budget)
    capacity = len(filling.prompt.encode()) + filling.max_tokens - 1
    held = filling.sessions * session_bytes(manifest, hosts[0].blocks, capacity)
    assert 0.9 * budget < held <= budget
    assert filling.sessions >= 2
    with pytest.raises(InputError, match="--session-mb is too small"):
        _filling(directory, manifest, hosts, 1000)


def test_files_of_all_models_count(bundles: Path) -> None:
    first, second = local_topology(2, 3, bundles / "own", 7701).hosts
    sizes = [path.stat().st_size for name in ("chain", "ar") for path in (bundles / "own" / name).glob("*.safetensors")]
    assert _stage_bytes(bundles / "own", first) + _stage_bytes(bundles / "own", second) == sum(sizes)


def test_the_command_measures_the_hosts_of_a_checkpoint(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(checkpoint: Path, session_mb: int) -> list[HostMemory]:
        asked.append((checkpoint, session_mb))
        return [host(1800)]

    monkeypatch.setattr(host_memory, "measure_hosts", measure)
    path = tmp_path / "memory.json"
    command = ["bench", "memory", "--checkpoint", str(bundles / "own"), "--session-mb", "3", "--json", str(path)]
    assert main(command) == 0
    assert asked == [(bundles / "own", 3)]
    assert "1.3 (stage + budget)" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["hosts"]
    assert (row["limit"], row["met"], row["name"]) == (1950, True, "host-1")
    assert main([*command, "--session-mb", "0"]) == 2
    assert "--session-mb must be at least 1" in capsys.readouterr().err
