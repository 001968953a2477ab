"""The probe: losses that agree with cross-entropies written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from stages.checkpoint.gate import (
    PROBE_INPUT,
    PROBE_OUTPUT,
    PROBE_TEXT,
    probe_block,
    probe_bytes,
    probe_shapes,
    probe_stage,
)
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from stages.model.randomness import Purpose, normals

MakeBlock = Callable[..., Block]


def test_the_text_is_cut_to_the_context() -> None:
    assert bytes(probe_bytes("abcdef", 4)[0].tolist()) == b"abcd"
    assert probe_bytes("abcdef", 100).shape == (1, 6)


def test_a_blocks_losses(make_block: MakeBlock, partition: NoisePartition) -> None:
    block = make_block()
    measures, features = probe_block(block, partition, PROBE_TEXT, None)
    known = probe_bytes(PROBE_TEXT, 96)
    clean, _ = block.read(known)
    assert torch.equal(features, clean[0])
    chances = block.next_byte(clean)[0].log_softmax(dim=-1)
    expected = -sum(float(chances[i, known[0, i + 1]]) for i in range(95)) / 95
    assert measures["next_byte_nats"] == pytest.approx(expected, abs=1e-4)

    _, memory = block.read(known[:, :48])
    sigma = math.sqrt(8.0 * 1.5)
    z = block.codes[known[:, 48:]] + sigma * normals(0, Purpose.INITIAL_NOISE, 48, 48, 8)
    chances = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, 48)[0].log_softmax(dim=-1)
    expected = -sum(float(chances[i, known[0, 48 + i]]) for i in range(48)) / 48
    assert measures["denoise_nats"] == pytest.approx(expected, abs=1e-4)


def test_a_chained_block_is_probed_on_the_features_before_it(make_block: MakeBlock, partition: NoisePartition) -> None:
    first, second = make_block(context="chained"), make_block(1, context="chained")
    _, features = probe_block(first, partition, PROBE_TEXT, None)
    measures, _ = probe_block(second, partition, PROBE_TEXT, features)
    others, _ = probe_block(second, partition, PROBE_TEXT, features.flip(0))
    assert all(abs(measures[name] - others[name]) > 0.02 for name in measures)


def test_stages_are_probed_one_after_another(make_ar: Callable[..., ArModel]) -> None:
    model, hidden = make_ar(parts=3), None
    known = probe_bytes(PROBE_TEXT, 96)
    for stage in model.stages[:2]:
        measures, out = probe_stage(stage, known, hidden)
        assert measures == {"hidden_relative_error": 0.0}
        assert probe_stage(stage, known, hidden, out)[0] == {"hidden_relative_error": 0.0}
        assert probe_stage(stage, known, hidden, 1.1 * out)[0]["hidden_relative_error"] == pytest.approx(1 / 11)
        hidden = out
    measures, _ = probe_stage(model.stages[2], known, hidden)
    chances = model(known)[0].log_softmax(dim=-1)
    expected = -sum(float(chances[i, known[0, i + 1]]) for i in range(95)) / 95
    assert measures["next_byte_nats"] == pytest.approx(expected, abs=1e-4)


def test_which_tensors_a_parts_file_holds_for_the_probe(make_block: MakeBlock, make_ar: Callable[..., ArModel]) -> None:
    assert probe_shapes(make_block(1), 96) == {}
    assert probe_shapes(make_block(0, context="chained"), 96) == {}
    assert probe_shapes(make_block(1, context="chained"), 96) == {PROBE_INPUT: (96, 32)}
    assert probe_shapes(make_block(1, context="chained"), 5) == {PROBE_INPUT: (5, 32)}
    first, middle, last = make_ar(parts=3).stages
    assert probe_shapes(first, 96) == {PROBE_OUTPUT: (96, 32)}
    assert probe_shapes(middle, 96) == {PROBE_INPUT: (96, 32), PROBE_OUTPUT: (96, 32)}
    assert probe_shapes(last, 96) == {PROBE_INPUT: (96, 32)}
