"""The AR model: cutting it into stages changes nothing, and a host needs no compiler."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.stages.conftest import make_ar


@pytest.mark.parametrize(("parts", "layers"), [(1, 4), (2, 2), (4, 1)])
def test_splitting_into_stages_does_not_change_the_model(parts: int, layers: int) -> None:
    """Layers of any cut, put one after another, are the same weights in the same order."""
    whole, cut = make_ar(parts=1, layers=4), make_ar(parts=parts, layers=layers)
    flat = [layer for stage in whole.stages for layer in stage.layers]
    pieces = [layer for stage in cut.stages for layer in stage.layers]
    for piece, layer in zip(pieces, flat, strict=True):
        piece.load_state_dict(layer.state_dict())
    cut.stages[0].embedding.load_state_dict(whole.stages[0].embedding.state_dict())
    cut.stages[-1].norm.load_state_dict(whole.stages[-1].norm.state_dict())
    cut.stages[-1].head.load_state_dict(whole.stages[-1].head.state_dict())
    text = torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(0))
    assert torch.equal(cut(text), whole(text))


LOAD = """
import sys
from pathlib import Path
from stages.host.parts import load_parts
from stages.host.plan import plan_host
load_parts(plan_host(Path(sys.argv[1]), (0, 1)))
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_host_starts_without_torch_s_compiler(trained: Path, tmp_path: Path) -> None:
    for kind in ("chain", "ar"):
        (tmp_path / kind).symlink_to(trained / kind)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100).returncode == 0
