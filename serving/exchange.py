"""What an exchange of weights changed, model by model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serving.trial import expected_nats
from serving.v1 import router_pb2
from stages.bundle import find_bundle
from stages.contents import FOLDERS
from stages.errors import CheckpointError
from stages.manifest import Manifest, read_manifest


def exchanged(before: Path | None, after: Path | None, measured: Mapping[str, float]) -> list[router_pb2.ModelSwitch]:
    """A row for each folder that either bundle has.

    :param before, after: bundles; None where only the hosts know.
    :param measured: nats a byte on the probe text through the hosts, by folder.
    """
    old, new = _manifests(before), _manifests(after)
    return [
        router_pb2.ModelSwitch(
            folder=folder,
            digest=new[folder].digest() if folder in new else "",
            previous_digest=old[folder].digest() if folder in old else "",
            probe_nats=expected_nats(new[folder]) if folder in new else None,
            previous_probe_nats=expected_nats(old[folder]) if folder in old else None,
            measured_nats=measured.get(folder),
            valid_bits=_valid_bits(new.get(folder)),
            previous_valid_bits=_valid_bits(old.get(folder)),
        )
        for folder in FOLDERS
        if folder in old or folder in new
    ]


def _manifests(bundle: Path | None) -> dict[str, Manifest]:
    try:
        paths = vars(find_bundle(bundle)) if bundle else {}
        return {folder: read_manifest(path) for folder, path in paths.items() if path is not None}
    except CheckpointError:  # it was there when it was started
        return {}


def _valid_bits(manifest: Manifest | None) -> float | None:
    """Loss on validation text: of the whole, or of the last block."""
    found = [row.get("valid_next_byte_bits") for row in manifest.metrics.values()] if manifest else []
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    return numbers[-1] if numbers else None
