"""The torch backend, by the family of what it computes."""

from __future__ import annotations

from stages.backends.base import Backend, BlockRunner, StageRunner
from stages.backends.independence import checked_block, checked_stage
from stages.backends.packed import PackedBlock, PackedStage
from stages.backends.packed_llama import PackedLlamaStage
from stages.block import Block
from stages.families import PipelineStage
from stages.llama.stage import LlamaStage


class TorchBackend(Backend):
    """PyTorch, eager."""

    name = "torch"

    def block(self, block: Block) -> BlockRunner:
        return checked_block(PackedBlock(block), block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        runner = PackedLlamaStage(stage) if isinstance(stage, LlamaStage) else PackedStage(stage)
        return checked_stage(runner, stage)
