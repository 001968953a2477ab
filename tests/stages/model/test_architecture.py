"""Sizes that a model can have, and those that are refused by name."""

from dataclasses import asdict

import pytest

from stages.checkpoint.manifest import read_architecture
from stages.errors import ShapeError
from stages.model.architecture import Architecture


@pytest.mark.parametrize("name", ["parts", "layers", "width", "heads", "context_length", "code_dim", "condition_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, None, (1 << 20) + 1])
def test_a_size_must_be_a_whole_number_within_bounds(name: str, value: object) -> None:
    with pytest.raises(ShapeError, match=name):
        Architecture(**{name: value})


@pytest.mark.parametrize(("width", "heads"), [(30, 4), (12, 12), (36, 4)])
def test_heads_must_divide_the_width_into_rotary_pairs(width: int, heads: int) -> None:
    with pytest.raises(ShapeError, match=f"width {width}.*heads {heads}"):
        Architecture(width=width, heads=heads)


def test_only_the_context_own_is_accepted() -> None:
    record = {**asdict(Architecture()), "context": "chained"}
    with pytest.raises(ShapeError, match="context must be 'own', not 'chained'"):
        read_architecture(record)
    with pytest.raises(
        ShapeError, match=r"architecture: parts, layers, width, heads, .*, condition_dim, context missing"
    ):
        read_architecture({})
    assert read_architecture({**record, "context": "own"}) == Architecture()
