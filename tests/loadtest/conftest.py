"""A bundle with random weights, small enough to start a deployment of it in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loadtest.random_chain import write_random_chain
from stages.ar import ArModel
from stages.architecture import Architecture
from stages.checkpoint import save_ar, write_manifest
from stages.manifest import Manifest
from stages.probe import PROBE_TEXT

TINY = Architecture(parts=2, layers=1, width=16, heads=2, context_bytes=96, code_dim=8, condition_dim=8)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chain/ and ar/ of two parts. Not to be changed."""
    root = tmp_path_factory.mktemp("bundle")
    write_random_chain(root / "chain", TINY)
    torch.manual_seed(0)
    write_manifest(root / "ar", Manifest("ar", TINY, (None, None), probe_text=PROBE_TEXT))
    save_ar(root / "ar", ArModel(TINY).eval())
    return root
