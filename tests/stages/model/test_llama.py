"""Checkpoints of pretrained models: the manifest, and the gate."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.backends.packed_llama import packed_stage
from stages.backends.runner_checks import load_runner
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.inspect import describe, verify
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.errors import CheckpointError
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from tests.stages.model.tiny_llama import OPTIONS, PROBE, TINY, write_tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tiny(tmp_path)
    return tmp_path


def change(directory: Path, **changes: Any) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("architecture", [TINY, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_a_saved_model_is_loaded_unchanged(tmp_path: Path, architecture: LlamaArchitecture) -> None:
    saved = write_tiny(tmp_path, architecture)
    manifest = read_manifest(tmp_path)
    assert manifest.architecture == architecture
    assert json.loads(manifest.to_json())["architecture"]["family"] == "llama"
    for stage in saved:
        loaded = load_stage(tmp_path, stage.index)
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert all(check.ok for check in verify(tmp_path))
    assert "tokens" in describe(tmp_path)


def test_a_single_stage_with_a_tied_head_stores_one_matrix(tmp_path: Path) -> None:
    for parts, layers in (("one", (3,)), ("two", (2, 1))):
        write_tiny(tmp_path / parts, replace(TINY, layers=layers, tied_head=True))
    one, two = (read_manifest(tmp_path / parts).parts for parts in ("one", "two"))
    matrix = 4 * TINY.vocabulary * TINY.width
    assert sum(part.bytes for part in two if part) - sum(part.bytes for part in one if part) > matrix
    stage = load_stage(tmp_path / "one", 0)
    assert stage.head.weight is stage.embedding.weight
    assert stage.to(torch.bfloat16).head.weight.dtype == torch.bfloat16
    assert all(check.ok for check in verify(tmp_path / "one"))


def test_unused_options_are_not_written(directory: Path) -> None:
    """Checkpoints from before there were options keep their digest."""
    names = "layers width heads kv_heads head_dim mlp_width positions vocabulary norm_epsilon rope_theta rope_scaling"
    written = json.loads((directory / MANIFEST_NAME).read_text())["architecture"]
    assert written.keys() == {*names.split(), "tied_head", "attention_bias", "family"}
    files = {"tokenizer.json": "0" * 64}
    manifest = Manifest("ar", TINY, (None,) * 3, probe_text=PROBE, tokenizer="tokens", probe_tokens=(1, 2), files=files)
    assert manifest.digest() == "d7b1860fb0d08f5c5df6e5f5a02d2ffb5a609996354e5e4c815883b48dfc18fd"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qk_norm": "row"}, "qk_norm must be one of none, head, projection, not 'row'"),
        ({"logit_softcap": 0}, "logit_softcap must be a number from 0.001 to 1e.06, not 0"),
        ({"rotary_dim": 7}, r"rotary_dim 7 must be even"),
        ({"rotary_dim": 14}, r"rotary_dim must be a whole number from 2 to 12, not 14"),
        ({"window": {"size": 5, "layers": [4]}}, "window lists layer 4, over 3"),
        ({"window": {"size": 5, "layers": [1, 0]}}, "must list each sliding layer once, in order"),
        ({"window": {"size": 1 << 40, "layers": [1]}}, "window: size must be a whole number from 1 to 4194304"),
        ({"experts": {"count": 4, "used": 5, "normalised": True}}, "experts: used must be a whole number from 1 to 4"),
        ({"experts": {"count": 9000, "used": 5, "normalised": True}}, "36000 experts in all layers; the limit is 32"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling: factor must be a number from 0.01 to 10000, not 0"),
    ],
)
def test_an_invalid_option_is_refused(directory: Path, changes: dict[str, Any], sentence: str) -> None:
    record = json.loads((directory / MANIFEST_NAME).read_text())["architecture"]
    change(directory, architecture=record | changes)
    with pytest.raises(CheckpointError, match=sentence):
        read_manifest(directory)


def test_the_digest_depends_on_the_tokenizer(directory: Path) -> None:
    before = read_manifest(directory).digest()
    change(directory, files={"tokenizer.json": "0" * 64})
    assert read_manifest(directory).digest() != before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer": "bytes"}, "tokenizer 'bytes' has 256 tokens, the architecture 300"),
        ({"probe_tokens": [1]}, "must have 2 to"),
        ({"probe_tokens": [1, 300]}, "whole numbers from 0 to 299"),
        ({"files": {}}, "list tokenizer.json"),
        ({"files": {"tokenizer.json": "0" * 64, "../x": "0" * 64}}, "must be a plain name"),
        ({"files": {"tokenizer.json": "no"}}, "needs its SHA-256"),
        ({"kind": "chain"}, "not a chain of blocks"),
    ],
)
def test_a_contradictory_manifest_is_refused(directory: Path, changes: dict[str, Any], sentence: str) -> None:
    change(directory, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        read_manifest(directory)


def test_weights_of_another_architecture_are_refused_by_the_probe(directory: Path) -> None:
    """The architecture's numbers that no shape betrays."""
    record = json.loads((directory / MANIFEST_NAME).read_text())["architecture"]
    for name, value in (("rope_theta", 100.0), ("norm_epsilon", 0.1)):
        change(directory, architecture=record | {name: value})
        for load in (load_stage, partial(load_runner, compute=packed_stage)):
            with pytest.raises(CheckpointError, match=r"part 0 is refused.*ln\(300\) = 5.704"):
                load(directory, 0)


def test_the_probe_measures_the_served_runner(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaStage, "read", None)  # the module of a large stage takes seconds
    assert [load_runner(directory, i, packed_stage).reader.kv_heads for i in range(2)] == [2, 2]
