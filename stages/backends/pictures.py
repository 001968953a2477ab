"""Pictures of several requests, whose patches share every operation on rows."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.base import PictureRunner
from stages.backends.rows import PRODUCT_THREADS, Rows, groups, on_own_threads
from stages.pictures.part import DitLayer, PicturePart, normed
from stages.pictures.trajectory import PicturePiece

# Modulations of this many numbers are kept (8 MB): pictures of one class use the same noise levels again and again.
KEPT_NUMBERS = 1 << 21


def products(*linears: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A product of rows with one matrix, or with two and a gelu between them: (rows, in) -> (rows, out).

    It holds views of the matrices, not copies.
    """
    weights = [(linear.weight.detach().t(), linear.bias.detach()) for linear in linears]

    def product(x: Tensor) -> Tensor:
        for i, (matrix, bias) in enumerate(weights):
            x = torch.addmm(bias, F.gelu(x) if i else x, matrix)
        return x

    return product


class PackedDitLayer:
    """Rows of several pictures through one layer: computes `DitLayer` with known modulations."""

    def __init__(self, layer: DitLayer) -> None:
        self.heads = layer.heads
        self.qkv, self.attention_out = products(layer.qkv), products(layer.attention_out)
        self.mlp = products(layer.mlp_in, layer.mlp_out)

    def __call__(self, x: Tensor, tokens: int, modulation: Sequence[Tensor]) -> Tensor:
        """x: (rows, features); tokens: rows of a picture; modulation: six of (pictures, 1, features)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation
        mixed = self._attend(self.qkv(modulated(x, tokens, shift_a, scale_a)), tokens, shift_a.shape[0])
        x = gated(x, tokens, gate_a, self.attention_out(mixed))
        return gated(x, tokens, gate_m, self.mlp(modulated(x, tokens, shift_m, scale_m)))

    def _attend(self, qkv: Tensor, tokens: int, pictures: int) -> Tensor:
        """Attention in which every patch sees its own picture. qkv: (rows, 3 features) -> (rows, features)."""
        q, k, v = qkv[: pictures * tokens].view(pictures, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(pictures * tokens, -1)
        return F.pad(mixed, (0, 0, 0, qkv.shape[0] - mixed.shape[0]))


# A product and a sum, each rounded: if one operation did both, the last bit would depend on the place in a vector.
def modulated(x: Tensor, tokens: int, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm, scaled and shifted picture by picture. x: (rows, features), padding included."""
    out = normed(x)
    pictures = _pictures(out, tokens, shift)
    pictures.mul_(scale).add_(shift)
    return out


def gated(x: Tensor, tokens: int, gate: Tensor, update: Tensor) -> Tensor:
    """x + gate update, picture by picture, in place of `update`."""
    _pictures(update, tokens, gate).mul_(gate)
    return update.add_(x)


def _pictures(x: Tensor, tokens: int, like: Tensor) -> Tensor:
    """A view without the padding: (pictures, tokens, features)."""
    return x[: like.shape[0] * tokens].view(like.shape[0], tokens, -1)


class PackedPictures(PictureRunner):
    """A part on packed rows."""

    def __init__(self, part: PicturePart) -> None:
        self.part, self.tokens, self.threads = part, part.architecture.tokens, PRODUCT_THREADS.get()
        self.layers = [PackedDitLayer(layer) for layer in part.layers]
        self.patch_in = None if part.patch_in is None else products(part.patch_in)
        self.head = None if part.head is None else products(part.head)
        numbers = (6 * len(self.layers) + 2) * part.architecture.features
        self.modulations = lru_cache(max(KEPT_NUMBERS // numbers, 1))(self._modulations)

    @on_own_threads
    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        x = torch.cat([piece.x for piece in pieces])
        conditions = [(piece.sigma, each) for piece in pieces for each in piece.classes.tolist()]
        together = groups([self.tokens] * len(conditions))
        results = torch.cat([self._evaluate(x[group], conditions[group]) for group in together])
        return list(results.split([piece.x.shape[0] for piece in pieces]))

    def _evaluate(self, x: Tensor, conditions: Sequence[tuple[float, int]]) -> Tensor:
        """x: (pictures, tokens, numbers); conditions: noise level and class of each picture."""
        count, a = len(conditions), self.part.architecture
        rows = Rows.of([self.tokens] * count, 4 * a.features, self.threads)
        modulation = torch.stack([self.modulations(*each) for each in conditions])[:, :, None].unbind(1)
        packed = rows.pack([x.reshape(count * self.tokens, -1)], fresh=False)
        if self.patch_in is not None:
            packed = self.patch_in(packed)
            assert self.part.positions is not None
            _pictures(packed, self.tokens, modulation[0]).add_(self.part.positions)
        for i, layer in enumerate(self.layers):
            packed = layer(packed, self.tokens, modulation[6 * i : 6 * i + 6])
        if self.head is not None:
            packed = self.head(modulated(packed, self.tokens, *modulation[-2:]))
        return packed[: count * self.tokens].view(count, self.tokens, -1)

    def _modulations(self, sigma: float, picture_class: int) -> Tensor:
        """AdaLN's modulations of all layers, and of the head: (6 layers + 2, features), scales with 1 added."""
        condition = self.part.condition(torch.tensor([sigma]), torch.tensor([picture_class]))
        parts = [layer.modulation(condition).view(6, -1) for layer in self.part.layers]
        if self.part.head_modulation is not None:
            parts.append(self.part.head_modulation(condition).view(2, -1))
        table = torch.cat(parts)
        scales = [row for row in range(len(table)) if row % 6 in (1, 4)]  # the head's two are like a layer's first
        table[scales] += 1
        return table
