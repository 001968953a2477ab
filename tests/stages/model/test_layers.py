"""Layers: positions, caches and masks."""

import math

import pytest
import torch
from torch import Tensor

from stages.model.layers import Layer, LayerCache, rotary_table, rotate

WIDTH, HEADS, CONDITION = 32, 2, 16
HEAD_DIM = WIDTH // HEADS


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    made = Layer(WIDTH, HEADS, CONDITION)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Positions
def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    x, table = random(1, 1, 6, 8), rotary_table(6, 8)
    turned = rotate(x, table)
    for position in range(6):
        for pair in range(4):
            angle = position * 10000 ** (-2 * pair / 8)
            left, right = float(x[0, 0, position, pair]), float(x[0, 0, position, pair + 4])
            expected = complex(left, right) * complex(math.cos(angle), math.sin(angle))
            found = complex(float(turned[0, 0, position, pair]), float(turned[0, 0, position, pair + 4]))
            assert found == pytest.approx(expected, abs=1e-5)


# The clean stream
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [5, 1, 1, 10, 7], [23, 1], [1, 23]])
def test_a_cache_does_not_change_the_output(layer: Layer, sizes: list[int]) -> None:
    x, table = random(2, 24, WIDTH), rotary_table(24, HEAD_DIM)
    whole, keys, values = layer.clean(x, table)
    empty = torch.full((2, HEADS, 30, HEAD_DIM), math.nan)
    cache, outputs, start = LayerCache(empty, empty.clone()), [], 0
    for size in sizes:
        piece, k, v = layer.clean(x[:, start : start + size], table[:, start : start + size], cache)
        outputs.append(piece)
        start += size
        assert cache.length == k.shape[2] == v.shape[2] == start
    assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=1e-4)
    for stored, expected in zip(cache.stored(), (keys, values), strict=True):
        assert torch.allclose(stored, expected, atol=1e-4)
