"""The report of `inspect` about a checkpoint, and the damage that it finds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.cli.__main__ import main
from stages.checkpoint.checkpoint import load_block, load_stage
from stages.checkpoint.inspect import describe, record, verify
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from tests.stages.conftest import edit_manifest

Copy = Callable[[str], Path]


@pytest.fixture
def bundle(trained: Path, tmp_path: Path) -> Path:
    for name, source in (("chain", "chain"), ("ar", "ar"), ("scorer", "ar"), ("local", "ar")):
        shutil.copytree(trained / source, tmp_path / "bundle" / name)
    return tmp_path / "bundle"


def test_a_record_is_complete_and_can_be_written_as_json(trained: Path) -> None:
    (model,) = json.loads(json.dumps(record(trained / "chain"))).values()
    manifest = read_manifest(trained / "chain")
    assert model["digest"] == manifest.digest()
    assert model["untrained"] == []
    sizes = [sum(p.numel() for p in load_block(trained / "chain", i).parameters()) for i in range(2)]
    assert [part["parameters"] for part in model["parts"]] == sizes
    assert model["parameters"] == sum(sizes)
    assert all(part["here"] for part in model["parts"])
    written = json.loads((trained / "chain" / "manifest.json").read_text())
    assert written.keys() <= model.keys()
    assert model["metrics"] == written["metrics"]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("chain", {"code_dim": 1 << 20}, "the limit is 16777216"),
        ("chain", {"code_dim": 1 << 12}, "the limit is 16777216"),
        ("chain", {"condition_dim": 1 << 20}, "asks for weights of at least .*; fetch both again"),
        ("chain", {"context_length": 1 << 20}, "and context tables of"),
        ("ar", {"context_length": 1 << 20, "heads": 1}, "and context tables of"),
        ("ar", {"width": 1 << 15}, "asks for weights of at least"),
        ("ar", {"parts": 1025}, "the limit is 1024"),
    ],
)
def test_absurd_sizes_are_refused_before_they_take_time_or_memory(
    bundle: Path, name: str, sizes: dict[str, int], message: str
) -> None:
    path = bundle / name / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["architecture"].update(sizes)
    (manifest["codes"] or {})["dim"] = manifest["architecture"]["code_dim"]
    manifest["parts"] += [None] * (manifest["architecture"]["parts"] - len(manifest["parts"]))
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        record(bundle / name)
    with pytest.raises(CheckpointError, match=message):
        (load_block if name == "chain" else load_stage)(bundle / name, 0)


def test_a_description_has_every_field(trained: Path) -> None:
    text, manifest = describe(trained / "chain"), read_manifest(trained / "chain")
    parts = [part for part in manifest.parts if part]
    expected = [
        manifest.digest(),
        "width 32",
        "context own",
        *(part.sha256[:12] for part in parts),
        *(f"{part.bytes:,}" for part in parts),
        *(f"next_byte_nats {part.probe['next_byte_nats']:.4g}" for part in parts),
        manifest.codes.digest()[:12],
        "boundaries 8 1 0.2, kind equal_entropy",
        "train_bytes 256",
        "steps 40",
        "valid_next_byte_nats 2.5",
        "bytes",
    ]
    assert [word for word in expected if word not in text] == []
    assert max(map(len, text.splitlines())) < 180


def test_missing_files_and_weights_are_reported(checkpoint: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint("chain")
    edit_manifest(directory, lambda r: r["parts"].__setitem__(1, None))
    (path,) = directory.glob("block-0-*")
    path.unlink()
    text = describe(directory)
    assert "no: blocks 1 have no weights yet" in text
    assert f"{path.name} (missing)" in text
    checks = verify(directory)
    assert [check.ok for check in checks] == [False, False]
    assert "is missing; fetch it again" in str(checks[0])
    assert "has no weights yet" in str(checks[1])
    assert main(["inspect", str(directory), "--verify"]) == 1
    assert capsys.readouterr().out.endswith("\n2 of 2 checks failed\n")


def test_a_whole_bundle_is_verified(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = verify(bundle)
    assert all(check.ok for check in checks)
    assert [str(check) for check in checks] == [
        f"{name} part {part}: ok" for name in ("chain", "ar", "scorer", "local") for part in (0, 1)
    ]
    assert main(["inspect", str(bundle), "--verify"]) == 0
    assert capsys.readouterr().out.endswith("\nall 8 passed\n")


@pytest.mark.parametrize("look", [record, describe, verify])
def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path, look: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        look(tmp_path)
