"""One block of the chain: clean stream, noisy slots, next-byte head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import Architecture
from stages.model.layers import Layer, LayerCache, initialise, listed, rotary_table
from stages.model.randomness import Codes
from stages.model.samplers import input_scale

FOURIER_FEATURES = 16


def noise_frequencies() -> Tensor:
    """Angular frequencies of the Fourier features of c_noise: (16,) float32."""
    with torch.device("cpu"):  # powers on the meta device would import torch's compiler
        return 2.0 ** torch.linspace(-1, 5, FOURIER_FEATURES)


class NoiseCondition(nn.Module):
    """Embeds c_noise = ln(sigma)/4 for AdaLN: sigma (batch, positions) -> (batch, positions, condition_dim)."""

    frequencies: Tensor

    def __init__(self, condition_dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", noise_frequencies(), persistent=False)
        self.project = nn.Linear(2 * FOURIER_FEATURES, condition_dim)

    def forward(self, sigma: Tensor) -> Tensor:
        angle = (sigma.log() / 4)[..., None] * self.frequencies
        return F.silu(self.project(torch.cat([angle.cos(), angle.sin()], dim=-1)))


class Block(nn.Module):
    """Layers of one noise range. Holds everything that a host or a worker needs, and nothing from other blocks.

    :param index: position in the chain; block 0 gets the most noise.
    """

    layers: Sequence[Layer]
    codes: Tensor
    rotary: Tensor

    def __init__(self, architecture: Architecture, index: int, codes: Codes) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index, self._codes = a, index, codes
        # Standard deviation of a unit code's entries, which c_in should undo: not the papers' 0.5.
        self.data_std = a.code_dim**-0.5
        self.embedding = nn.Embedding(a.vocabulary, a.width)
        self.state_in = nn.Linear(a.code_dim, a.width, bias=False)
        self.estimate_in = nn.Linear(a.code_dim, a.width, bias=False)
        self.slot = nn.Parameter(torch.zeros(a.width))
        self.condition = NoiseCondition(a.condition_dim)
        self.layers = listed(Layer(a.width, a.heads, a.condition_dim) for _ in range(a.layers))
        self.noisy_norm, self.noisy_head = nn.RMSNorm(a.width), nn.Linear(a.width, a.vocabulary)
        self.clean_norm, self.clean_head = nn.RMSNorm(a.width), nn.Linear(a.width, a.vocabulary)
        self.register_buffer("codes", codes.table(), persistent=False)
        self.register_buffer("rotary", rotary_table(a.context_length, a.head_dim), persistent=False)
        initialise(self, a.layers)

    def restore_tables(self) -> None:
        """Compute the tables, which are not stored, for a block that was built on the meta device."""
        a = self.architecture
        self.codes = self._codes.table()
        self.rotary = rotary_table(a.context_length, a.head_dim)
        self.condition.frequencies = noise_frequencies()

    def read(
        self, tokens: Tensor, caches: list[LayerCache] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run clean positions, appending to `caches`.

        tokens: (batch, positions) int64. Returns features (batch, positions, width) and each layer's keys and values
        of all clean positions so far.
        """
        x = self.embedding(tokens)
        start = caches[0].length if caches else 0
        rotary = self.rotary[:, start : start + x.shape[1]]
        memory = []
        for i, layer in enumerate(self.layers):
            x, keys, values = layer.clean(x, rotary, caches[i] if caches else None)
            memory.append((keys, values))
        return x, memory

    def next_byte(self, features: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the token after each clean position."""
        return self.clean_head(self.clean_norm(features))

    def predict(self, tokens: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the token after each of `tokens` (batch, positions)."""
        return self.next_byte(self.read(tokens)[0])

    def denoise(
        self,
        z: Tensor,
        estimate: Tensor,
        sigma: Tensor,
        memory: list[tuple[Tensor, Tensor]],
        start: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, slots, vocabulary) of the token in each noisy slot.

        z, estimate: (batch, slots, code_dim); sigma: (batch, slots or 1); memory: from `read`;
        start: the position that the first slot fills.

        The likelihood of each token given its own slot, z . code / sigma^2, is known in closed form (codes have
        equal norms), so it is added to the logits, and the layers learn only the context's share. With a head of
        zeros the block is the optimal context-free denoiser.
        """
        x = self.state_in(z * input_scale(sigma, self.data_std)[..., None])
        x = x + self.estimate_in(estimate / self.data_std) + self.slot
        rotary = self.rotary[:, start : start + z.shape[1]]
        condition = self.condition(sigma)
        for layer, (keys, values) in zip(self.layers, memory, strict=True):
            x = layer.noisy(x, condition, rotary, keys, values, mask)
        likelihood = (z @ self.codes.T) / (sigma * sigma)[..., None]
        return self.noisy_head(self.noisy_norm(x)).float() + likelihood

    def point(self, logits: Tensor) -> Tensor:
        """The denoised point D = softmax(logits) @ C: (batch, slots, code_dim)."""
        return logits.softmax(dim=-1) @ self.codes
