"""Codecs: sizes, what comes back, what is refused; error feedback."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import CodecError
from trainer.blocks.config import SPARSE, CodecName, RoundSettings
from trainer.rounds.codecs import (
    CODECS,
    E3M0_GROUP,
    E3M0_VALUES,
    TOP_SHARE,
    TensorCodec,
    Tensors,
    norm,
    shapes,
    subtract,
    with_feedback,
)

ALL = list(CODECS.values())
shape = st.lists(st.integers(0, 9), max_size=3).map(tuple)
numbers = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensors:
    found = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True)):
        size = draw(shape)
        count = math.prod(size)
        values = draw(st.lists(numbers, min_size=count, max_size=count))
        found[name] = torch.tensor(np.array(values, np.float32)).reshape(size)
    return found


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@settings(deadline=None, max_examples=20)
@given(tensors=some_tensors())
def test_sizes_are_exact_and_shapes_are_restored(codec: TensorCodec, tensors: Tensors) -> None:
    data = codec.encode(tensors)
    assert len(data) == codec.size(shapes(tensors))
    decoded = codec.decode(data, shapes(tensors))
    assert shapes(decoded) == shapes(tensors)
    for name, values in tensors.items():
        assert decoded[name].dtype == torch.float32
        assert bool(decoded[name].isfinite().all())
        assert not values.numel() or decoded[name].abs().max() <= values.abs().max() * (1 + 1 / 128)
    if codec.name == "fp32":
        assert all(torch.equal(decoded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_bytes_are_decoded_or_refused(codec: TensorCodec, data: st.DataObject) -> None:
    like = {"a": (3, 5), "b": (4,)}
    size = codec.size(like)
    raw = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=200))
    found, refusal = None, ""
    try:
        found = shapes(codec.decode(raw, like))
    except CodecError as error:
        refusal = str(error)
    if len(raw) == size:
        assert found == like or "has no code" in refusal or "int8 payload holds" in refusal
    else:
        assert refusal == f"got {len(raw)} bytes of {codec.name}, but these tensors need {size}"


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_numbers_are_not_encoded(codec: TensorCodec, bad: float) -> None:
    with pytest.raises(CodecError, match="a has non-finite numbers"):
        codec.encode({"a": torch.tensor([1.0, bad])})


def test_int8_is_off_by_at_most_half_a_step_in_each_row() -> None:
    values = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None]
    decoded = CODECS["int8"].decode(CODECS["int8"].encode({"a": values}), {"a": (5, 40)})["a"]
    steps = values.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((decoded - values).abs() <= steps * 0.5001).all())


def test_e3m0_rounds_to_the_nearest_of_its_fifteen_values() -> None:
    values = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    codec = CODECS["e3m0"]
    decoded = codec.decode(codec.encode({"a": values}), {"a": (3, 100)})["a"].reshape(-1)
    flat = values.reshape(-1)
    for start in range(0, 300, E3M0_GROUP):
        group = flat[start : start + E3M0_GROUP]
        levels = torch.cat([-E3M0_VALUES, E3M0_VALUES]) * group.abs().max()
        nearest = (group[:, None] - levels).abs().min(dim=1).values
        torch.testing.assert_close((decoded[start : start + E3M0_GROUP] - group).abs(), nearest)


@pytest.mark.parametrize("name", [codec.name for codec in ALL if codec.name not in SPARSE])
def test_error_feedback_makes_decoded_updates_add_up(name: CodecName) -> None:
    """Sum of what was sent = sum of what arrived + what is still carried."""
    carried, sent, arrived = Tensors(), torch.zeros(4, 50), torch.zeros(4, 50)
    generator = torch.Generator().manual_seed(0)
    for round_ in range(40):
        delta = {"a": torch.randn(4, 50, generator=generator)}
        sent += delta["a"]
        payload, carried = with_feedback(RoundSettings(codec=name), delta, carried, round_)
        arrived += CODECS[name].decode(payload, shapes(delta))["a"]
    torch.testing.assert_close(sent, arrived + carried.get("a", torch.zeros(4, 50)), rtol=0, atol=1e-4)
    assert norm(subtract({"a": sent}, {"a": arrived})) < 0.2 * norm({"a": sent})


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_codec_leaves_the_rest_in_the_weights_of_the_worker(name: CodecName) -> None:
    """One worker alone: base - carried is where it went, to the last, and the last update sends most of the rest."""
    settings = RoundSettings(codec=name, rounds=30)
    carried, base, local = {"a": torch.zeros(8, 50)}, {"a": torch.zeros(8, 50)}, {"a": torch.zeros(8, 50)}
    generator, left = torch.Generator().manual_seed(0), list[float]()
    for round_ in range(30):
        torch.testing.assert_close(subtract(base, carried)["a"], local["a"])
        local = {"a": local["a"] + torch.randn(8, 50, generator=generator)}
        payload, carried = with_feedback(settings, subtract(base, local), carried, round_)
        base = subtract(base, CODECS[settings.up_codec(round_)].decode(payload, shapes(base)))
        left.append(norm(subtract(base, local)))
    assert left[-1] < 0.7 * left[-2]


@pytest.mark.parametrize("shape", [(3, 4096), (100, 100), (50,), (4097,), (0, 4), (1,)])
@pytest.mark.parametrize(("name", "group", "levels"), [("top32", 32, 3), ("top7", 7, 2)])
def test_the_largest_number_of_each_group_is_sent(name: CodecName, group: int, levels: int, shape: Any) -> None:
    codec, values = CODECS[name], torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values.reshape(-1)[:group] = 0
    found = codec.decode(codec.encode({"a": values}), {"a": shape})["a"].reshape(-1)
    kept = list[tuple[float, float]]()
    for own, arrived in zip(values.reshape(-1).split(group), found.split(group), strict=True):
        place = own.abs().argmax() if len(own) else 0
        assert arrived.nonzero().reshape(-1).tolist() == [place] * bool(own.any())
        if own.any():
            assert arrived[place].sign() == own[place].sign()
            kept.append((float(own[place].abs()), float(arrived[place].abs())))
    first = sorted(kept[: TOP_SHARE - 1], reverse=True)  # a share, of which the first is 0
    for level in range(levels):
        own = [both for rank, both in enumerate(first) if rank * levels // max(len(first), 1) == level]
        if own:
            assert [arrived for _, arrived in own] == pytest.approx([sum(x for x, _ in own) / len(own)] * len(own))
