"""Checkpoints: what was saved is what is loaded, or nothing is loaded; and of the files no more than it takes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint.checkpoint import load_ar, load_chain, save_parts, write_manifest
from stages.checkpoint.gate import PROBE_INPUT, PROBE_OUTPUT, PROBE_TEXT
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.pipeline import ArModel
from tests.stages.checkpoints import ALL, Copy, load, part_file
from tests.stages.conftest import forge, make_ar


def test_weights_are_loaded_bit_for_bit(directory: Path, block: Block) -> None:
    (loaded,) = load_chain(directory)
    saved = block.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def test_an_ar_model_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    model = make_ar(parts=3)
    write_manifest(tmp_path, Manifest("ar", model.architecture, (None,) * 3, probe_text=PROBE_TEXT))
    save_parts(tmp_path, model.stages)
    loaded, saved = load_ar(tmp_path), model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    prompt = torch.tensor([list(b"A prompt")])
    assert torch.equal(loaded(prompt), model(prompt))


# Damage


@pytest.mark.parametrize(("part", "tensor"), [(1, PROBE_INPUT), (0, PROBE_OUTPUT)])
def test_a_removed_or_changed_probe_is_refused(checkpoint: Copy, part: int, tensor: str) -> None:
    directory = checkpoint("ar")
    forge(directory, part, lambda tensors: {**tensors, tensor: tensors[tensor].flip(0).contiguous()})
    with pytest.raises(CheckpointError, match=f"part {part} is refused"):
        load(directory, part)
    forge(directory, part, lambda tensors: {**tensors, tensor: tensors[tensor][:5].contiguous()})
    with pytest.raises(CheckpointError, match=rf"{tensor} has shape \(5, 32\)"):
        load(directory, part)
    forge(directory, part, lambda tensors: {k: v for k, v in tensors.items() if k != tensor})
    with pytest.raises(CheckpointError, match=f"{tensor} is missing, .*; fetch it again"):
        load(directory, part)


# A host reads its own part only
class OpenedFiles:
    """Every path that this process opens. An audit hook cannot be taken back, so it is silent when not asked."""

    paths: list[str] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.paths is not None:
            self.paths.append(str(arguments[0]))


@pytest.fixture(scope="module")
def opened_files() -> OpenedFiles:
    hook = OpenedFiles()
    sys.addaudithook(hook)
    return hook


@ALL
@pytest.mark.parametrize("part", [0, 1])
def test_only_the_file_of_the_part_is_opened(trained: Path, opened_files: OpenedFiles, name: str, part: int) -> None:
    opened_files.paths = seen = []
    load(trained / name, part)
    opened_files.paths = None
    touched = {Path(path).name for path in seen if str(trained) in path}
    assert touched == {MANIFEST_NAME, part_file(trained / name, part).name}


MEASURE = """
    import sys
    import torch
    from pathlib import Path
    from stages.checkpoint.checkpoint import load_stage

    torch.set_num_threads(1)

    def peak():
        (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    load_stage(Path(sys.argv[1]), 0)  # kernels, buffers and imports
    before = peak()
    stage = load_stage(Path(sys.argv[2]), 0)
    print(peak() - before)
"""


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    for name, width, layers in (("small", 256, 1), ("large", 512, 2)):
        a = Architecture(parts=1, layers=layers, width=width, context_length=32)
        write_manifest(tmp_path / name, Manifest("ar", a, (None,), probe_text=PROBE_TEXT))
        save_parts(tmp_path / name, ArModel(a).eval().stages)
    size = part_file(tmp_path / "large", 0).stat().st_size
    assert size > 25_000_000
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), tmp_path / "small", tmp_path / "large"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_NUM_THREADS": "1"}
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(measured.stdout) < 1.3 * size
