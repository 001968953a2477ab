"""The torch backend, by the family of what it computes."""

from __future__ import annotations

from stages.backends.base import Backend, BlockRunner, StageRunner
from stages.backends.grafted import GraftRunner
from stages.backends.independence import checked_block, checked_stage
from stages.backends.packed import PackedBlock
from stages.backends.packed_llama import packed_stage
from stages.block import Block
from stages.families import PipelineStage
from stages.grafting.part import GraftPart


class TorchBackend(Backend):
    """PyTorch, eager."""

    name = "torch"

    def block(self, block: Block | GraftPart) -> BlockRunner:
        if isinstance(block, GraftPart):
            return GraftRunner(block)
        return checked_block(PackedBlock(block), block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        return checked_stage(packed_stage(stage), stage)
