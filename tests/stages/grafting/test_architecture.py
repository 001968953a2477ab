import json
from dataclasses import asdict
from pathlib import Path

import pytest

from onesweep.stages.checkpoint.checkpoint import write_manifest
from onesweep.stages.checkpoint.gate import PROBE_TEXT
from onesweep.stages.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from onesweep.stages.errors import CheckpointError, ShapeError
from onesweep.stages.grafting.block import GraftArchitecture, SlotShape
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.partition import equal_probability
from tests.stages.model.tiny_llama import TINY

SHAPE = SlotShape(code_dim=8, condition_dim=8, rank=2)
BYTES = Architecture(3, 1, 16, 2, 32)


@pytest.mark.parametrize("base", [TINY, BYTES], ids=["tokens", "bytes"])
def test_a_record_gives_the_architecture_back(base: Architecture) -> None:
    graft = GraftArchitecture(base, SHAPE)
    assert GraftArchitecture.from_record(json.loads(json.dumps(asdict(graft)))) == graft
    assert (graft.parts, graft.width, graft.vocabulary) == (base.parts, base.width, base.vocabulary)
    assert [graft.layers_in(i) for i in range(3)] == [base.layers_in(i) for i in range(3)]


@pytest.mark.parametrize("field", ["code_dim", "condition_dim", "rank"])
@pytest.mark.parametrize("value", [-1, 1.5, True, 1 << 20])
def test_sizes_that_cannot_be_are_refused(field: str, value: object) -> None:
    with pytest.raises(ShapeError, match=f"{field} must be a whole number"):
        SlotShape(**{**asdict(SHAPE), field: value})


def manifest() -> Manifest:
    partition = equal_probability(3, 0.1, 3.0)
    return Manifest("chain", GraftArchitecture(BYTES, SHAPE), (None,) * 3, partition=partition, probe_text=PROBE_TEXT)


def test_a_manifest_gives_itself_back(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()
    assert read_manifest(tmp_path).digest() == manifest().digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ar"}, "a chain of blocks, not an AR pipeline"),
        ({"tokenizer": "tokens"}, "'probe_tokens' is missing"),
        ({"architecture": {**asdict(GraftArchitecture(BYTES, SHAPE)), "family": "grafts"}}, "damaged"),
        ({"architecture": {"family": "graft", "base": asdict(BYTES)}}, "'shape' is missing"),
        ({"partition": {**asdict(equal_probability(2, 0.1, 3.0))}}, "3 boundaries for 3 noise ranges"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_manifest(tmp_path, manifest())
    record = json.loads((tmp_path / MANIFEST_NAME).read_text())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**record, **change}))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)
