"""Parts of a model on torch: pieces of several requests share every operation on rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.attention import (
    GrowingPiece,
    Heads,
    attend_branches,
    attend_clean,
    attend_growing,
    attend_noisy,
    attention_shape,
    rotate_rows,
    visibility,
)
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.backends.rows import PRODUCT_THREADS, Rows, add_product, groups, multiplied, on_own_threads
from stages.model.block import Block
from stages.model.layers import Layer, LayerCache, soft_capped
from stages.model.llama import LlamaStage
from stages.model.pipeline import ArStage, PipelineStage

Angles = tuple[Tensor, Tensor]
# A layer's number, and its queries, keys and values -> (rows, heads x head_dim).
Attend = Callable[[int, Heads], Tensor]


class PipelineLayer(ABC):
    """A layer of any family on packed rows: the operations before attention, and after it. x: (rows, width)."""

    @abstractmethod
    def project(self, x: Tensor, angles: Angles) -> Tensor:
        """Queries, keys and values, queries and keys rotated: (rows, numbers of all heads).

        angles: cos and sin from `LayerKind.factors`, as returned by `PackedReader.spread`.
        """

    @abstractmethod
    def finish(self, x: Tensor, mixed: Tensor) -> None:
        """Add attention's result, and the operations after attention, in place."""


class PackedNorm:
    """RMSNorm. torch's own takes seven operations, and small operations are all overhead."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        (width,) = norm.normalized_shape
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        self.weight = norm.weight.detach() * width**0.5
        # a tensor: a Python number costs a conversion on each call
        self.least = torch.full((1, 1), eps * width, device=norm.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width)."""
        return self.directions(x).mul_(self.weight)

    def directions(self, x: Tensor) -> Tensor:
        """RMSNorm without the weight, divided by the root of the width."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # x / sqrt(mean of squares + eps) = x sqrt(width) / sqrt(sum of squares + eps width)
        return x.mul(torch.addcmul(self.least, length, length).rsqrt_())


class PackedLayer(PipelineLayer):
    """Rows of several pieces through one layer. It holds views of the layer's matrices, not copies."""

    def __init__(self, layer: Layer) -> None:
        self.heads, self.modulation = layer.heads, layer.modulation
        self.attention_norm, self.mlp_norm = PackedNorm(layer.attention_norm), PackedNorm(layer.mlp_norm)
        linears = (layer.qkv, layer.attention_out, layer.mlp_in, layer.mlp_out)
        self.qkv, self.attention_out, self.mlp_in, self.mlp_out = (linear.weight.detach().t() for linear in linears)

    def project(self, x: Tensor, angles: Angles) -> Tensor:
        return self._rotated(self.attention_norm(x), angles)

    def finish(self, x: Tensor, mixed: Tensor) -> None:
        add_product(x, mixed, self.attention_out)
        hidden = multiplied(self.mlp_norm(x), self.mlp_in)
        # transposed views: torch passes contiguous tensors to oneDNN, whose calls cost 5 us more
        add_product(x, F.gelu(hidden.t()).t() if x.is_cpu else F.gelu(hidden), self.mlp_out)

    def noisy(self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], modulation: Tensor) -> None:
        """Compute noisy slots in place. modulation: (6, rows or 1, width), from `modulate`."""
        weight_a, shift_a, gate_a, weight_m, shift_m, gate_m = modulation
        qkv = self._rotated(torch.addcmul(shift_a, self.attention_norm.directions(x), weight_a), angles)
        x.addcmul_(multiplied(attend_noisy(qkv, rows, self.heads, caches), self.attention_out), gate_a)
        hidden = multiplied(torch.addcmul(shift_m, self.mlp_norm.directions(x), weight_m), self.mlp_in)
        x.addcmul_(multiplied(F.gelu(hidden), self.mlp_out), gate_m)

    def modulate(self, condition: Tensor) -> Tensor:
        """AdaLN's modulation for one noise level, ready to use: condition (1, condition_dim) -> (6, width)."""
        assert self.modulation is not None, "a layer of an AR model has no noisy slots"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[0].chunk(6)
        weight_a, weight_m = self.attention_norm.weight * (1 + scale_a), self.mlp_norm.weight * (1 + scale_m)
        return torch.stack([weight_a, shift_a, 1 + gate_a, weight_m, shift_m, 1 + gate_m])

    def _rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """Queries, keys and values of normed rows, queries and keys rotated: (rows, 3 width)."""
        qkv = multiplied(x, self.qkv)
        rotate_rows(qkv, self.heads, *angles)
        return qkv


NOISE_LEVELS = 64  # noise levels whose modulations are kept: sweeps use the same few again


@dataclass(frozen=True)
class LayerKind:
    """Positional settings that some layers of a part share."""

    rotary: Tensor  # (positions, 2, head_dim / 2): cos and sin
    signs: Tensor  # (2, 2, 1, 2, 1)
    window: int | None  # see `AttentionShape`

    @classmethod
    def of(cls, rotary: Tensor, scale: float, window: int | None = None) -> Self:
        """:param rotary: (2, positions, head_dim / 2).
        :param scale: factor of queries for attention."""
        signs = torch.tensor([[[scale, scale], [1, 1]], [[-scale, scale], [-1, 1]]], device=rotary.device)
        return cls(rotary.transpose(0, 1), signs[:, :, None, :, None], window)

    def factors(self, rotary: Tensor) -> Tensor:
        """Factors for `rotate_rows` from table rows: (rows, 2, head_dim / 2) -> (rows, 2, 2, 1, 2, head_dim / 2).

        The dimensions: cos and signed sin; queries (scaled) and keys; every head; both halves of a head.
        """
        # made again for each pass: a table of factors would be four times as large, 8 MB for 8,192 positions
        return rotary[:, :, None, None, None] * self.signs


class PackedReader:
    """The clean stream of a part, of any family.

    :param layers: what computes the layers of `part`, not those layers themselves.
    :param hidden: numbers in a row of the widest layer.
    :param least: see `Rows.of`.
    """

    def __init__(
        self, part: Block | PipelineStage, layers: Sequence[PipelineLayer], hidden: int, least: int = 0
    ) -> None:
        table = part.embedding
        self.embedding: Callable[[Tensor], Tensor] | None = table  # tokens (rows,) -> (rows, width)
        if isinstance(table, nn.Embedding):
            self.embedding = partial(table.weight.detach().index_select, 0)
        self.layers, self.hidden, self.least, self.threads = layers, hidden, least, PRODUCT_THREADS.get()
        self.kinds, self.kind_of = kinds_of(part)
        self.shapes, self.kv_heads = list(map(attention_shape, part.layers)), part.architecture.kv_heads
        self.device = part.rotary.device

    def shortened(self) -> Self:
        """A copy with only its first layers, including one of each kind."""
        short, count = copy(self), 1 + max(map(self.kind_of.index, range(len(self.kinds))))
        short.layers, short.kind_of = self.layers[:count], self.kind_of[:count]
        return short

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        """See `BlockRunner.read`."""
        counts = [piece.source.shape[0] for piece in pieces]
        return [x for group in groups(counts) for x in self._read(pieces[group], counts[group])]

    def _read(self, pieces: Sequence[CleanPiece], counts: Sequence[int]) -> list[Tensor]:
        rows = self.rows_of(counts)
        x = rows.pack([self.input(piece.source) for piece in pieces])
        starts, depths = [piece.caches[0].length for piece in pieces], [piece.depths for piece in pieces]
        positions = self.positions(rows, starts, depths)
        # a single row sees everything before it
        seen = [[] if rows.single else [visibility(piece, kind.window) for piece in pieces] for kind in self.kinds]
        held = list(zip(*(piece.caches for piece in pieces), strict=True))
        self.take_layers(
            x, positions, lambda i, heads: attend_clean(heads, rows, self.shapes[i], held[i], seen[self.kind_of[i]])
        )
        return rows.unpack(x)

    def take_layers(self, x: Tensor, positions: Tensor, attend: Attend) -> None:
        """Pass rows through all layers, in place. x: (rows, width); positions: (rows,) int64."""
        angles = self.angles_at(positions)
        for number, (layer, kind) in enumerate(zip(self.layers, self.kind_of, strict=True)):
            qkv = layer.project(x, angles[kind])
            layer.finish(x, attend(number, Heads(qkv, self.shapes[number].heads, self.kv_heads)))

    def rows_of(self, counts: Sequence[int]) -> Rows:
        """Places of pieces with these numbers of rows in one tensor."""
        return Rows.of(counts, self.hidden, self.threads, self.least, self.device.type == "cpu")

    def spread(self, factors: Tensor) -> Angles:
        """Rotary factors of rows in the form that the layers need."""
        cos, sin = factors.unbind(1)
        return cos, sin

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        """See `StageRunner.branch`."""
        counts = [piece.source.shape[0] * piece.source.shape[1] for piece in pieces]
        return [x for group in groups(counts) for x in self._branch(pieces[group], counts[group])]

    def _branch(self, pieces: Sequence[BranchPiece], counts: Sequence[int]) -> list[Tensor]:
        rows, shapes = self.rows_of(counts), [piece.source.shape[:2] for piece in pieces]
        x = rows.pack([self.input(piece.source.flatten(0, 1)) for piece in pieces])
        branches = [count for count, _ in shapes]
        along = [torch.arange(new, device=self.device).repeat(count) for count, new in shapes]
        positions = [piece.caches[0].length + each for piece, each in zip(pieces, along, strict=True)]
        held = list(zip(*(piece.caches for piece in pieces), strict=True))
        self.take_layers(
            x,
            rows.pack(positions, fresh=False),
            lambda i, heads: attend_branches(heads, rows, self.shapes[i], held[i], branches),
        )
        return [each.unflatten(0, shape) for each, shape in zip(rows.unpack(x), shapes, strict=True)]

    def grow(self, pieces: Sequence[GrowingPiece]) -> list[Tensor]:
        """See `PipelineRunner.grow`."""
        counts = [piece.source.shape[0] for piece in pieces]
        return [x for group in groups(counts) for x in self._grow(pieces[group], counts[group])]

    def _grow(self, pieces: Sequence[GrowingPiece], counts: Sequence[int]) -> list[Tensor]:
        rows, texts = self.rows_of(counts), [piece.grown for piece in pieces]
        x = rows.pack([self.input(piece.source) for piece in pieces])
        positions, lengths = rows.pack([text.positions for text in texts]), [text.length for text in texts]
        held = list(zip(*(text.caches for text in texts), strict=True))
        self.take_layers(
            x, positions, lambda i, heads: attend_growing(heads.qkv, rows, self.shapes[i], held[i], lengths)
        )
        for text in texts:
            text.grown()
        return rows.unpack(x)

    def positions(self, rows: Rows, starts: Sequence[int], trees: Sequence[Sequence[int]] = ()) -> Tensor:
        """Positions of packed rows whose pieces begin at `starts`: (rows,). trees: depths of those that are trees."""
        if rows.single:
            return torch.tensor([*starts, *[0] * rows.padding], device=self.device)
        parts = [torch.arange(at, at + count) for at, count in zip(starts, rows.counts, strict=True)]
        for i, depths in enumerate(trees):
            if depths:
                parts[i] = starts[i] + torch.tensor(depths)
        return rows.pack(parts).to(self.device)

    def angles_at(self, positions: Tensor) -> list[Angles]:
        """Rotary factors of rows at these positions, for each kind of layer."""
        return [self.spread(kind.factors(kind.rotary.index_select(0, positions))) for kind in self.kinds]

    def input(self, source: Tensor) -> Tensor:
        """Input of the first layer. source: tokens (rows,) or hidden states (rows, width)."""
        return source if self.embedding is None else self.embedding(source)


def kinds_of(part: Block | PipelineStage) -> tuple[list[LayerKind], list[int]]:
    """The kinds of a part's layers, and the index of each layer's kind."""
    if not isinstance(part, LlamaStage):
        return [LayerKind.of(part.rotary, (2 * part.rotary.shape[2]) ** -0.5)], [0] * len(part.layers)
    windows, scale = [layer.window for layer in part.layers], part.architecture.query_scale
    firsts = list(dict.fromkeys(windows))
    kinds = [LayerKind.of(part.rotary_of(windows.index(each)), scale, each) for each in firsts]
    return kinds, [firsts.index(each) for each in windows]


class PackedBlock(BlockRunner):
    def __init__(self, block: Block) -> None:
        self.block, self.threads = block, PRODUCT_THREADS.get()
        self.layers = [PackedLayer(layer) for layer in block.layers]
        self.reader = PackedReader(block, self.layers, 4 * block.architecture.width)
        self.inputs = torch.cat([block.state_in.weight.detach(), block.estimate_in.weight.detach()], dim=1).t()
        self.norm = PackedNorm(block.noisy_norm)
        self.head, self.bias = block.noisy_head.weight.detach().t(), block.noisy_head.bias.detach()
        self.modulations = lru_cache(NOISE_LEVELS)(partial(_modulations, block, self.layers))

    @on_own_threads
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self.reader.read(pieces)

    @on_own_threads
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        counts = [piece.z.shape[0] for piece in pieces]
        return [each for group in groups(counts) for each in self._denoise(pieces[group], counts[group])]

    def _denoise(self, pieces: Sequence[NoisyPiece], counts: Sequence[int]) -> list[Denoised]:
        rows = self.reader.rows_of(counts)
        (angles,) = self.reader.angles_at(self.reader.positions(rows, [piece.start for piece in pieces]))
        x = self._added(self.block.slot, self._inputs(pieces, rows), self.inputs)
        modulations = self._modulation_rows([self.modulations(piece.sigma) for piece in pieces], rows)
        caches = zip(*(piece.caches for piece in pieces), strict=True)
        for layer, layer_caches, modulation in zip(self.layers, caches, modulations, strict=True):
            layer.noisy(x, rows, angles, layer_caches, modulation)
        likelihood = rows.pack([piece.z / piece.sigma**2 for piece in pieces])
        logits = add_product(self._added(self.bias, self.norm(x), self.head), likelihood, self.block.codes.t())
        points = multiplied(self._scaled(logits, pieces, rows).softmax(-1), self.block.codes)
        return [Denoised(*both) for both in zip(rows.unpack(logits), rows.unpack(points), strict=True)]

    @staticmethod
    def _added(bias: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.addmm(bias, x, matrix) if x.is_cpu else multiplied(x, matrix).add_(bias)

    def _inputs(self, pieces: Sequence[NoisyPiece], rows: Rows) -> Tensor:
        """States and estimates, scaled, side by side: (rows, 2 code_dim)."""
        std, dim = self.block.data_std, self.block.codes.shape[1]
        inputs = torch.zeros(rows.total, 2 * dim, device=self.reader.device)
        for piece, (begin, end) in zip(pieces, rows, strict=True):
            torch.mul(piece.z, (piece.sigma**2 + std**2) ** -0.5, out=inputs[begin:end, :dim])
            torch.mul(piece.estimate, 1 / std, out=inputs[begin:end, dim:])
        return inputs

    def _scaled(self, logits: Tensor, pieces: Sequence[NoisyPiece], rows: Rows) -> Tensor:
        """Logits at each piece's temperature."""
        if all(piece.temperature == 1 for piece in pieces):
            return logits
        divisors = torch.ones(rows.total, 1, device=logits.device)
        for piece, (begin, end) in zip(pieces, rows, strict=True):
            divisors[begin:end] = piece.divisor
        return logits / divisors

    def _modulation_rows(self, of_pieces: Sequence[Tensor], rows: Rows) -> Tensor:
        """(layers, 6, rows, width), or one row for all if all pieces have the same noise level."""
        if all(each is of_pieces[0] for each in of_pieces):
            return of_pieces[0].unsqueeze(2)
        counts = [*rows.counts[:-1], rows.counts[-1] + rows.padding]
        return torch.stack(list(of_pieces), dim=2).repeat_interleave(
            torch.tensor(counts, device=self.reader.device), dim=2
        )


def _modulations(block: Block, layers: Sequence[PackedLayer], sigma: float) -> Tensor:
    """AdaLN's modulations at one noise level: (layers, 6, width)."""
    condition = block.condition(torch.full((1,), sigma, device=block.codes.device))
    return torch.stack([layer.modulate(condition) for layer in layers])


class PipelineRunner(StageRunner):
    """A stage of any family, on packed rows.

    :param head: the final norm and the head, (rows, width) -> (rows, vocabulary); the last stage only.
    :param threads: torch's threads.
    """

    def __init__(self, reader: PackedReader, head: Callable[[Tensor], Tensor] | None, threads: int = 1) -> None:
        self.reader, self.head, self.threads = reader, head, threads

    @on_own_threads
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self.reader.read(pieces)

    @on_own_threads
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return self.reader.branch(pieces)

    @on_own_threads
    def grow(self, pieces: Sequence[GrowingPiece]) -> list[Tensor]:
        """Append a position to each continuation; returns each piece's hidden states (continuations, width)."""
        return self.reader.grow(pieces)

    @on_own_threads
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        assert self.head is not None, "only the last stage has a head"
        counts, found = [piece.shape[0] for piece in hidden], list[Tensor]()
        for group in groups(counts):
            rows = self.reader.rows_of(counts[group])
            found += rows.unpack(self.head(rows.pack(hidden[group])))
        return found


class PackedStage(PipelineRunner):
    def __init__(self, stage: ArStage) -> None:
        layers = [PackedLayer(layer) for layer in stage.layers]
        reader = PackedReader(stage, layers, 4 * stage.architecture.width)
        super().__init__(reader, normed_head(stage, stage.head), reader.threads)


def normed_head(stage: PipelineStage, head: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """:param head: computes the stage's head."""
    if stage.norm is None or head is None:
        return None
    norm, cap = PackedNorm(stage.norm), stage.architecture.logit_softcap if isinstance(stage, LlamaStage) else None
    return lambda x: soft_capped(head(norm(x)), cap)
