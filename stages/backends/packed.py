"""The torch backend: pieces of several requests share every operation that works on rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from stages.ar import ArStage
from stages.backends.attention import rotary_rows, sights
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, DraftingRunner, NoisyPiece
from stages.backends.growing import Growing
from stages.backends.packed_layer import Angles, PackedLayer, PackedNorm, PipelineLayer
from stages.backends.rows import Rows, groups
from stages.block import Block
from stages.families import PipelineStage
from stages.layers import LayerCache

NOISE_LEVELS = 64
"""How many noise levels' AdaLN numbers are kept: a sweep comes back to the same few."""
FEW_POSITIONS = 72
"""What a stage of an AR model reads at once as if it came byte by byte: guesses must give what the bytes would have."""


class PackedReader:
    """The clean stream of a part, of any family.

    :param layers: not those of `part`, but what computes them.
    :param hidden: numbers in a row of the widest layer.
    :param few: positions that are computed as if they came one at a time.
    """

    def __init__(
        self, part: Block | PipelineStage, layers: Sequence[PipelineLayer], hidden: int, few: int = FEW_POSITIONS
    ) -> None:
        self.embedding = None if part.embedding is None else part.embedding.weight.detach()
        self.layers, self.hidden, self.few = layers, hidden, few
        self.rotary = rotary_rows(part.rotary)

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        """See `BlockRunner.read`."""
        return [x for group in groups([len(piece.source) for piece in pieces]) for x in self._read(pieces[group])]

    def _read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        starts = [piece.caches[0].length for piece in pieces]
        counts = [len(piece.source) for piece in pieces]
        rows = self.rows_of(counts)
        x = rows.pack([self.input(piece.source) for piece in pieces])
        angles = self.angles_of(rows, starts, [piece.depths for piece in pieces])
        seen = sights(pieces, self.few)
        for layer, caches in zip(self.layers, zip(*(piece.caches for piece in pieces), strict=True), strict=True):
            layer.clean(x, rows, angles, caches, seen)
        return rows.unpack(x)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        """Where pieces of so many rows lie in one tensor."""
        return Rows.of(counts, self.hidden)

    def spread(self, factors: Tensor) -> Angles:
        """Rotary factors (rows, ...) of `rotary_rows` as the layers take them."""
        cos, sin = factors.unbind(1)
        return cos, sin

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        """See `StageRunner.branch`."""
        counts = [piece.source.shape[0] * piece.source.shape[1] for piece in pieces]
        return [x for group in groups(counts) for x in self._branch(pieces[group], counts[group])]

    def _branch(self, pieces: Sequence[BranchPiece], counts: Sequence[int]) -> list[Tensor]:
        rows, shapes = self.rows_of(counts), [piece.source.shape[:2] for piece in pieces]
        x = rows.pack([self.input(piece.source.flatten(0, 1)) for piece in pieces])
        angles, branches = self._branch_angles(rows, pieces), [count for count, _ in shapes]
        for layer, caches in zip(self.layers, zip(*(piece.caches for piece in pieces), strict=True), strict=True):
            layer.branch(x, rows, angles, caches, branches)
        return [each.unflatten(0, shape) for each, shape in zip(rows.unpack(x), shapes, strict=True)]

    def _branch_angles(self, rows: Rows, pieces: Sequence[BranchPiece]) -> Angles:
        parts = []
        for piece in pieces:
            start, (branches, positions) = piece.caches[0].length, piece.source.shape[:2]
            along = self.rotary[start : start + positions]
            parts.append(along.expand(branches, *along.shape).flatten(0, 1))
        return self.spread(torch.cat([*parts, self.rotary[:1].expand(rows.padding, *self.rotary.shape[1:])]))

    def angles_of(self, rows: Rows, starts: Sequence[int], trees: Sequence[Sequence[int]] = ()) -> Angles:
        """Rotary factors of packed rows whose pieces begin at the positions `starts`, for `rotate_rows`.

        :param trees: depths of each piece, where it is one.
        """
        if rows.single:
            positions = torch.tensor([*starts, *[0] * rows.padding])
            factors = self.rotary.index_select(0, positions)
        else:
            parts = [self.rotary[at : at + count] for at, count in zip(starts, rows.counts, strict=True)]
            for i, depths in enumerate(trees):
                if depths:
                    parts[i] = self.rotary[starts[i] + torch.tensor(depths)]
            factors = torch.cat([*parts, self.rotary[:1].expand(rows.padding, *self.rotary.shape[1:])])
        return self.spread(factors)

    def input(self, source: Tensor) -> Tensor:
        """What the first layer reads. source: symbols (rows,) or hidden states (rows, width)."""
        return source if self.embedding is None else self.embedding.index_select(0, source)


class PackedBlock(BlockRunner):
    def __init__(self, block: Block) -> None:
        self.block = block
        self.layers = [PackedLayer(layer) for layer in block.layers]
        self.reader = PackedReader(block, self.layers, 4 * block.architecture.width, few=1)
        self.inputs = torch.cat([block.state_in.weight.detach(), block.estimate_in.weight.detach()], dim=1).t()
        self.norm = PackedNorm(block.noisy_norm)
        self.head, self.bias = block.noisy_head.weight.detach().t(), block.noisy_head.bias.detach()
        self.modulations = lru_cache(NOISE_LEVELS)(partial(_modulations, block, self.layers))

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self.reader.read(pieces)

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [each for group in groups([len(piece.z) for piece in pieces]) for each in self._denoise(pieces[group])]

    def _denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        rows = Rows.of([len(piece.z) for piece in pieces], self.reader.hidden)
        angles = self.reader.angles_of(rows, [piece.start for piece in pieces])
        x = torch.addmm(self.block.slot, self._inputs(pieces, rows), self.inputs)
        modulations = self._modulation_rows([self.modulations(piece.sigma) for piece in pieces], rows)
        caches = zip(*(piece.caches for piece in pieces), strict=True)
        for layer, layer_caches, modulation in zip(self.layers, caches, modulations, strict=True):
            layer.noisy(x, rows, angles, layer_caches, modulation)
        likelihood = rows.pack([piece.z / piece.sigma**2 for piece in pieces])
        logits = torch.addmm(self.bias, self.norm(x), self.head).addmm_(likelihood, self.block.codes.t())
        points = self._scaled(logits, pieces, rows).softmax(-1).mm(self.block.codes)
        return [Denoised(*both) for both in zip(rows.unpack(logits), rows.unpack(points), strict=True)]

    def _inputs(self, pieces: Sequence[NoisyPiece], rows: Rows) -> Tensor:
        """States and estimates, scaled, side by side: (rows, 2 code_dim)."""
        std, dim = self.block.data_std, self.block.codes.shape[1]
        inputs = torch.zeros(rows.total, 2 * dim)
        for piece, (begin, end) in zip(pieces, rows, strict=True):
            torch.mul(piece.z, (piece.sigma**2 + std**2) ** -0.5, out=inputs[begin:end, :dim])
            torch.mul(piece.estimate, 1 / std, out=inputs[begin:end, dim:])
        return inputs

    def _scaled(self, logits: Tensor, pieces: Sequence[NoisyPiece], rows: Rows) -> Tensor:
        """Logits at each piece's temperature."""
        if all(piece.temperature == 1 for piece in pieces):
            return logits
        divisors = torch.ones(rows.total, 1)
        for piece, (begin, end) in zip(pieces, rows, strict=True):
            divisors[begin:end] = piece.divisor
        return logits / divisors

    def _modulation_rows(self, of_pieces: Sequence[Tensor], rows: Rows) -> Tensor:
        """(layers, 6, rows, width), or one row for all where all pieces have the same noise level."""
        if all(each is of_pieces[0] for each in of_pieces):
            return of_pieces[0].unsqueeze(2)
        counts = [*rows.counts[:-1], rows.counts[-1] + rows.padding]
        return torch.stack(list(of_pieces), dim=2).repeat_interleave(torch.tensor(counts), dim=2)


def _modulations(block: Block, layers: Sequence[PackedLayer], sigma: float) -> Tensor:
    """AdaLN's numbers at one noise level: (layers, 6, width)."""
    condition = block.condition(torch.full((1,), sigma))
    return torch.stack([layer.modulate(condition) for layer in layers])


class PipelineRunner(DraftingRunner):
    """A stage of any family, on packed rows.

    :param head: the final norm and the head, (rows, width) -> (rows, vocabulary); the last stage only.
    """

    def __init__(self, reader: PackedReader, head: Callable[[Tensor], Tensor] | None) -> None:
        self.reader, self.head = reader, head

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self.reader.read(pieces)

    @torch.inference_mode()
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return self.reader.branch(pieces)

    def grow(self, shared: list[LayerCache], room: int, count: int) -> Growing:
        return Growing(self.reader, shared, room, count)

    @torch.inference_mode()
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [x for group in groups([len(piece) for piece in hidden]) for x in self._next_byte(hidden[group])]

    def _next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        assert self.head is not None, "only the last stage has a head"
        rows = self.reader.rows_of([len(piece) for piece in hidden])
        return rows.unpack(self.head(rows.pack(hidden)))


class PackedStage(PipelineRunner):
    def __init__(self, stage: ArStage) -> None:
        layers = [PackedLayer(layer) for layer in stage.layers]
        super().__init__(PackedReader(stage, layers, 4 * stage.architecture.width), normed_head(stage, stage.head))


def normed_head(stage: PipelineStage, head: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """:param head: what computes the stage's."""
    if stage.norm is None or head is None:
        return None
    norm = PackedNorm(stage.norm)
    return lambda x: head(norm(x))
