"""Freed memory goes back to the system."""

import asyncio
import os
import sys

import psutil
import pytest
import torch

from stages import memory as allocator
from stages.backends.onnx import give_back, is_owned
from stages.memory import keep_trimmed, use_large_pages

MB = 1 << 20


async def test_what_is_freed_in_the_midst_of_a_heap_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "TRIM_S", 0.01)
    process = psutil.Process()
    kept = [bytes(8000) for _ in range(16_000)]  # 128 MB in small pieces
    del kept[:-1:2], kept[: len(kept) // 2]  # the last one stays, above all that is free
    before = process.memory_info().rss
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keep_trimmed(), 0.5)
    assert process.memory_info().rss < before - 20 * MB


# Tensors whose memory is given back while they exist.
def test_a_tensor_that_is_given_back_takes_nothing() -> None:
    tensor, process = torch.ones(64 * MB // 4), psutil.Process()
    before = process.memory_info().rss
    give_back(tensor[: 48 * MB // 4])
    assert process.memory_info().rss < before - 40 * MB
    assert float(tensor[-1]) == 1.0
    give_back(torch.ones(3))


def test_large_pages_fill_no_holes() -> None:
    tensor, process = torch.ones(64 * MB // 4), psutil.Process()
    give_back(tensor[: 48 * MB // 4])
    before = process.memory_info().rss
    use_large_pages()
    assert process.memory_info().rss < before + 8 * MB
    assert tensor[-16 * MB // 4 :].min() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no pages of this kind")
def test_large_pages_take_no_copy_of_what_a_fork_shares() -> None:
    tensor = torch.ones(64 * MB // 4)
    if (child := os.fork()) == 0:
        use_large_pages()
        os._exit(psutil.Process().memory_full_info().uss > 48 * MB)
    assert (os.waitpid(child, 0)[1], tensor.min()) == (0, 1)


def test_a_tensor_is_owned_by_one_name() -> None:
    tensor = torch.ones(8)
    assert is_owned(tensor)
    view = tensor[2:]
    assert not is_owned(tensor)
    del view
    assert is_owned(tensor)
