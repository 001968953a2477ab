"""The torch backend, by the family of the model that it runs."""

from __future__ import annotations

from typing import cast

from stages.backends.base import Backend, BlockRunner, StageRunner
from stages.backends.batch_invariance import checked_block, checked_stage
from stages.backends.packed import PackedBlock
from stages.backends.packed_llama import packed_stage
from stages.model.block import Block
from stages.model.families import FamilyPart, PipelineStage


class TorchBackend(Backend):
    """PyTorch, eager."""

    name = "torch"

    def block(self, block: Block | FamilyPart) -> BlockRunner:
        if isinstance(block, FamilyPart):
            return cast(BlockRunner, block.runner())
        return checked_block(PackedBlock(block), block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        return checked_stage(packed_stage(stage), stage)
