"""Freed memory goes back to the system."""

import asyncio
import os
import subprocess
import sys

import psutil
import pytest
import torch

from stages import memory as allocator
from stages.backends.onnx import give_back, is_owned
from stages.memory import keep_trimmed

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
