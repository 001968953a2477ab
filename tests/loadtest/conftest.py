"""A bundle with random weights, small enough to start a deployment of it in seconds."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from serving.cli.__main__ import main
from stages.checkpoint.checkpoint import save_ar, save_part, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.partition import equal_probability
from stages.model.pipeline import ArModel
from stages.model.randomness import Codes
from tests.stages.conftest import one_thread

__all__ = ["one_thread"]

TINY = Architecture(parts=2, layers=1, width=16, heads=2, context_length=96, code_dim=8, condition_dim=8)


@pytest.fixture(scope="session")
def locust() -> None:
    if find_spec("locust") is None:
        pytest.skip("locust is not installed (extra `loadtest`)")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chain/ and ar/ of two parts. Not to be changed."""
    root = tmp_path_factory.mktemp("bundle")
    codes, nothing = Codes(0, TINY.code_dim), (None, None)
    partition = equal_probability(2, 0.002, 80.0)
    write_manifest(root / "chain", Manifest("chain", TINY, nothing, codes, partition, probe_text=PROBE_TEXT))
    for index in range(2):
        torch.manual_seed(index)
        save_part(root / "chain", Block(TINY, index, codes).eval())
    torch.manual_seed(0)
    write_manifest(root / "ar", Manifest("ar", TINY, nothing, probe_text=PROBE_TEXT))
    save_ar(root / "ar", ArModel(TINY).eval())
    return root


def check_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str, code: int = 2) -> None:
    """A command ends with one line, and prints nothing before it."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert err.startswith("onesweep: ")
    assert sentence in err
    assert (err.count("\n"), out) == (1, "")
