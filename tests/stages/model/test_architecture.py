"""Sizes that a model can have, and those that are refused by name."""

from dataclasses import asdict

import pytest

from onesweep.stages.errors import ShapeError
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.families import read_architecture


def test_the_default_is_a_model() -> None:
    assert Architecture().head_dim * Architecture().heads == Architecture().width


@pytest.mark.parametrize("name", ["parts", "layers", "width", "heads", "context_length", "code_dim", "condition_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, None, (1 << 20) + 1])
def test_a_size_must_be_a_sensible_whole_number(name: str, value: object) -> None:
    with pytest.raises(ShapeError, match=name):
        Architecture(**{name: value})


def test_a_place_in_a_row_has_16_bits() -> None:
    with pytest.raises(ShapeError, match="width must be a whole number from 1 to 65536"):
        Architecture(width=(1 << 16) + 8)


def test_more_layers_than_are_built_in_a_moment() -> None:
    with pytest.raises(ShapeError, match="layers must be a whole number from 1 to 1024"):
        Architecture(layers=1025)


def test_one_byte_of_context_is_too_little() -> None:
    with pytest.raises(ShapeError, match="context_length"):
        Architecture(context_length=1)
    assert Architecture(context_length=2).context_length == 2


@pytest.mark.parametrize(("width", "heads"), [(30, 4), (12, 12), (36, 4)])
def test_heads_must_divide_the_width_into_rotary_pairs(width: int, heads: int) -> None:
    with pytest.raises(ShapeError, match=f"width {width}.*heads {heads}"):
        Architecture(width=width, heads=heads)


def test_context_is_the_text() -> None:
    record = {**asdict(Architecture()), "context": "chained"}
    with pytest.raises(ShapeError, match="context must be 'own', not 'chained'"):
        read_architecture(record)
    assert read_architecture({**record, "context": "own"}) == Architecture()
