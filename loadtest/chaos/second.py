"""A second release for swaps, from the models of the first: no training, and other texts in most modes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from serving.frontier import read_frontier
from stages.bundle import FRONTIER_NAME, find_bundle

EXCHANGED = {"ar": "scorer", "scorer": "ar"}


def second_problem(checkpoint: Path) -> str:
    """Why no second release can be made of a bundle; empty when one can."""
    bundle = find_bundle(checkpoint)
    return "" if bundle.ar and bundle.scorer else "a swap needs a bundle with ar/ and scorer/: they change places"


def make_second(checkpoint: Path, directory: Path) -> Path:
    """The bundle with its two pipelines in each other's place. Raises InputError for a damaged frontier."""
    bundle = find_bundle(checkpoint)
    folders = {"chain": bundle.chain, "ar": bundle.ar, "scorer": bundle.scorer, "local": bundle.local}
    for name, source in folders.items():
        if source is not None:
            shutil.copytree(source, directory / EXCHANGED.get(name, name))
    if (frontier := checkpoint / FRONTIER_NAME).exists():
        _write_exchanged(frontier, directory / FRONTIER_NAME)
    return directory


def _write_exchanged(source: Path, target: Path) -> None:
    """A frontier for the exchanged weights: its figures are not theirs, but `auto` chooses by them all the same."""
    frontier = read_frontier(source)
    weights = {EXCHANGED.get(name, name): digest for name, digest in frontier.weights.items()}
    target.write_text(json.dumps(replace(frontier, weights=weights).to_record()), encoding="utf-8")
