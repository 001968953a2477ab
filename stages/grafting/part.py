"""A grafted block with all that its host needs: one file of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.families import PipelineStage, new_stage
from stages.grafting.architecture import GraftArchitecture
from stages.grafting.block import GraftBlock
from stages.grafting.head import Head
from stages.grafting.slots import Slots
from stages.llama.architecture import LlamaArchitecture
from stages.unfilled import without_memory


class GraftPart(nn.Module):
    """A block, the codes, and the head, which every block reads its slots' odds with.

    The head is the last stage's own, and where the model's head is its embedding, the first block has it in that; the
    others have a copy.
    """

    codes: Tensor

    def __init__(self, architecture: GraftArchitecture, index: int) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.index = index
        stage = new_stage(a.base, index)
        self.block = GraftBlock(stage, Slots(stage, a.shape))
        is_llama = isinstance(a.base, LlamaArchitecture)
        has_one = stage.is_last or (index == 0 and isinstance(a.base, LlamaArchitecture) and a.base.tied_head)
        self.own_head = None if has_one else nn.Linear(a.width, a.vocabulary, bias=not is_llama)
        self.register_buffer("codes", torch.zeros(a.vocabulary, a.code_dim))

    @staticmethod
    def of(architecture: GraftArchitecture, block: GraftBlock, codes: Tensor, last: PipelineStage) -> GraftPart:
        """A part made of what is in memory. codes: (vocabulary, code_dim). :param last: the stage with the head."""
        with without_memory():
            part = GraftPart(architecture, block.index)
        part.block, part.codes = block, codes
        if part.own_head is not None:
            assert isinstance(last.head, nn.Linear), "of several stages, the last has a matrix of its own"
            part.own_head = last.head
        return part

    @property
    def head(self) -> Head:
        stage = self.block.stage
        found = self.own_head or stage.head or stage.embedding
        assert found is not None
        bias = found.bias if isinstance(found, nn.Linear) else None
        return Head(found.weight, self.codes, bias)

    @property
    def embedding(self) -> nn.Embedding | None:
        return self.block.stage.embedding

    def restore_tables(self) -> None:
        """Compute what is not stored, for a part that was built on the meta device."""
        self.block.stage.restore_tables()
        self.block.added.restore_tables()
