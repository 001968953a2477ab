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


def empty_cache(capacity: int, batch: int = 1) -> LayerCache:
    shape = (batch, HEADS, capacity, HEAD_DIM)
    return LayerCache(torch.full(shape, math.nan), torch.full(shape, math.nan))


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


def test_attention_scores_depend_on_distance_only() -> None:
    table = rotary_table(50, HEAD_DIM)
    q, k = random(1, 1, 1, HEAD_DIM), random(1, 1, 1, HEAD_DIM, seed=1)

    def score(i: int, j: int) -> float:
        return float((rotate(q, table[:, i : i + 1]) * rotate(k, table[:, j : j + 1])).sum())

    assert score(7, 3) == pytest.approx(score(44, 40), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


# The clean stream
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [5, 1, 1, 10, 7], [23, 1], [1, 23]])
def test_cached_is_the_same_as_uncached(layer: Layer, sizes: list[int]) -> None:
    x, table = random(2, 24, WIDTH), rotary_table(24, HEAD_DIM)
    whole, keys, values = layer.clean(x, table)
    cache, outputs, start = empty_cache(30, batch=2), [], 0
    for size in sizes:
        piece, k, v = layer.clean(x[:, start : start + size], table[:, start : start + size], cache)
        outputs.append(piece)
        start += size
        assert cache.length == k.shape[2] == v.shape[2] == start
    assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=1e-4)
    for stored, expected in zip(cache.stored(), (keys, values), strict=True):
        assert torch.allclose(stored, expected, atol=1e-4)


def test_the_clean_stream_is_causal(layer: Layer) -> None:
    x, table = random(1, 16, WIDTH), rotary_table(16, HEAD_DIM)
    changed = x.clone()
    changed[:, 9] += 1
    before, after = layer.clean(x, table)[0], layer.clean(changed, table)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert bool(((before - after)[:, 9:].abs().amax(dim=-1) > 1e-4).all())


# Noisy slots
def noisy(
    layer: Layer, x: Tensor, table: Tensor, mask: Tensor | None = None, condition: Tensor | None = None
) -> Tensor:
    condition = random(1, 1, CONDITION, seed=3) if condition is None else condition
    keys, values = random(1, HEADS, 5, HEAD_DIM, seed=1), random(1, HEADS, 5, HEAD_DIM, seed=2)
    return layer.noisy(x, condition, table, keys, values, mask)


def test_slots_see_each_other_both_ways(layer: Layer) -> None:
    x, table = random(1, 8, WIDTH), rotary_table(8, HEAD_DIM)
    for changed_slot, seen_from in ((0, 7), (7, 0)):
        changed = x.clone()
        changed[:, changed_slot] += 1
        difference = noisy(layer, changed, table) - noisy(layer, x, table)
        assert float(difference[:, seen_from].abs().max()) > 1e-4
