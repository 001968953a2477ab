"""`onesweep bench memory`: a block of a megabyte, and the hosts of a checkpoint with their sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from onesweep.loadtest.host import memory
from onesweep.loadtest.host.memory import (
    HostMemory,
    MemoryBench,
    MemoryFigures,
    ServerMemory,
    _filling,
    _stage_bytes,
    block_bytes,
    hosts_table,
    sized_architecture,
    write_random_chain,
)
from onesweep.loadtest.host.settings import MemorySettings
from onesweep.serving.cli.__main__ import main
from onesweep.serving.router.topology import local_topology
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import load_block
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.host.parts import session_bytes


def figures(loaded_rss: int) -> MemoryFigures:
    idle, loaded = ServerMemory(100, 90, 80, 110), ServerMemory(loaded_rss, 1090, 1080, 1110)
    return MemoryFigures(1000, 16, idle, loaded, idle, loaded)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    assert main(["bench", "memory", "--block-mb", "1", "--json", str(path)]) == 0
    assert "(loaded - idle) / block" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert 0.8e6 < record["block_bytes"] < 1.4e6
    for server in ("idle", "loaded", "idle_after", "loaded_after"):
        assert 0 < record[server]["uss"] <= record[server]["pss"] <= record[server]["rss"] <= record[server]["peak"]


@pytest.mark.parametrize(("rss", "met"), [(1400, True), (1401, False)])
def test_the_ratio_counts_what_the_block_added(rss: int, met: bool) -> None:
    bench = MemoryBench(MemorySettings())
    record = bench.record(figures(rss))
    assert record["ratios"]["ready"] == {"rss": (rss - 100) / 1000, "pss": 1.0, "uss": 1.0, "peak": 1.0}
    assert record["met"] is met
    assert bench.table(figures(rss)).endswith("yes" if met else "no")


def test_random_chains_pass_their_gate_and_have_the_size_asked_for(tmp_path: Path) -> None:
    architecture = sized_architecture(4)
    write_random_chain(tmp_path, architecture)
    assert load_block(tmp_path, 0).architecture == architecture
    assert block_bytes(tmp_path) == pytest.approx(4e6, rel=0.25)


def host(peak: int, loading_peak: int = 0, caches: int = 400) -> HostMemory:
    return HostMemory("host-1", 1000, 500, caches, 1100, loading_peak, peak)


@pytest.mark.parametrize(
    ("measured", "met"),
    [(host(1624), True), (host(1625), False), (host(1725, caches=500), False), (host(0, loading_peak=1725), False)],
)
def test_a_host_keeps_to_its_stage_and_budget_and_little_more(measured: HostMemory, met: bool) -> None:
    assert measured.limit == 1724
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
        return [host(1600)]

    monkeypatch.setattr(memory, "measure_hosts", measure)
    path = tmp_path / "memory.json"
    command = ["bench", "memory", "--checkpoint", str(bundles / "own"), "--session-mb", "3", "--json", str(path)]
    assert main(command) == 0
    assert asked == [(bundles / "own", 3)]
    assert "1.15 (stage + budget)" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["hosts"]
    assert (row["limit"], row["met"], row["name"]) == (1724, True, "host-1")
    assert main([*command, "--session-mb", "0"]) == 2
    assert "--session-mb must be at least 1" in capsys.readouterr().err
