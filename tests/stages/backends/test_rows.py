"""Pieces below each other in one matrix."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.backends.packed import PackedBlock, PackedStage
from stages.backends.rows import (
    FEWEST_ROWS,
    LANES,
    ROWS_TOGETHER,
    Rows,
    groups,
    independent_rows,
    on_own_threads,
    padded,
)
from tests.stages.conftest import make_ar, make_block


@given(rows=st.integers(1, 3000), width=st.integers(1, 300), threads=st.integers(1, 16))
def test_padding_gives_each_thread_whole_vectors_and_enough_rows(rows: int, width: int, threads: int) -> None:
    total = padded(rows, 4 * width, threads, 4 * threads)
    assert total >= rows
    assert total % (4 * threads) == 0
    assert total * 4 * width % (LANES * threads) == 0


def test_an_ar_step_is_padded_to_the_fewest_batch_invariant_rows() -> None:
    fewest = independent_rows(1)
    assert fewest in FEWEST_ROWS
    assert padded(1, 512, 1) == fewest
    assert padded(fewest, 512, 1) == fewest
    assert padded(fewest + 1, 512, 1) == 2 * fewest
    for inner, outer in ((12, 64), (96, 288), (128, 128), (384, 96), (640, 1280), (1280, 640)):
        x, matrix = torch.randn(8 * fewest, inner), torch.randn(outer, inner).t()
        whole = x.mm(matrix)
        assert all(torch.equal(x[: n * fewest].mm(matrix), whole[: n * fewest]) for n in range(1, 8))


@given(counts=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_groups_hold_every_piece_once_and_a_limited_number_of_rows(counts: list[int]) -> None:
    parts = [counts[group] for group in groups(counts)]
    assert [count for part in parts for count in part] == counts
    assert all(sum(part) <= ROWS_TOGETHER or len(part) == 1 for part in parts)
    assert all(sum(one) + other[0] > ROWS_TOGETHER for one, other in pairwise(parts))


@pytest.mark.parametrize("counts", [[1], [5], [1, 1, 1], [3, 1, 8]])
def test_packed_rows_are_unpacked_unchanged(counts: list[int]) -> None:
    parts = [torch.randn(count, 6) for count in counts]
    rows = Rows.of(counts, 24, threads=1)
    x = rows.pack(parts)
    assert x.shape == (rows.total, 6)
    assert not x[rows.bounds[-1] :].any()
    assert all(torch.equal(*pair) for pair in zip(rows.unpack(x), parts, strict=True))
    assert rows.single == (max(counts) == 1)
    x.zero_()
    assert all(part.any() for part in parts), "a packed tensor may be written to"


def test_torch_uses_the_threads_of_a_runner_only_while_it_computes() -> None:
    class Runner:
        threads = 3

        @on_own_threads
        def read(self, fails: bool) -> int:
            assert not fails
            return torch.get_num_threads()

    assert torch.get_num_threads() == 1
    assert Runner().read(False) == 3
    with pytest.raises(AssertionError):
        Runner().read(True)
    assert torch.get_num_threads() == 1


def test_no_pieces_give_no_results() -> None:
    assert list(groups([])) == []
    block, stage = PackedBlock(make_block()), PackedStage(make_ar().stages[-1])
    assert [block.read([]), block.denoise([]), stage.read([]), stage.next_byte([])] == [[], [], [], []]
