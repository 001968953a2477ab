"""Rows of several requests, stacked in one tensor."""

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

# Rows per thread from which a row's matrix product may not depend on the number of rows; with fewer, libraries use
# other kernels, which add in another order. AMD's processors need 4, Intel's 16.
FEWEST_ROWS = (4, 8, 16, 32, 64)
# Shapes of the matrices that measure it: numbers in and out.
SHAPES = ((32, 128), (128, 384), (128, 512), (256, 256), (512, 128), (512, 256))
MAX_ROWS = 192
# Beyond this, matrix products gain nothing from more rows, and tensors between them fall out of the cache.
ROWS_TOGETHER = 512
# Numbers that an elementwise kernel computes at once (two AVX-512 registers). The remainder at the end of a thread's
# share goes through scalar code, whose gelu differs in the last bits; its products and sums do not.
LANES = 32
# Rows of every matrix product on a device other than the processor. A GPU's library chooses its kernel by all sizes of
# a product and promises nothing about rows, but with a fixed number of rows, a row's result is batch-invariant.
SLAB_ROWS = 64

R = TypeVar("R")

PRODUCT_THREADS = ContextVar("PRODUCT_THREADS", default=1)
"""Threads for the products of a runner under construction."""


@contextmanager
def product_threads(count: int) -> Iterator[None]:
    """Give runners that are made within the block `count` threads for products."""
    before = PRODUCT_THREADS.set(count)
    try:
        yield
    finally:
        PRODUCT_THREADS.reset(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Make torch compute on `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # 0.1 us
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_own_threads(compute: Callable[[Any, R], Any]) -> Callable[[Any, R], Any]:
    """Wrap a runner's method so that torch uses the runner's `threads`, and keeps nothing for gradients.

    After each operation torch's threads spin for milliseconds. If torch computes only the operations between products
    of onnxruntime, which has its own threads, it gets one: else they would take the cores from each other.
    """

    @wraps(compute)
    def computed(runner: Any, pieces: R) -> Any:  # noqa: ANN401 - any kind of runner, and its results
        with torch.inference_mode(), torch_threads(runner.threads):
            return compute(runner, pieces)

    return computed


@dataclass(frozen=True)
class Rows:
    """Places of each piece's rows: from bounds[i] to bounds[i + 1]. Rows from bounds[-1] to `total` are padding."""

    counts: list[int]
    bounds: list[int]
    total: int
    threads: int = 1  # threads of products

    @classmethod
    def of(cls, counts: Sequence[int], hidden: int, threads: int, least: int = 0, is_cpu: bool = True) -> Self:
        """:param counts: rows of each piece.
        :param hidden: numbers in a row of the widest layer.
        :param threads: threads of products.
        :param least: rows from which, and in multiples of which, a product's rows are independent, if its kernels
            differ from those of `independent_rows`.
        :param is_cpu: False for products on another device than the processor, which take whole slabs."""
        bounds = [0, *accumulate(counts)]
        if is_cpu:
            return cls(list(counts), bounds, padded(bounds[-1], hidden, threads, least), threads)
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

        :param fresh: copy even a single tensor, so that the result may be written to.
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
    """A product of rows of whole slabs (see `Rows.of`), one slab at a time."""
    parts = [product(slab) for slab in x.split(SLAB_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def multiplied(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix. x: (rows, in), matrix: (in, out)."""
    return x.mm(matrix) if x.is_cpu else in_slabs(lambda slab: slab.mm(matrix), x)


def add_product(x: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """x + rows @ matrix, in place of x."""
    return x.addmm_(rows, matrix) if x.is_cpu else x.add_(multiplied(rows, matrix))


def groups(counts: Sequence[int]) -> list[slice]:
    """Group neighbouring pieces that are worth computing together, by their rows."""
    found, begin, rows = list[slice](), 0, 0
    for i, count in enumerate(counts):
        if i > begin and rows + count > ROWS_TOGETHER:
            found.append(slice(begin, i))
            begin, rows = i, 0
        rows += count
    return [*found, slice(begin, len(counts))] if counts else found


@lru_cache(1024)
def padded(rows: int, hidden: int, threads: int, least: int = 0) -> int:
    """The number of rows, at least `rows`, that makes each row's result independent of the others.

    A multiple of `least` (`independent_rows`), and no thread gets part of a vector.
    """
    whole_vectors = LANES * threads // math.gcd(LANES * threads, hidden)
    step = math.lcm(least or independent_rows(threads), whole_vectors)
    return -(-rows // step) * step


@lru_cache
def independent_rows(threads: int) -> int:
    """The number of rows from which, and in multiples of which, a product's rows are batch-invariant. Measured here in
    some milliseconds, as libraries choose their kernels by shape and processor, and promise nothing.

    Returns the largest of FEWEST_ROWS if none is enough: stages/backends/runner_checks.py detects that.
    """
    generator = torch.Generator().manual_seed(0)
    most = MAX_ROWS * threads
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
