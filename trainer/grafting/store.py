"""A directory of what was grafted: graft.json, the codes, and one safetensors file for each trained block."""

# The pretrained weights stay in their own checkpoint, which is named by its digest. Nothing is ever unpickled.

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from onesweep.stages.checkpoint.checkpoint import file_digest, replace_file
from onesweep.stages.checkpoint.manifest import read_json
from onesweep.stages.checkpoint.weights import read_weights, write_weights
from onesweep.stages.errors import CheckpointError, InputError
from onesweep.stages.grafting.block import SlotShape
from onesweep.stages.model.partition import LogNormalPrior, NoisePartition
from onesweep.stages.settings import check
from onesweep.trainer.blocks.state import exclusive

NAME, CODES_NAME, LENSES_NAME = "graft.json", "codes.safetensors", "lenses.safetensors"
TABLE = "table"

# `slots`: only the weights of noisy slots, the pretrained ones stay frozen. `block`: the block's layers, too.
Trains = Literal["slots", "block"]
# The clean next-token loss is taken at the block's end, or at the model's, through the frozen stages after it.
AnchorHead = Literal["own", "last"]


@dataclass(frozen=True)
class GraftSettings:
    """The block to train, and which of its weights."""

    block: int
    trains: Trains = "slots"
    anchor_head: AnchorHead = "last"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class StoredFile:
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class StoredBlock:
    """A trained block."""

    settings: GraftSettings
    weights: StoredFile
    metrics: dict[str, float]


@dataclass(frozen=True)
class GraftRecord:
    """The contents of graft.json."""

    base: str  # digest of the pretrained checkpoint
    shape: SlotShape
    partition: NoisePartition
    codes: StoredFile
    lenses: StoredFile
    data: dict[str, Any]
    blocks: dict[int, StoredBlock] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_record(directory: Path) -> GraftRecord:
    """Raises CheckpointError where there is none, or it is damaged."""
    path = directory / NAME
    record = read_json(path, f"no graft in {directory}: {NAME} is missing")
    try:
        return _parse(record)
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from None


def write_record(directory: Path, record: GraftRecord) -> None:
    """Replace it as a whole. Raises CheckpointError."""
    replace_file(directory / NAME, lambda path: path.write_text(record.to_json(), encoding="utf-8"))


def write_table(directory: Path, name: str, table: Tensor) -> StoredFile:
    """A file of one tensor. Raises CheckpointError."""
    replace_file(directory / name, lambda path: write_weights(path, {TABLE: table}))
    return _stored(directory, name)


def read_table(directory: Path, stored: StoredFile, *shape: int) -> Tensor:
    """Raises CheckpointError unless the file is the one that was stored."""
    return read_weights(directory / stored.file, stored.bytes, stored.sha256, {TABLE: shape})[TABLE]


def add_block(directory: Path, settings: GraftSettings, module: nn.Module, metrics: dict[str, float]) -> GraftRecord:
    """Put a trained block into the directory, in place of what was there of it. Raises CheckpointError."""
    name = f"block-{settings.block}.safetensors"
    with exclusive(directory / ".graft.lock"):
        replace_file(directory / name, lambda path: write_weights(path, module.state_dict()))
        record = read_record(directory)
        blocks = {**record.blocks, settings.block: StoredBlock(settings, _stored(directory, name), metrics)}
        record = replace(record, blocks=blocks)
        write_record(directory, record)
    return record


def load_block_weights(directory: Path, stored: StoredBlock, module: nn.Module) -> None:
    """Fill `module`. Raises CheckpointError unless the file is the one that was stored."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    file = stored.weights
    module.load_state_dict(read_weights(directory / file.file, file.bytes, file.sha256, shapes))


def _stored(directory: Path, name: str) -> StoredFile:
    path = directory / name
    return StoredFile(name, file_digest(path), path.stat().st_size)


def _parse(record: dict[str, Any]) -> GraftRecord:
    partition = record["partition"]
    blocks = {
        int(index): StoredBlock(
            GraftSettings(**block["settings"]), _parse_file(block["weights"]), dict(block["metrics"])
        )
        for index, block in record["blocks"].items()
    }
    return GraftRecord(
        str(record["base"]),
        SlotShape(**record["shape"]),
        NoisePartition(
            partition["kind"],
            tuple(partition["boundaries"]),
            LogNormalPrior(**partition["prior"]),
            partition["overlap"],
        ),
        _parse_file(record["codes"]),
        _parse_file(record["lenses"]),
        dict(record["data"]),
        blocks,
    )


def _parse_file(record: dict[str, Any]) -> StoredFile:
    stored = StoredFile(**record)
    if Path(stored.file).name != stored.file or type(stored.bytes) is not int or not isinstance(stored.sha256, str):
        raise ValueError(f"file {stored.file!r} must be a plain name, with its size and SHA-256")
    return stored
