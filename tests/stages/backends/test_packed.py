"""The packed backend: the output of the modules, for each piece as if it were alone, to the last bit."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.backends import Backend
from stages.backends.base import BlockRunner, CleanPiece, NoisyPiece, StageRunner
from stages.backends.packed import PackedBlock, PackedStage
from stages.backends.runner_checks import OneAtATime, check_rows, checked
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.pipeline import ArStage
from stages.model.randomness import Codes
from tests.stages.backends.conftest import branch_piece, clean_piece, noisy_piece
from tests.stages.conftest import make_ar, make_block, shaken

TOLERANCE = 1e-4
SHAPES = ((36, 3), (6, 1), (128, 4))
"""(width, heads): odd ones leave tails in every vector loop."""


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_parts(width: int, heads: int) -> tuple[Block, ArStage]:
    a = Architecture(2, 2, width, heads, context_length=96, code_dim=12, condition_dim=20)
    return shaken(lambda: Block(a, 1, Codes(0, a.code_dim)), width), shaken(lambda: ArStage(a, 1), width)


@lru_cache
def runners(shape: tuple[int, int]) -> tuple[tuple[Block, BlockRunner], tuple[ArStage, StageRunner]]:
    """The runners that a host uses."""
    block, stage = PARTS[shape]
    backend = Backend()
    return (block, backend.block(block)), (stage, backend.stage(copy.deepcopy(stage)))


PARTS = {shape: random_parts(*shape) for shape in SHAPES}


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def stored(piece: CleanPiece) -> list[Tensor]:
    return [tensor for cache in piece.caches for tensor in cache.stored()]


# The output of the modules
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 7), (5, 0), (5, 7), (33, 40)])
def test_reading_matches_the_block(index: int, new: int, past: int) -> None:
    block = make_block(index)
    piece = clean_piece(block, new, past)
    expected = copy.deepcopy(piece)
    (features,) = PackedBlock(block).read([piece])
    assert near(features, block.read(expected.source[None], expected.caches)[0][0])
    assert all(near(one, other) for one, other in zip(stored(piece), stored(expected), strict=True))
    assert [cache.length for cache in piece.caches] == [past + new] * 2


@pytest.mark.parametrize(("slots", "start"), [(1, 0), (1, 5), (9, 0), (32, 41)])
@pytest.mark.parametrize("sigma", [0.2, 1.0, 9.0])
def test_denoising_matches_the_block(slots: int, start: int, sigma: float) -> None:
    block = make_block(1)
    piece = noisy_piece(block, slots, sigma, start)
    memory = [cache.stored() for cache in piece.caches]
    logits = block.denoise(piece.z[None], piece.estimate[None], torch.full((1, 1), sigma), memory, start)
    (denoised,) = PackedBlock(block).denoise([piece])
    # at little noise logits are large: they hold z . code / sigma^2
    assert torch.allclose(denoised.logits, logits[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert near(denoised.point, block.point(logits)[0])
    assert all(cache.length == start for cache in piece.caches)


# Alone or in company

positions = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=2, max_size=7)
steps = st.lists(st.tuples(st.just(1), st.integers(0, 90)), min_size=2, max_size=17)
noise = st.lists(
    st.tuples(
        st.integers(1, 45), st.sampled_from((0.2, 0.2, 1.5, 7.0)), st.integers(0, 50), st.sampled_from((1.0, 0.8, 0.0))
    ),
    min_size=2,
    max_size=6,
)


COMPANY = settings(max_examples=15, deadline=None)


@given(sizes=positions | steps, shape=st.sampled_from(SHAPES))
@COMPANY
def test_reading_is_batch_invariant(sizes, shape) -> None:
    for part, runner in runners(shape):
        together = [clean_piece(part, *size, seed=i) for i, size in enumerate(sizes)]
        results = runner.read(together)
        for i, size in enumerate(sizes):
            alone = clean_piece(part, *size, seed=i)
            assert torch.equal(runner.read([alone])[0], results[i])
            assert all(torch.equal(*pair) for pair in zip(stored(alone), stored(together[i]), strict=True))
        if isinstance(part, ArStage):
            heads = runner.next_byte(results)
            assert all(torch.equal(runner.next_byte([x])[0], y) for x, y in zip(results, heads, strict=True))


@given(sizes=noise, shape=st.sampled_from(SHAPES))
@COMPANY
def test_denoising_is_batch_invariant(sizes, shape) -> None:
    (block, runner), _ = runners(shape)
    pieces: list[NoisyPiece] = [noisy_piece(block, *size, seed=i) for i, size in enumerate(sizes)]
    for piece, together in zip(pieces, runner.denoise(pieces), strict=True):
        (alone,) = runner.denoise([piece])
        assert torch.equal(alone.logits, together.logits)
        assert torch.equal(alone.point, together.point)


# The check at load
@pytest.mark.parametrize(
    ("count", "shapes"), [(1, ((36, 3), (128, 4))), pytest.param(2, ((128, 4),), marks=pytest.mark.slow)]
)
def test_rows_are_independent_on_this_machine(threads, count: int, shapes) -> None:
    """Not where a row has six numbers: the library's smallest kernels look at a row's place."""
    threads(count)
    for shape in shapes:
        block, stage = PARTS[shape]
        assert check_rows(PackedBlock(block), block)
        assert check_rows(PackedStage(stage), stage)


class Leaky(PackedBlock):
    """Lets company show in the last bit."""

    def read(self, pieces):
        return [x * (1 + 1e-7 * (len(pieces) > 1)) for x in super().read(pieces)]


class LeakyFork(PackedStage):
    def branch(self, pieces):
        return [x * (1 + 1e-7 * (len(pieces) > 1)) for x in super().branch(pieces)]


class LeakyStage(PackedStage):
    def next_byte(self, hidden):
        return [x * (1 + 1e-7 * (len(hidden) > 1)) for x in super().next_byte(hidden)]


def test_a_machine_that_fails_the_check_computes_one_piece_at_a_time(caplog) -> None:
    block, stage = make_block(), make_ar().stages[-1]
    with caplog.at_level(logging.WARNING):
        runner = checked(Leaky(block), block)
        last = checked(LeakyStage(stage), stage)
    assert isinstance(runner, OneAtATime)
    assert isinstance(last, OneAtATime)
    assert caplog.text.count("computed one at a time") == 2
    pieces = [clean_piece(block, 4, seed=i) for i in range(3)]
    alone = [PackedBlock(block).read([copy.deepcopy(piece)])[0] for piece in pieces]
    assert all(torch.equal(*pair) for pair in zip(runner.read(pieces), alone, strict=True))
    assert len(runner.denoise([noisy_piece(block, 2), noisy_piece(block, 3)])) == 2
    hidden = last.read([clean_piece(stage, 1), clean_piece(stage, 2)])
    assert [tuple(x.shape) for x in last.next_byte(hidden)] == [(1, 256), (2, 256)]


def test_the_check_includes_branches() -> None:
    stage = make_ar().stages[0]
    assert check_rows(PackedStage(stage), stage)
    assert not check_rows(LeakyFork(stage), stage)
    pieces = [branch_piece(stage, *size) for size in ((2, 3, 4), (1, 5, 6))]
    alone = OneAtATime(LeakyFork(stage)).branch(pieces)
    assert all(torch.equal(*pair) for pair in zip(alone, PackedStage(stage).branch(pieces), strict=True))
