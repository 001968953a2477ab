"""Runners of pretrained stages: the output of the modules, for each piece as if it were alone."""

import copy
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stages.backends import Backend, attention
from stages.backends.attention import Growing, GrowingPiece
from stages.backends.base import CleanPiece, StageRunner
from stages.backends.packed import PipelineRunner
from stages.backends.packed_llama import HalfProduct, torch_stage
from stages.backends.runner_checks import OneAtATime
from stages.model.architecture import LlamaArchitecture, Weights
from tests.stages.backends.conftest import branch_piece, clean_piece
from tests.stages.model.tiny_llama import OPTIONS, TINY, random_stages

SHAPES: tuple[LlamaArchitecture, ...] = (
    TINY,
    replace(TINY, kv_heads=4, mlp_width=50, attention_bias="qkv"),
    replace(TINY, width=48, heads=3, kv_heads=1, head_dim=10, attention_bias="all"),
    replace(TINY, width=128, heads=4, head_dim=32, mlp_width=352),
    replace(TINY, layers=(2,), tied_head=True),
    *OPTIONS.values(),
)
STAGES = {(a, i): stage for a in SHAPES for i, stage in enumerate(random_stages(a))}
BRANCHED = [*((a, i) for i, a in enumerate(SHAPES[:3])), (OPTIONS["capped window"], 0)]
PARTS = pytest.mark.parametrize("key", STAGES, ids=lambda key: f"{SHAPES.index(key[0])}-{key[1]}")


MAKERS = {"as hosts run it": Backend().stage, "as on other devices": torch_stage}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@lru_cache
def runner_of(maker: str, key: tuple[LlamaArchitecture, int]) -> StageRunner:
    return MAKERS[maker](copy.deepcopy(STAGES[key]))


@PARTS
def test_a_runner_computes_the_output_of_the_module(maker: str, key: tuple[LlamaArchitecture, int]) -> None:
    stage, runner, piece = STAGES[key], runner_of(maker, key), clean_piece(STAGES[key], 17, 5)
    expected = stage.read(piece.source[None], copy.deepcopy(piece.caches))
    (found,) = runner.read([piece])
    pairs = [(found, expected[0])]
    if stage.is_last:
        pairs.append((runner.next_byte([found])[0], stage.next_byte(expected)[0]))
    assert all((one - other).abs().max() <= 1e-3 * max(1.0, float(other.abs().max())) for one, other in pairs)


@PARTS
def test_rows_are_independent_of_each_other(key: tuple[LlamaArchitecture, int]) -> None:
    assert not isinstance(runner_of("as hosts run it", key), OneAtATime)


@settings(deadline=None, max_examples=20)
@given(
    maker=st.sampled_from([*MAKERS]),
    key=st.sampled_from([*STAGES]),
    few=st.integers(2, 20),
    past=st.integers(1, 40),
    others=st.integers(0, 4),
)
def test_a_few_positions_give_the_results_of_single_steps(maker: str, key, few: int, past: int, others: int) -> None:
    stage, runner = STAGES[key], runner_of(maker, key)
    together, alone = replace(clean_piece(stage, few, past), one_by_one=few), clean_piece(stage, few, past)
    company = [clean_piece(stage, 1 + i, 7 * i, seed=i + 1) for i in range(others)]
    (hidden, *_) = runner.read([together, *company])
    one_by_one = [runner.read([CleanPiece(x, alone.caches)])[0] for x in alone.source.split(1)]
    assert torch.equal(hidden, torch.cat(one_by_one))
    for one, other in zip(together.caches, alone.caches, strict=True):
        assert torch.equal(one.stored()[0], other.stored()[0])
    if stage.is_last:
        logits = runner.next_byte([hidden, *[x[:1] for x in one_by_one]])
        assert torch.equal(logits[0], torch.cat(logits[1:]))


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(past=st.integers(0, 20), at_once=st.integers(1, 33), rest=st.integers(0, 9), others=st.integers(0, 2))
@example(past=0, at_once=33, rest=3, others=1)
@example(past=20, at_once=33, rest=3, others=1)
def test_rounding_depends_only_on_the_grid(name: str, past: int, at_once: int, rest: int, others: int) -> None:
    """A prompt and draft tokens after it, in one piece or in several."""
    key = (OPTIONS[name], 0)
    stage, runner, count = STAGES[key], runner_of("as hosts run it", key), at_once + rest
    together, alone = replace(clean_piece(stage, count, past), one_by_one=rest), clean_piece(stage, count, past)
    (hidden, *_) = runner.read([together, *(clean_piece(stage, 5, 7 * i) for i in range(others))])
    ends = [0, *([32 - past] if past + at_once > 32 else []), *range(at_once, count + 1)]
    pieces = [alone.source[begin:end] for begin, end in pairwise(ends)]
    assert torch.equal(hidden, torch.cat([runner.read([CleanPiece(x, alone.caches)])[0] for x in pieces]))
    for one, other in zip(together.caches, alone.caches, strict=True):
        assert all(map(torch.equal, one.stored(), other.stored()))


@pytest.mark.parametrize("at_once", [attention.MAX_WEIGHTS, 300, 1])
@pytest.mark.parametrize("key", BRANCHED, ids=lambda key: SHAPES.index(key[0]))
def test_branches_attend_to_the_sequence_and_themselves(maker: str, key, at_once: int, monkeypatch) -> None:
    """Also if few of them fit at once."""
    monkeypatch.setattr(attention, "MAX_WEIGHTS", at_once)
    stage, piece = STAGES[key], branch_piece(STAGES[key], 3, 5, 9)
    (hidden,) = runner_of(maker, key).branch([piece])
    for found, branch in zip(hidden, piece.source, strict=True):
        expected = stage.read(branch[None], copy.deepcopy(piece.caches))[0]
        assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))
    assert all(cache.length == 9 for cache in piece.caches)


@pytest.mark.parametrize("key", [(TINY, 1), (OPTIONS["capped window"], 0)], ids=["plain", "window"])
def test_growing_continuations_give_the_output_of_the_module(maker: str, key: tuple[LlamaArchitecture, int]) -> None:
    stage = STAGES[key]
    runner, piece = runner_of(maker, key), branch_piece(stage, 3, 8, 9)
    assert isinstance(runner, PipelineRunner)
    grown = Growing(piece.caches, 8, 3)
    found = torch.stack([runner.grow([GrowingPiece(x, grown)])[0] for x in piece.source.unbind(1)], dim=1)
    for one, other in zip(found, piece.source, strict=True):
        expected = stage.read(other[None], copy.deepcopy(piece.caches))[0]
        assert (one - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_16_bit_product_is_close_to_float32_and_batch_invariant() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 33).requires_grad_(False)
    linear.weight.copy_(linear.weight.bfloat16())
    linear.weight[0, 0] = 2.0**-20
    x = torch.randn(40, 96)
    expected, made = linear(x), HalfProduct(linear)
    assert torch.allclose(whole := made(x), expected, atol=1e-5)
    assert all(torch.equal(made(x[:count]), whole[:count]) for count in range(1, 40))
    assert not linear.weight.numel()


@pytest.mark.parametrize("weights", ["q4", "q8"])
def test_a_quantized_stage_is_close_to_its_weights_and_batch_invariant(weights: Weights) -> None:
    plain = replace(TINY, width=64, head_dim=16, kv_heads=2, mlp_width=96, attention_bias="all", weights=weights)
    for stage in (*random_stages(plain), *random_stages(replace(plain, experts=OPTIONS["experts"].experts))):
        piece = clean_piece(stage, 5, 9)
        expected = stage.read(piece.source[None], piece.caches)[0]
        runner = Backend().stage(stage)
        found, _ = runner.read([clean_piece(stage, 5, 9), clean_piece(stage, 1, 3)])
        assert torch.equal(found, runner.read([clean_piece(stage, 5, 9)])[0])
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < 0.05  # a row near the edge may choose another expert
