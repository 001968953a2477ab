"""A second release for swaps, from the models of the first: no training, and other texts in most modes."""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.bundle import find_bundle

EXCHANGED = {"ar": "scorer", "scorer": "ar"}


def second_problem(checkpoint: Path) -> str:
    """Why no second release can be made of a bundle; empty when one can."""
    bundle = find_bundle(checkpoint)
    return "" if bundle.ar and bundle.scorer else "a swap needs a bundle with ar/ and scorer/: they change places"


def make_second(checkpoint: Path, directory: Path) -> Path:
    """The bundle with its two pipelines in each other's place."""
    bundle = find_bundle(checkpoint)
    folders = {"chain": bundle.chain, "ar": bundle.ar, "scorer": bundle.scorer, "local": bundle.local}
    for name, source in folders.items():
        if source is not None:
            shutil.copytree(source, directory / EXCHANGED.get(name, name))
    return directory
