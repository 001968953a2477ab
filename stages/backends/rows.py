"""Rows of several requests, one below the other in one tensor."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

# From how many rows for each thread on, what a matrix product gives for a row may not depend on how many rows there
# are; below, libraries take other kernels, which add in another order. AMD's processors need 4, Intel's 16.
FEWEST_ROWS = (4, 8, 16, 32, 64)
# Of the matrices that it is measured with: numbers in and out.
SHAPES = ((32, 128), (128, 384), (128, 512), (256, 256), (512, 128), (512, 256))
MOST_ROWS = 192
# Beyond this, matrix products gain nothing by more rows, and what lies between them falls out of the cache.
ROWS_TOGETHER = 512
# Numbers that an elementwise kernel takes at once (two AVX-512 registers). What is left over at the end of a thread's
# share goes through scalar code, whose gelu differs in the last bits; products and sums do not.
LANES = 32
# Rows of every matrix product on a device other than the processor. A GPU's library chooses its kernel by all sizes of
# a product and promises nothing about rows, so all products there have the same: what a row gives is then the same in
# any company.
SLAB_ROWS = 64

R = TypeVar("R")

PRODUCT_THREADS = ContextVar("PRODUCT_THREADS", default=1)
"""Threads of the products of a runner that is being made."""


@contextmanager
def product_threads(count: int) -> Iterator[None]:
    """Runners that are made within the block have so many threads for products."""
    before = PRODUCT_THREADS.set(count)
    try:
        yield
    finally:
        PRODUCT_THREADS.reset(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch compute on so many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # 0.1 us
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_own_threads(compute: Callable[[Any, R], Any]) -> Callable[[Any, R], Any]:
    """A method of a runner, with torch on the runner's `threads`.

    After each operation torch's threads spin for milliseconds. Where it only computes what lies between products of
    onnxruntime, which has threads of its own, it has one: else they take the cores from each other.
    """

    @wraps(compute)
    def computed(runner: Any, pieces: R) -> Any:  # noqa: ANN401 - any kind of runner, and its results
        with torch_threads(runner.threads):
            return compute(runner, pieces)

    return computed


@dataclass(frozen=True)
class Rows:
    """Places of each piece's rows: from bounds[i] to bounds[i + 1]. Rows from bounds[-1] to `total` are padding."""

    counts: list[int]
    bounds: list[int]
    total: int
    threads: int = 1  # of products

    @classmethod
    def of(cls, counts: Sequence[int], hidden: int, threads: int, least: int = 0) -> Self:
        """:param counts: rows of each piece.
        :param hidden: numbers in a row of the widest layer.
        :param threads: of products.
        :param least: rows from which on, and in multiples of which, a product's rows are independent, if its kernels
            are others than those of `independent_rows`."""
        bounds = [0, *accumulate(counts)]
        return cls(list(counts), bounds, padded(bounds[-1], hidden, threads, least), threads)

    @classmethod
    def in_slabs(cls, counts: Sequence[int]) -> Self:
        """Rows for products on a device other than the processor: whole slabs."""
        bounds = [0, *accumulate(counts)]
        return cls(list(counts), bounds, -(-bounds[-1] // SLAB_ROWS) * SLAB_ROWS)

    @cached_property
    def single(self) -> bool:
        """True if each piece has one row."""
        return self.bounds[-1] == len(self.counts)

    @property
    def sizes(self) -> list[int]:
        """`counts`, and the padding if there is any: for `Tensor.split`."""
        return [*self.counts, self.padding] if self.padding else self.counts

    @cached_property
    def padding(self) -> int:
        return self.total - self.bounds[-1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.bounds)

    def pack(self, parts: Sequence[Tensor], fresh: bool = True) -> Tensor:
        """Tensors (rows of a piece, width) as one, (total, width), with zeros as padding.

        :param fresh: a copy even where there is nothing to put together, so that it may be written to.
        """
        if self.padding:
            parts = [*parts, parts[0].new_zeros(self.padding, *parts[0].shape[1:])]
        if len(parts) > 1:
            return torch.cat(list(parts))
        return parts[0].clone() if fresh else parts[0]

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Each piece's rows."""
        return list(x.split_with_sizes(self.sizes))[: len(self.counts)]


def in_slabs(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A product of rows (of `Rows.in_slabs`), a slab at a time."""
    parts = [product(slab) for slab in x.split(SLAB_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def multiplied(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix. x: (rows, in), matrix: (in, out)."""
    return x.mm(matrix) if x.is_cpu else in_slabs(lambda slab: slab.mm(matrix), x)


def add_product(x: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """x + rows @ matrix, in place of x."""
    return x.addmm_(rows, matrix) if x.is_cpu else x.add_(multiplied(rows, matrix))


def groups(counts: Sequence[int]) -> list[slice]:
    """Neighbouring pieces that are worth computing together, by their rows."""
    found, begin, rows = list[slice](), 0, 0
    for i, count in enumerate(counts):
        if i > begin and rows + count > ROWS_TOGETHER:
            found.append(slice(begin, i))
            begin, rows = i, 0
        rows += count
    return [*found, slice(begin, len(counts))] if counts else found


@lru_cache(1024)
def padded(rows: int, hidden: int, threads: int, least: int = 0) -> int:
    """Number of rows that makes the results of each independent of the others: at least `rows`.

    A multiple of `least` (`independent_rows`), and no thread is left with a part of a vector.
    """
    whole_vectors = LANES * threads // math.gcd(LANES * threads, hidden)
    step = math.lcm(least or independent_rows(threads), whole_vectors)
    return -(-rows // step) * step


@lru_cache
def independent_rows(threads: int) -> int:
    """From how many rows on, and in multiples of which, a product's rows are the same in any company: measured here,
    in some milliseconds, for libraries choose their kernels by shape and processor, and promise nothing.

    The largest of FEWEST_ROWS where none is enough: stages/backends/runner_checks.py finds out.
    """
    generator = torch.Generator().manual_seed(0)
    most = MOST_ROWS * threads
    products = [
        (torch.randn(most, inner, generator=generator), torch.randn(outer, inner, generator=generator).t())
        for inner, outer in SHAPES
    ]
    expected = [x.mm(matrix) for x, matrix in products]
    for fewest in FEWEST_ROWS[:-1]:
        step = fewest * threads
        counts = [step * i for i in (1, 2, 3, 5) if step * i <= most]
        if all(
            torch.equal(x[:count].mm(matrix), whole[:count])
            for (x, matrix), whole in zip(products, expected, strict=True)
            for count in counts
        ):
            return step
    return FEWEST_ROWS[-1] * threads
