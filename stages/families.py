"""The families of AR pipelines: byte models trained here, and pretrained models of the Llama family."""

from __future__ import annotations

from stages.ar import ArStage
from stages.architecture import Architecture
from stages.llama.architecture import LlamaArchitecture
from stages.llama.stage import LlamaStage

PipelineStage = ArStage | LlamaStage


def new_stage(architecture: Architecture | LlamaArchitecture, index: int) -> PipelineStage:
    """A stage of the architecture's family, with weights as before training."""
    return ArStage(architecture, index) if isinstance(architecture, Architecture) else LlamaStage(architecture, index)
