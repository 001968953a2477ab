"""The second release of a swap."""

from __future__ import annotations

from pathlib import Path

from loadtest.chaos.second import make_second, second_problem
from serving.frontier import read_frontier
from serving.shipped import SHIPPED
from stages.bundle import FRONTIER_NAME, find_bundle
from stages.manifest import read_manifest


def test_pipelines_change_places_and_the_frontier_follows(tmp_path: Path) -> None:
    assert second_problem(SHIPPED) == ""
    second = make_second(SHIPPED, tmp_path / "second")
    bundle, before = find_bundle(second), find_bundle(SHIPPED)
    assert before.ar is not None
    assert bundle.scorer is not None
    assert read_manifest(bundle.scorer) == read_manifest(before.ar)
    first, exchanged = (read_frontier(directory / FRONTIER_NAME) for directory in (SHIPPED, second))
    assert exchanged.options == first.options
    served = {"ar": first.weights["scorer"], "scorer": first.weights["ar"], "chain": first.weights["chain"]}
    assert exchanged.problem(served) == ""
    assert first.problem(served) != ""


def test_a_bundle_without_two_pipelines_has_no_second(bundle: Path) -> None:
    assert "they change places" in second_problem(bundle)
