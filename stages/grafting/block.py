"""A pretrained stage as a block: its clean stream unchanged, and noisy slots through the same layers."""

# The model was trained to predict the next symbol at each position, so a slot for position p sits at position p - 1: it
# reads what is known of the symbol there and predicts the one after it (the shift of DiffuLLaMA, arXiv 2410.17891). The
# first slot of a chunk reads a known symbol, and before training its logits are the pretrained model's own.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onesweep.stages.errors import ShapeError
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.families import FamilyArchitecture, PipelineStage
from onesweep.stages.model.layers import Layer, LayerCache, NoiseCondition, noise_frequencies
from onesweep.stages.model.llama import LlamaArchitecture, LlamaLayer

if TYPE_CHECKING:
    from onesweep.stages.grafting.part import GraftPart


MOST = 4096


@dataclass(frozen=True)
class SlotShape:
    """Sizes of what is added to a block. Raises ShapeError."""

    code_dim: int
    condition_dim: int
    rank: int  # rank of the updates that only noisy slots see; 0 for none

    def __post_init__(self) -> None:
        for name, least in (("code_dim", 1), ("condition_dim", 1), ("rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ShapeError(f"{name} must be a whole number from {least} to {MOST}, not {value!r}")


@dataclass(frozen=True)
class GraftArchitecture(FamilyArchitecture):
    """A pretrained model's stages as blocks. Raises ShapeError for another family."""

    shape: SlotShape
    family: Literal["graft"] = "graft"

    def __post_init__(self) -> None:
        if self.family != "graft":
            raise ShapeError(f"architecture: family {self.family!r} is not that of a graft")
        if isinstance(self.base, LlamaArchitecture) and not self.base.is_plain:
            raise ShapeError("architecture: blocks are grafted on byte models and on models of Llama's layers only")

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> GraftArchitecture:
        """Build from a manifest's JSON object. Raises ShapeError, KeyError or TypeError."""
        base, others = record["base"], {name: value for name, value in record.items() if name not in ("base", "shape")}
        pretrained = LlamaArchitecture.from_record(base) if "family" in base else Architecture(**base)
        return GraftArchitecture(pretrained, SlotShape(**record["shape"]), **others)

    @property
    def code_dim(self) -> int:
        return self.shape.code_dim

    def new_part(self, index: int) -> GraftPart:
        """A block with weights as before training."""
        from onesweep.stages.grafting.part import GraftPart

        return GraftPart(self, index)


AnyLayer = Layer | LlamaLayer

PRODUCTS = ("qkv", "attention_out", "mlp_in", "mlp_out")


class LowRank(nn.Module):
    """An update of a frozen product, zero at the start (LoRA, arXiv 2106.09685)."""

    def __init__(self, product: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(product.in_features, rank, bias=False)
        self.up = nn.Linear(rank, product.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=product.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SlotLayer(nn.Module):
    """Additions to a layer for noisy slots: AdaLN on sigma, and low-rank updates, all zero at the start."""

    def __init__(self, layer: AnyLayer, shape: SlotShape) -> None:
        super().__init__()
        self.modulation = nn.Linear(shape.condition_dim, 6 * layer.qkv.in_features)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        updates = {name: LowRank(getattr(layer, name), shape.rank) for name in PRODUCTS if shape.rank}
        self.updates = nn.ModuleDict(updates)

    def forward(
        self,
        layer: AnyLayer,
        x: Tensor,
        condition: Tensor,
        rotary: Tensor,
        memory: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Noisy slots through `layer`.

        x: (batch, slots, width); condition: (batch, slots or 1, condition_dim); memory: keys and values of clean
        positions; mask: additive, (slots, clean + slots), or None where every slot sees all.
        """
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, dim=-1)
        q, k, v = layer.by_head(self._product(layer, "qkv", layer.attention_norm(x) * (1 + scale_a) + shift_a), rotary)
        keys, values = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(memory, (k, v), strict=True))
        mask = None if mask is None else mask.to(q.dtype)
        grouped = q.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
        x = x + (1 + gate_a) * self._product(layer, "attention_out", mixed.transpose(1, 2).flatten(2))
        hidden = self._product(layer, "mlp_in", layer.mlp_norm(x) * (1 + scale_m) + shift_m)
        return x + (1 + gate_m) * self._product(layer, "mlp_out", layer.activate(hidden))

    def _product(self, layer: AnyLayer, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(layer, name)(x)
        return out + self.updates[name](x) if name in self.updates else out


class Slots(nn.Module):
    """Weights that only noisy slots use in a block: all that is trained while the pretrained weights stay frozen.

    An input layer from codes, the layers' additions, and the output projection to the head's space. At the start they
    add nothing, except in block 0, where codes replace the embeddings of symbols that are not known yet.
    """

    layers: Sequence[SlotLayer]

    def __init__(self, stage: PipelineStage, shape: SlotShape) -> None:
        super().__init__()
        width = stage.architecture.width
        self.condition = NoiseCondition(shape.condition_dim)
        self.state_in = nn.Linear(shape.code_dim, width)
        nn.init.zeros_(self.state_in.weight)
        nn.init.zeros_(self.state_in.bias)
        layers = nn.ModuleList(SlotLayer(layer, shape) for layer in stage.layers)
        self.layers = cast(Sequence[SlotLayer], layers)
        norm = stage.layers[0].attention_norm
        assert isinstance(norm, nn.RMSNorm), "of pretrained layers, Llama's alone are grafted"
        self.way_out = OutputProjection(width, norm.eps)

    def restore_tables(self) -> None:
        """Compute what is not stored, for slots that were built on the meta device."""
        self.condition.frequencies = noise_frequencies()

    @torch.no_grad()
    def begin(self, norm: nn.RMSNorm, lens: Tensor, decoding: tuple[Tensor, Tensor] | None) -> None:
        """Set the start of training.

        norm: the model's final norm; lens: from a block's features to the model's last, (width, width + 1), a matrix
        and an offset; decoding: for block 0, from codes to embeddings, (width, code_dim) and (width,).
        """
        self.way_out.norm.load_state_dict(norm.state_dict())
        self.way_out.lens.weight.copy_(lens[:, :-1])
        self.way_out.lens.bias.copy_(lens[:, -1])
        if decoding is not None:
            self.state_in.weight.copy_(decoding[0])
            self.state_in.bias.copy_(decoding[1])


class OutputProjection(nn.Module):
    """A tuned lens (arXiv 2303.08112) from features in the middle of a model to those that its head reads, and the
    final norm; at the start the norm alone."""

    def __init__(self, width: int, epsilon: float | None) -> None:
        super().__init__()
        self.lens = nn.Linear(width, width)
        nn.init.zeros_(self.lens.weight)
        nn.init.zeros_(self.lens.bias)
        self.norm = nn.RMSNorm(width, eps=epsilon)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(features + self.lens(features))


CPU_ROWS = 64  # positions whose logits fit into a processor's cache
GPU_BYTES = 256 << 20  # logits in float32 on a GPU, which needs large products; about four times as much is in use


def rows_at_once(device: torch.device, vocabulary: int) -> int:
    """Positions whose logits are held at a time."""
    return CPU_ROWS if device.type == "cpu" else max(CPU_ROWS, GPU_BYTES // (4 * vocabulary))


@dataclass(frozen=True)
class StateLikelihood:
    """Log likelihood of each symbol given its noisy state: z . code / sigma^2, exact for codes of one norm."""

    z: Tensor  # (positions, code_dim)
    sigma: Tensor  # (positions, 1)

    def at(self, rows: slice, codes: Tensor) -> Tensor:
        """(rows, vocabulary)"""
        return (self.z[rows] / self.sigma[rows] ** 2) @ codes.T


@dataclass(frozen=True)
class GraftHead:
    """The pretrained model's head and the codes of its symbols, used a few positions at a time."""

    # All logits of a batch at once would fill the memory.

    weight: Tensor  # (vocabulary, width), float32 or bfloat16
    codes: Tensor  # (vocabulary, code_dim)
    bias: Tensor | None = None  # (vocabulary,)

    def logits(self, hidden: Tensor, likelihood: StateLikelihood | None = None) -> Tensor:
        """(positions, vocabulary) float32 from normed features (positions, width)."""
        return torch.cat([piece for _, piece in self.pieces(hidden, likelihood)])

    @torch.no_grad()
    def points(self, hidden: Tensor, likelihood: StateLikelihood, temperature: float = 1.0) -> Tensor:
        """Denoised points softmax(logits) @ codes: (positions, code_dim)."""
        pieces = self.pieces(hidden, likelihood)
        return torch.cat([(logits / temperature).softmax(dim=1) @ self.codes for _, logits in pieces])

    def pieces(self, hidden: Tensor, likelihood: StateLikelihood | None) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the positions, each with its logits."""
        count = rows_at_once(hidden.device, len(self.weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), count):
                rows = slice(begin, begin + count)
                logits = (hidden[rows].to(self.weight.dtype) @ self.weight.T).float()
                if self.bias is not None:
                    logits += self.bias
                if likelihood is not None:
                    logits += likelihood.at(rows, self.codes)
                yield rows, logits


Memory = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Noisy:
    """Noisy slots at one noise level."""

    z: Tensor  # states of the slots' own symbols: (batch, slots, code_dim)
    estimate: Tensor  # the running estimate of their codes, zero for none: (batch, slots, code_dim)
    sigma: Tensor  # (batch, slots or 1)
    first: Tensor  # true for the first slot of each chunk: (slots,) bool
    mask: Tensor | None = None  # additive, (slots, clean + slots); None: every slot sees all
    start: int = 0  # position of the first slot: one before the position that it fills

    def guess(self) -> Tensor:
        """The posterior mean of each slot's code, taken as Gaussian around the estimate E: (batch, slots, code_dim)."""
        # Codes have norm 1, so E leaves a variance of v = (1 - |E|^2) / code_dim a dimension, and the mean is E + v /
        # (v + sigma^2) (z - E).
        left = (1 - self.estimate.square().sum(dim=2, keepdim=True)).clamp_min(0) / self.z.shape[2]
        return self.estimate + left / (left + self.sigma[..., None] ** 2) * (self.z - self.estimate)

    def likelihood(self) -> StateLikelihood:
        """The likelihood of each slot's symbols: one row a slot."""
        return StateLikelihood(self.z.flatten(0, 1), self.sigma.expand(self.z.shape[:2]).reshape(-1, 1))


class GraftBlock(nn.Module):
    """One stage of a pretrained model and the weights of its noisy slots."""

    def __init__(self, stage: PipelineStage, slots: Slots) -> None:
        super().__init__()
        self.stage, self.added, self.index = stage, slots, stage.index

    def read(self, source: Tensor, caches: Sequence[LayerCache] | None = None) -> tuple[Tensor, Memory]:
        """The clean stream: features of the pretrained stage, and its layers' keys and values so far.

        source: symbols (batch, positions) int64 in block 0, else features (batch, positions, width), that come after
        what is in `caches`, and are appended to them.
        """
        stage = self.stage
        layers: Sequence[AnyLayer] = stage.layers
        x = stage.embedding(source) if stage.embedding is not None else source
        start = caches[0].length if caches else 0
        rotary, memory = stage.rotary[:, start : start + x.shape[1]], []
        for i, layer in enumerate(layers):
            x, keys, values = layer.clean(x, rotary, caches[i] if caches else None)
            memory.append((keys, values))
        return x, memory

    def enter(self, tokens: Tensor, first: Tensor) -> Tensor:
        """The start of block 0's slots: the embeddings of known tokens, else zero: (batch, slots, width).

        tokens: those that slots read, (batch, slots) int64, of which only those at `first` count.
        """
        assert self.stage.embedding is not None, "only the first block has an embedding"
        return self.stage.embedding(tokens) * first[:, None]

    def denoise(self, before: Tensor, noisy: Noisy, memory: Memory) -> Tensor:
        """Features of the slots: (batch, slots, width).

        before: of the block before, or of `enter`: (batch, slots, width); memory: from `read`.
        """
        read = noisy.guess().roll(1, dims=1)  # a slot reads the symbol before its own
        x = before + self.added.state_in(read) * ~noisy.first[:, None]
        rotary = self.stage.rotary[:, noisy.start : noisy.start + x.shape[1]]
        condition = self.added.condition(noisy.sigma)
        for added, layer, stored in zip(self.added.layers, self.stage.layers, memory, strict=True):
            x = added(layer, x, condition, rotary, stored, noisy.mask)
        return x

    def point(self, features: Tensor, noisy: Noisy, head: GraftHead, temperature: float = 1.0) -> Tensor:
        """Denoised points of the slots: (batch, slots, code_dim)."""
        hidden = self.added.way_out(features)
        return head.points(hidden.flatten(0, 1), noisy.likelihood(), temperature).view(noisy.z.shape)


def first_of_chunks(chunks: Tensor) -> Tensor:
    """True where a position begins a chunk: (positions,) bool. chunks: the chunk that each belongs to."""
    return torch.cat([torch.ones(1, dtype=torch.bool, device=chunks.device), chunks[1:] != chunks[:-1]])
