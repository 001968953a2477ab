"""Modules without memory: they have the shapes of others, and cost no import of torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stages.model.architecture import Architecture
from stages.model.meta_init import without_memory
from stages.model.pipeline import ArModel

LOAD = """
import sys
from pathlib import Path
from stages.host.parts import load_parts, plan_host
load_parts(plan_host(Path(sys.argv[1]), (0, 1)))
sys.exit("torch._dynamo" in sys.modules)
"""


def test_shapes_are_those_of_other_modules() -> None:
    with without_memory():
        unfilled = ArModel(Architecture(parts=2, width=32))
    filled = ArModel(Architecture(parts=2, width=32))
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (unfilled, filled)]
    assert shapes[0] == shapes[1]
    assert {tensor.device.type for tensor in unfilled.state_dict().values()} == {"meta"}


def test_a_host_starts_without_torch_s_compiler(trained: Path, tmp_path: Path) -> None:
    for kind in ("chain", "ar"):
        (tmp_path / kind).symlink_to(trained / kind)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100).returncode == 0
