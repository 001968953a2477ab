"""Outputs that were frozen are still the same: texts byte for byte, digests bit for bit.

`python -m tests.oracles.freeze` writes them again after an intended change.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracles import record, rig
from tests.oracles.rig import Ring

SHARE = 0.1
"""This share of the texts may differ on a processor that rounds otherwise: few draws fall between two roundings."""


@pytest.fixture(scope="module")
def weights() -> Iterator[Path]:
    with rig.weights() as directory:
        yield directory


@pytest.fixture(scope="module")
def usual(weights: Path) -> Iterator[Ring]:
    with rig.ring(weights, 3) as ring:
        yield ring


def check(name: str, found: dict[str, Any]) -> None:
    old, exact = record.frozen(name)
    assert record.differences(old, record.plain(found), exact) == []


def check_texts(found: dict[str, str]) -> None:
    old, exact = record.frozen("texts")
    assert found.keys() <= old.keys()
    changed = [f"{key}: {old[key]} became {text}" for key, text in found.items() if text != old[key]]
    assert len(changed) <= (0 if exact else SHARE * len(found)), changed


@pytest.mark.parametrize("turn", range(len(record.OTHERS)), ids=record.OTHERS.keys())
def test_texts_are_the_frozen_ones_on_other_topologies(weights: Path, turn: int) -> None:
    with rig.ring(weights, *list(record.OTHERS.values())[turn]) as ring:
        check_texts(record.texts(ring, turn))


def test_texts_are_the_frozen_ones(usual: Ring) -> None:
    found = record.texts(usual)
    assert found.keys() == record.frozen("texts")[0].keys()
    check_texts(found)


@pytest.mark.parametrize(("name", "recorded"), [("scoring", record.scoring), ("wire", record.wire)])
def test_scores_verdicts_choices_and_hops_are_the_frozen_ones(usual: Ring, name: str, recorded: Any) -> None:
    check(name, recorded(usual))


def test_commands_print_the_frozen_json(usual: Ring, tmp_path: Path) -> None:
    check("commands", record.commands(usual, tmp_path))


def test_training_gives_the_frozen_weights(tmp_path: Path) -> None:
    check("training", record.training(tmp_path))


def test_a_changed_record_is_found() -> None:
    old, _ = record.frozen("training")
    new = record.plain(old)
    assert record.differences(old, new, exact=True) == []
    part = next(iter(new["chain"].values()))
    part["sha256"] = "0" * 64
    assert len(record.differences(old, new, exact=True)) == 1
    assert record.differences(old, new, exact=False) == []
    part["norms"][0] += 0.1
    assert len(record.differences(old, new, exact=False)) == 1
