"""Freed memory goes back to the system, and a container's limits count."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from stages import device
from stages import memory as allocator
from stages.backends.onnx import give_back, is_owned
from stages.device import all_cores
from stages.memory import free_memory, keep_trimmed

MB = 1 << 20


async def test_memory_freed_inside_a_heap_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "TRIM_S", 0.01)
    process = psutil.Process()
    kept = [bytes(8000) for _ in range(16_000)]  # 128 MB in small pieces
    del kept[:-1:2], kept[: len(kept) // 2]  # the last one stays, above all that is free
    before = process.memory_info().rss
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keep_trimmed(), 0.5)
    assert process.memory_info().rss < before - 20 * MB


# Tensors whose memory is given back while they exist.
def test_a_released_tensor_takes_no_memory() -> None:
    tensor, process = torch.ones(64 * MB // 4), psutil.Process()
    before = process.memory_info().rss
    give_back(tensor[: 48 * MB // 4])
    assert process.memory_info().rss < before - 40 * MB
    assert float(tensor[-1]) == 1.0
    give_back(torch.ones(3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another C library")
def test_a_process_restarts_with_large_pages_and_its_own_arguments() -> None:
    code = "from stages.memory import *; begin_with_large_pages(); print(sys.argv, os.environ['GLIBC_TUNABLES'])"
    for given, expected in (("", "glibc.malloc.hugetlb=1"), ("glibc.malloc.check=0", "glibc.malloc.check=0")):
        environment = {name: x for name, x in os.environ.items() if name != "GLIBC_TUNABLES"}
        environment |= {"GLIBC_TUNABLES": given} if given else {}
        said = subprocess.check_output([sys.executable, "-c", code, "a b"], env=environment, text=True)
        assert said == f"['-c', 'a b'] {expected}\n"


def test_a_tensor_with_a_view_is_not_owned() -> None:
    tensor = torch.ones(8)
    assert is_owned(tensor)
    view = tensor[2:]
    assert not is_owned(tensor)
    del view
    assert is_owned(tensor)


STAT = "active_file 30\ninactive_file 7\ntotal_active_file 30\ntotal_inactive_file 7\n"
V1 = """cpu/pod/cpu.cfs_quota_us=350000 cpu/pod/cpu.cfs_period_us=100000 cpu/cpu.cfs_quota_us=-1 cpu/cpu.cfs_period_us=1
memory/pod/memory.limit_in_bytes=900 memory/pod/memory.usage_in_bytes=800"""
V2 = "own/cpu.max=max,1 own/memory.max=max own/memory.current=1 cpu.max=350000,100000 memory.max=900 memory.current=800"


@pytest.mark.parametrize(
    ("own", "files"), [("5:memory:/pod\n4:cpu,cpuacct:/pod\n0::/", V1), ("0::/own", V2), ("0::/outside/own", V2)]
)
def test_cores_and_memory_are_those_of_the_container(
    own: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CGROUPS", tmp_path)
    monkeypatch.setattr(device, "_OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cgroup").write_text(own)
    for name, _, text in (file.partition("=") for file in files.split()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(",", " ") + "\n")
        (tmp_path / name).with_name("memory.stat").write_text(STAT)
    assert (all_cores(), free_memory()) == (3, 137)
