"""The AR model: cutting it into stages, caching and batching change nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.model.pipeline import cache_bytes, new_caches
from tests.stages.conftest import make_ar


def text(batch: int = 1, length: int = 48) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0))


def test_stages_in_sequence_are_the_model() -> None:
    model, known = make_ar(parts=3), text(2)
    x = known
    for stage in model.stages:
        x = stage.read(x)
    assert torch.equal(model.stages[-1].next_byte(x), model(known))


@pytest.mark.parametrize(("parts", "layers"), [(1, 4), (2, 2), (4, 1)])
def test_the_cut_does_not_change_the_model(parts: int, layers: int) -> None:
    """Layers of any cut, put one after another, are the same weights in the same order."""
    whole, cut = make_ar(parts=1, layers=4), make_ar(parts=parts, layers=layers)
    flat = [layer for stage in whole.stages for layer in stage.layers]
    pieces = [layer for stage in cut.stages for layer in stage.layers]
    for piece, layer in zip(pieces, flat, strict=True):
        piece.load_state_dict(layer.state_dict())
    cut.stages[0].embedding.load_state_dict(whole.stages[0].embedding.state_dict())
    cut.stages[-1].norm.load_state_dict(whole.stages[-1].norm.state_dict())
    cut.stages[-1].head.load_state_dict(whole.stages[-1].head.state_dict())
    assert torch.equal(cut(text()), whole(text()))


def test_cached_and_uncached_write_the_same_text() -> None:
    model, prompt = make_ar(), text(length=8)
    a = model.architecture
    known = prompt
    for _ in range(40):
        known = torch.cat([known, model(known)[:, -1:].argmax(dim=-1)], dim=1)
    caches = [new_caches(a.layers, a, 48) for _ in range(a.parts)]
    new, written = prompt, [prompt]
    for _ in range(40):
        new = model(new, caches)[:, -1:].argmax(dim=-1)
        written.append(new)
    assert torch.equal(torch.cat(written, dim=1), known)


def test_a_caches_size_is_known_before_it_is_made() -> None:
    a = make_ar().architecture
    caches = new_caches(3, a, 77)
    assert cache_bytes(3, a, 77) == sum(c.keys.nbytes + c.values.nbytes for c in caches)


LOAD = """
import sys
from pathlib import Path
from stages.host.parts import load_parts, plan_host
load_parts(plan_host(Path(sys.argv[1]), (0, 1)))
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_host_starts_without_torch_s_compiler(trained: Path, tmp_path: Path) -> None:
    for kind in ("chain", "ar"):
        (tmp_path / kind).symlink_to(trained / kind)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100).returncode == 0
