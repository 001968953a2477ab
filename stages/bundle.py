"""A bundle: the checkpoints that are served together, `chain/`, `ar/` and `local/` in one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.errors import CheckpointError
from stages.manifest import MANIFEST_NAME, Manifest, read_manifest


@dataclass(frozen=True)
class Bundle:
    """Where each model of a bundle is; None for one that is not there."""

    chain: Path | None
    ar: Path | None
    local: Path | None


def find_bundle(directory: Path) -> Bundle:
    """The models in `directory`: a bundle, or a single checkpoint of either kind.

    Raises CheckpointError when there is neither.
    """
    if (directory / MANIFEST_NAME).exists():
        kind = read_manifest(directory).kind
        return Bundle(directory if kind == "chain" else None, directory if kind == "ar" else None, None)
    found = {name: directory / name for name in ("chain", "ar", "local") if (directory / name / MANIFEST_NAME).exists()}
    if not found:
        raise CheckpointError(
            f"no checkpoint in {directory}: it has neither {MANIFEST_NAME} nor one in chain/, ar/ or local/"
        )
    return Bundle(found.get("chain"), found.get("ar"), found.get("local"))


def check_split(chain: Manifest | None, ar: Manifest | None) -> int:
    """How many parts hosts can share out: blocks and AR stages go together, so their counts must be equal."""
    counts = {manifest.architecture.parts for manifest in (chain, ar) if manifest is not None}
    if len(counts) != 1:
        raise CheckpointError(
            f"the chain and the AR model are cut into different numbers of parts ({sorted(counts)}); "
            "train the AR model with --stages equal to the number of blocks"
        )
    return counts.pop()
