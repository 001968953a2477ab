"""A bundle: the models that are served together, in one directory.

A text bundle has `chain/`, `ar/`, `scorer/` and `local/`; a picture bundle `chain/`, `steps/` and `local/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.errors import CheckpointError, MissingCheckpoint, exists
from stages.model.architecture import LlamaArchitecture

FRONTIER_NAME = "frontier.json"  # choices for mode `auto`; optional in a bundle


@dataclass(frozen=True)
class Bundle:
    """The directory of each model of a bundle; None if the model is missing."""

    chain: Path | None = None
    ar: Path | None = None
    scorer: Path | None = None
    local: Path | None = None
    steps: Path | None = None

    @property
    def models(self) -> dict[str, Path]:
        """The models of this bundle by their names."""
        return {name: path for name, path in vars(self).items() if path is not None}

    @property
    def for_hosts(self) -> bool:
        """True if hosts hold some of the models."""
        return any(name != "local" for name in self.models)


def find_bundle(directory: Path) -> Bundle:
    """The models in `directory`: a bundle, or a single checkpoint of either kind, which may contain local/.

    Raises MissingCheckpoint if there is neither.
    """
    if exists(directory / MANIFEST_NAME):
        found = {read_manifest(directory).kind: directory, "local": directory / "local"}
    else:
        found = {field.name: directory / field.name for field in fields(Bundle)}
    found = {name: path for name, path in found.items() if exists(path / MANIFEST_NAME)}
    if not found:
        raise MissingCheckpoint(
            f"no checkpoint in {directory}: it has neither {MANIFEST_NAME} nor one in chain/, ar/, scorer/, steps/ "
            "or local/; `onesweep import` makes one from a pretrained model"
        )
    return Bundle(**found)


def bundle_draws(directory: Path) -> bool:
    """True for models of pictures. Raises CheckpointError if there is no model."""
    return any(read_manifest(path).draws for path in find_bundle(directory).models.values())


def holds_copy(directory: Path) -> bool:
    """True if `local/` is the imported model next to it, in fewer bits. Raises CheckpointError as above."""
    bundle = find_bundle(directory)
    if bundle.ar is None or bundle.local is None:
        return False
    sizes = list[object]()
    for manifest in map(read_manifest, (bundle.ar, bundle.local)):
        if not isinstance(a := manifest.architecture, LlamaArchitecture):
            return False
        kept = {name: value for name, value in vars(a).items() if name not in ("layers", "weights", "eight_bits")}
        sizes.append((manifest.data, a.total_layers, kept))  # equal data means one file or folder
    return sizes[0] == sizes[1]


def check_split(manifests: Mapping[str, Manifest]) -> int:
    """Number of parts for hosts to share. A host holds equal indices of all models, so all must have the same number.

    manifests: of the models whose parts hosts hold, by name. Raises CheckpointError.
    """
    if not manifests:
        raise CheckpointError("no model here that hosts can serve: chain/, ar/, scorer/ and steps/ are all missing")
    if len({manifest.draws for manifest in manifests.values()}) != 1:
        raise CheckpointError("text and picture models share a directory: give each its own")
    counts = {name: manifest.architecture.parts for name, manifest in manifests.items()}
    if len(set(counts.values())) != 1:
        shown = ", ".join(f"{name} {parts}" for name, parts in counts.items())
        raise CheckpointError(
            f"the models are cut into different numbers of parts ({shown}); "
            "train each with as many stages as the chain has blocks"
        )
    return next(iter(counts.values()))
