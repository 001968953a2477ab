"""A draft head: a few layers that continue from the hidden states of a model, to draft its next symbols.

At each place it reads the model's last hidden state and the symbol after it. Its output stands for the hidden state of
the next place, so it can go on from itself (EAGLE, Li et al. 2024, arXiv 2401.15077).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from stages.errors import ShapeError
from stages.model.llama import LlamaArchitecture, LlamaStage


class DraftHead(nn.Module):
    """The layers, and what they read. It gives odds of the model's most frequent symbols only, by the model's own head:
    a product with all of them would be most of its time, and rare symbols are seldom guessed right."""

    symbols: Tensor

    def __init__(self, architecture: LlamaArchitecture, count: int, layers: int = 1) -> None:
        """:param architecture: of the model.
        :param count: symbols that it can guess. Raises ShapeError for more than there are."""
        super().__init__()
        if not 1 <= count <= architecture.vocabulary:
            raise ShapeError(f"a draft head of {count} symbols, the model has {architecture.vocabulary}")
        width, epsilon = architecture.width, architecture.norm_epsilon
        self.register_buffer("symbols", torch.zeros(count, dtype=torch.int32))
        self.model_norm = nn.RMSNorm(width, eps=epsilon)  # the model's own
        self.state_norm, self.symbol_norm = (nn.RMSNorm(width, eps=epsilon) for _ in range(2))
        self.join = nn.Linear(2 * width, width, bias=False)
        # The second of two stages: it has layers, a norm and a head, and no embedding.
        last = replace(architecture, layers=(1, layers), vocabulary=max(count, 2), tied_head=False)
        self.stage = LlamaStage(last, 1)

    def joined(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Input of the layers. states: (..., width), normed by `model_norm`, or what they gave at the place before;
        embedded: rows of the model's head for the symbols after them, likewise."""
        return self.join(torch.cat([self.symbol_norm(embedded), self.state_norm(states)], dim=-1))

    def stored(self) -> dict[str, Tensor]:
        """Tensors of its file: all but the rows of the model's head."""
        return {name: tensor for name, tensor in self.state_dict().items() if name != "stage.head.weight"}
