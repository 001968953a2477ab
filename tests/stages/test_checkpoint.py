"""Checkpoints: what was saved is what is loaded, or nothing is loaded; and saving never costs what was saved before."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.ar import ArModel, ArStage, new_caches
from stages.architecture import Architecture
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.block import Block
from stages.checkpoint import (
    load_ar,
    load_block,
    load_chain,
    load_stage,
    replace_file,
    save_ar,
    save_block,
    update_manifest,
    write_manifest,
)
from stages.codec import Int8
from stages.codes import Codes
from stages.errors import CheckpointError
from stages.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.partition import NoisePartition
from stages.probe import PROBE_INPUT, PROBE_OUTPUT, PROBE_TEXT
from stages.sweep import BlockWork, Boundary, SweepPlan, run_alone

Copy = Callable[[str], Path]
Forge = Callable[[Path, int, Callable[[dict[str, Tensor]], dict[str, Tensor]]], None]
EditManifest = Callable[[Path, Callable[[dict[str, Any]], object]], None]
ALL = pytest.mark.parametrize("name", ["chain", "chained", "ar"])


def load(directory: Path, part: int) -> Block | ArStage:
    return load_stage(directory, part) if directory.name == "ar" else load_block(directory, part)


def part_file(directory: Path, part: int) -> Path:
    (path,) = directory.glob(f"*-{part}-*.safetensors")
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# Round trips


@pytest.fixture
def block(make_block: Callable[..., Block]) -> Block:
    return make_block(parts=1)


@pytest.fixture
def directory(tmp_path: Path, block: Block) -> Path:
    """A checkpoint of one random block."""
    partition = NoisePartition("uniform", (8.0, 0.2))
    manifest = Manifest("chain", block.architecture, (None,), Codes(0, 8), partition, PROBE_TEXT)
    write_manifest(tmp_path / "chain", manifest)
    save_block(tmp_path / "chain", block)
    return tmp_path / "chain"


def sweep(chain: list[Block], partition: NoisePartition) -> bytes:
    plan, result = SweepPlan(1, 7, 24, 4, 0.9), None
    for block in chain:
        a = block.architecture
        work = BlockWork(a, block.index, partition, new_caches(a.layers, a, 96), plan, Int8(), b"A rider", result)
        result = run_alone(work, backend_named(DEFAULT_BACKEND).block(block))
        assert isinstance(result, Boundary | bytes)
    assert isinstance(result, bytes)
    return result


def test_weights_come_back_bit_for_bit_and_write_the_same_text(directory: Path, block: Block) -> None:
    (loaded,) = load_chain(directory)
    saved = block.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training
    partition = read_manifest(directory).partition
    assert sweep([loaded], partition) == sweep([block], partition)


def test_an_ar_model_comes_back_bit_for_bit(tmp_path: Path, make_ar: Callable[..., ArModel]) -> None:
    model = make_ar(parts=3)
    write_manifest(tmp_path, Manifest("ar", model.architecture, (None,) * 3, probe_text=PROBE_TEXT))
    save_ar(tmp_path, model)
    loaded, saved = load_ar(tmp_path), model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    prompt = torch.tensor([list(b"A prompt")])
    assert torch.equal(loaded(prompt), model(prompt))


@ALL
def test_every_part_loads(trained: Path, name: str) -> None:
    assert read_manifest(trained / name).complete
    for part in range(2):
        assert load(trained / name, part).index == part


def test_saving_again_replaces_the_file(directory: Path, block: Block) -> None:
    old = part_file(directory, 0)
    block.clean_head.bias[0] += 1
    save_block(directory, block)
    assert part_file(directory, 0).name != old.name
    assert float(load_block(directory, 0).clean_head.bias[0]) == float(block.clean_head.bias[0])
    save_block(directory, block)
    assert load_block(directory, 0).index == 0
    assert len(files(directory)) == 2


# Damage


@ALL
def test_flipped_bits_anywhere_in_the_file(checkpoint: Copy, name: str) -> None:
    directory = checkpoint(name)
    path = part_file(directory, 1)
    whole = path.read_bytes()
    for place in (0, 8, 40, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="SHA-256"):
            load(directory, 1)


@ALL
def test_a_file_cut_off_or_gone(checkpoint: Copy, name: str) -> None:
    directory = checkpoint(name)
    path = part_file(directory, 0)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="fetch it again"):
        load(directory, 0)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        load(directory, 0)


@ALL
def test_a_tensor_of_another_shape(checkpoint: Copy, forge: Forge, name: str) -> None:
    directory = checkpoint(name)
    tensor = "layers.0.qkv.weight"
    forge(directory, 0, lambda tensors: {**tensors, tensor: tensors[tensor].T.contiguous()})
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv\.weight has shape \(32, 96\), .* \(96, 32\)"):
        load(directory, 0)


@ALL
def test_a_tensor_too_few_or_too_many(checkpoint: Copy, forge: Forge, name: str) -> None:
    directory = checkpoint(name)
    forge(directory, 0, lambda tensors: {k: v for k, v in tensors.items() if k != "layers.1.mlp_in.weight"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp_in\.weight has shape none"):
        load(directory, 0)
    forge(directory, 1, lambda tensors: {**tensors, "spare": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"spare has shape .* asks for none"):
        load(directory, 1)


@pytest.mark.parametrize(
    ("name", "part", "tensor"), [("chained", 1, PROBE_INPUT), ("ar", 1, PROBE_INPUT), ("ar", 0, PROBE_OUTPUT)]
)
def test_a_probe_that_was_taken_out_or_bent(checkpoint: Copy, forge: Forge, name: str, part: int, tensor: str) -> None:
    directory = checkpoint(name)
    forge(directory, part, lambda tensors: {**tensors, tensor: tensors[tensor].flip(0).contiguous()})
    with pytest.raises(CheckpointError, match=f"part {part} is refused"):
        load(directory, part)
    forge(directory, part, lambda tensors: {**tensors, tensor: tensors[tensor][:5].contiguous()})
    with pytest.raises(CheckpointError, match=rf"{tensor} has shape \(5, 32\)"):
        load(directory, part)
    forge(directory, part, lambda tensors: {k: v for k, v in tensors.items() if k != tensor})
    with pytest.raises(CheckpointError, match=f"{tensor} has shape none"):
        load(directory, part)


@ALL
def test_weights_that_are_not_finite(checkpoint: Copy, forge: Forge, name: str) -> None:
    """Also where no byte of the probe text would ever meet them."""
    directory = checkpoint(name)

    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["embedding.weight"][255, 3] = math.nan
        return tensors

    forge(directory, 0, poison)
    with pytest.raises(CheckpointError, match=r"embedding\.weight holds numbers that are not finite"):
        load(directory, 0)


@pytest.mark.parametrize("part", [-1, 2, 100])
def test_a_part_that_does_not_exist(trained: Path, part: int) -> None:
    for name in ("chain", "ar"):
        with pytest.raises(CheckpointError, match=f"has parts 0 to 1; there is no part {part}"):
            load(trained / name, part)


def test_a_part_that_is_not_trained(checkpoint: Copy, edit_manifest: EditManifest) -> None:
    directory = checkpoint("chain")
    edit_manifest(directory, lambda record: record["parts"].__setitem__(1, None))
    with pytest.raises(CheckpointError, match=r"part 1 of .* is not trained yet"):
        load_block(directory, 1)
    assert load_block(directory, 0).index == 0


def test_the_two_kinds_are_told_apart(trained: Path) -> None:
    with pytest.raises(CheckpointError, match="holds an AR model, not a chain"):
        load_block(trained / "ar", 0)
    with pytest.raises(CheckpointError, match="holds a chain of blocks, not an AR model"):
        load_stage(trained / "chain", 0)


# The gate: digests and shapes fit, but the weights do not mean what they should


def swapped_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {other.get(name[:9], name[:9]) + name[9:]: tensor for name, tensor in tensors.items()}


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A square matrix stored the other way round, as between two frameworks' conventions."""
    name = "layers.1.attention_out.weight"
    return {**tensors, name: tensors[name].T.contiguous()}


def rolled_qkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values in another order."""
    return {k: v.roll(32, 0).contiguous() if k.endswith("qkv.weight") else v for k, v in tensors.items()}


def untrained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {k: v if k.startswith("probe.") else 0.02 * torch.randn(v.shape) for k, v in tensors.items()}


@ALL
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("mapping", [swapped_layers, transposed, rolled_qkv, untrained])
def test_weights_in_the_wrong_place_are_refused(
    checkpoint: Copy, forge: Forge, name: str, part: int, mapping: Callable[..., dict[str, Tensor]]
) -> None:
    directory = checkpoint(name)
    recorded = read_manifest(directory).parts[part].probe
    forge(directory, part, mapping)
    with pytest.raises(CheckpointError, match=f"part {part} is refused") as refusal:
        load(directory, part)
    message = str(refusal.value)
    assert "ln(256) = 5.545" in message
    measure = next(name for name in recorded if name in message)
    assert f"the manifest recorded {recorded[measure]:.4f}" in message
    assert load(directory, 1 - part).index == 1 - part


@ALL
@pytest.mark.parametrize("change", [0.05, -0.05, 1e300])
def test_a_recorded_loss_that_is_not_met(
    checkpoint: Copy, edit_manifest: EditManifest, name: str, change: float
) -> None:
    directory = checkpoint(name)
    probe = read_manifest(directory).parts[1].probe
    for measure, value in probe.items():
        edit_manifest(directory, lambda r, m=measure, v=value: r["parts"][1]["probe"].update({m: v + change}))
        with pytest.raises(CheckpointError, match=f"{measure} on the probe text"):
            load(directory, 1)
        edit_manifest(directory, lambda record, m=measure, v=value: record["parts"][1]["probe"].update({m: v}))
    assert load(directory, 1).index == 1


@ALL
def test_a_gate_without_measures_lets_nothing_through(checkpoint: Copy, edit_manifest: EditManifest, name: str) -> None:
    directory = checkpoint(name)
    edit_manifest(directory, lambda record: record["parts"][0].update(probe={}))
    with pytest.raises(CheckpointError, match="recorded nan"):
        load(directory, 0)


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
def test_no_other_parts_file_is_opened(trained: Path, opened_files: OpenedFiles, name: str, part: int) -> None:
    opened_files.paths = seen = []
    load(trained / name, part)
    opened_files.paths = None
    touched = {Path(path).name for path in seen if str(trained) in path}
    assert touched == {MANIFEST_NAME, part_file(trained / name, part).name}


@ALL
@pytest.mark.parametrize("part", [0, 1])
def test_no_other_parts_file_is_needed(checkpoint: Copy, name: str, part: int) -> None:
    directory = checkpoint(name)
    part_file(directory, 1 - part).unlink()
    assert load(directory, part).index == part


MEASURE = """
    import sys
    import torch
    from pathlib import Path
    from stages.checkpoint import load_stage

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
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    for name, width, layers in (("small", 256, 1), ("large", 512, 4)):
        a = Architecture(parts=1, layers=layers, width=width, context_bytes=32)
        write_manifest(tmp_path / name, Manifest("ar", a, (None,), probe_text=PROBE_TEXT))
        save_ar(tmp_path / name, ArModel(a).eval())
    size = part_file(tmp_path / "large", 0).stat().st_size
    assert size > 50_000_000
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), tmp_path / "small", tmp_path / "large"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(measured.stdout) < 1.3 * size


# Saving


def test_saving_needs_a_manifest(tmp_path: Path, block: Block, make_ar: Callable[..., ArModel]) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            save_block(directory, block)
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            save_ar(directory, make_ar())
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            update_manifest(directory, lambda manifest: manifest)


def test_a_manifest_makes_its_directory(tmp_path: Path) -> None:
    manifest = Manifest("ar", Architecture(parts=1), (None,), probe_text=PROBE_TEXT)
    write_manifest(tmp_path / "a" / "b", manifest)
    assert read_manifest(tmp_path / "a" / "b") == manifest
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot make the directory"):
            write_manifest(place, manifest)


def test_a_file_cannot_be_saved_where_there_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save"):
        replace_file(tmp_path / "nowhere" / "file", lambda path: path.write_text("text"))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fail(path: Path) -> None:
        path.write_text("new, cut off")
        raise OSError(28, "No space left on device")

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(CheckpointError, match=r"No space left.*free some space"):
        replace_file(tmp_path / "file", fail)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "file", interrupt)
    assert files(tmp_path) == {"file": b"old"}


def test_a_manifest_that_cannot_be_written_leaves_no_orphan(
    directory: Path, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(directory)

    def fail(*_: object) -> None:
        raise CheckpointError("cannot save the manifest")

    monkeypatch.setattr("stages.checkpoint.write_manifest", fail)
    with pytest.raises(CheckpointError, match="cannot save the manifest"):
        save_block(directory, block)  # the same weights, so the same file
    assert files(directory) == before
    block.clean_head.bias[0] += 1
    with pytest.raises(CheckpointError, match="cannot save the manifest"):
        save_block(directory, block)
    assert files(directory) == before


def test_what_a_killed_process_left_is_cleared_away(checkpoint: Copy) -> None:
    directory = checkpoint("chain")
    others = files(directory).keys() - {part_file(directory, 0).name}
    of_another = "block-10-0123456789ab.safetensors"
    for name in ("block-0-0123456789ab.safetensors", ".block-0.safetensors.k1ll3d", of_another):
        (directory / name).write_bytes(b"left over")
    save_block(directory, load_block(directory, 0))
    assert files(directory).keys() == {*others, part_file(directory, 0).name, of_another}


def test_workers_on_one_directory_lose_nothing_of_each_other(directory: Path) -> None:
    def work(worker: int) -> None:
        for step in range(8):
            update_manifest(
                directory, lambda m, key=f"{worker}-{step}": replace(m, metrics={**m.metrics, key: {"nats": 1.0}})
            )

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_manifest(directory).metrics) == 32


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_a_save_that_does_not_fit(directory: Path, block: Block) -> None:
    before = files(directory)
    block.clean_head.bias[0] += 1
    with pytest.raises(CheckpointError, match="what was saved before is untouched"):
        save_block(directory, block)
    assert files(directory) == before
    assert float(load_block(directory, 0).clean_head.bias[0]) == pytest.approx(float(block.clean_head.bias[0]) - 1)


def test_a_file_too_large_for_the_file_system(directory: Path, block: Block) -> None:
    with file_size_limit(part_file(directory, 0).stat().st_size // 2):
        check_a_save_that_does_not_fit(directory, block)
    save_block(directory, block)
    assert float(load_block(directory, 0).clean_head.bias[0]) == float(block.clean_head.bias[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, directory: Path, block: Block) -> None:
    place = small_disk / "chain"
    write_manifest(place, replace(read_manifest(directory), parts=(None,)))
    save_block(place, block)
    room = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_bsize - 50_000))
    check_a_save_that_does_not_fit(place, block)
    (small_disk / "ballast").unlink()
    save_block(place, block)
    assert float(load_block(place, 0).clean_head.bias[0]) == float(block.clean_head.bias[0])
