"""Tensors whose memory is given back while they exist."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from stages.pages import give_back, is_owned

MB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_a_tensor_that_is_given_back_takes_nothing() -> None:
    tensor, process = torch.ones(64 * MB // 4), psutil.Process()
    before = process.memory_info().rss
    give_back(tensor[: 48 * MB // 4])
    assert process.memory_info().rss < before - 40 * MB
    assert float(tensor[-1]) == 1.0
    give_back(torch.ones(3))


def test_a_tensor_is_owned_by_one_name() -> None:
    tensor = torch.ones(8)
    assert is_owned(tensor)
    view = tensor[2:]
    assert not is_owned(tensor)
    del view
    assert is_owned(tensor)
