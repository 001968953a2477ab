"""The onnxruntime backend: graphs made of the loaded modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from stages.backends.agreement import StageProbe, check_block
from stages.backends.base import Backend, BlockRunner, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.backends.denoise_graph import denoise_graph
from stages.backends.independence import checked_block, checked_stage
from stages.backends.layer_graphs import head_graph
from stages.backends.onnx_layer import OnnxLayer, OnnxReader
from stages.backends.onnx_session import Session
from stages.backends.packed import NOISE_LEVELS, PipelineRunner
from stages.block import Block
from stages.errors import InputError
from stages.families import PipelineStage
from stages.grafting.part import GraftPart


class OnnxBlock(BlockRunner):
    def __init__(self, block: Block, int8: bool) -> None:
        self.block = block
        self.reader = OnnxReader(block, [OnnxLayer(block, layer, int8) for layer in block.layers], few=1)
        self.session = Session(denoise_graph(block, int8))
        self.modulation = lru_cache(NOISE_LEVELS)(partial(_modulation, block))

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self.reader.read(pieces)

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        sigma, std = piece.sigma, self.block.data_std
        feeds = {
            "z": piece.z[None] * (sigma**2 + std**2) ** -0.5,
            "estimate": piece.estimate[None] / std,
            "likelihood": piece.z[None] / sigma**2,
            "modulation": self.modulation(sigma),
            "temperature": torch.tensor([piece.divisor]),
            "position": torch.tensor([piece.start]),
        }
        for i, cache in enumerate(piece.caches):
            feeds[f"keys_{i}"], feeds[f"values_{i}"] = cache.stored()
        results = self.session.run(feeds)
        return Denoised(results["logits"][0], results["points"][0])


def _modulation(block: Block, sigma: float) -> Tensor:
    """AdaLN's numbers at one noise level, each norm's weight included: (layers x 6, 1, width)."""
    condition = block.condition(torch.full((1,), sigma))
    rows = []
    for layer in block.layers:
        assert layer.modulation is not None
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = layer.modulation(condition).chunk(6, dim=-1)
        weight_a, weight_m = layer.attention_norm.weight * (1 + scale_a), layer.mlp_norm.weight * (1 + scale_m)
        rows += [weight_a, shift_a, 1 + gate_a, weight_m, shift_m, 1 + gate_m]
    return torch.stack(rows)


class OnnxStage(PipelineRunner):
    """Takes the stage's matrices over: each is freed when a session has it, so that memory stays near one stage."""

    def __init__(self, stage: PipelineStage, int8: bool) -> None:
        layers = []
        for layer in stage.layers:
            layers.append(OnnxLayer(stage, layer, int8))
            _free(layer)
        head = Session(head_graph(stage, int8)) if stage.is_last else None
        super().__init__(OnnxReader(stage, layers), None if head is None else lambda x: head(x[None])[0])
        if stage.head is not None:
            _free(stage.head)


def _free(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.Linear):
            each.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class OnnxBackend(Backend):
    """onnxruntime on graphs made of the loaded modules, float32."""

    name = "onnxruntime"
    int8 = False

    def block(self, block: Block | GraftPart) -> BlockRunner:
        if isinstance(block, GraftPart):
            raise InputError(f"the backend {self.name} does not run grafted blocks: choose --backend torch")
        runner = OnnxBlock(block, self.int8)
        check_block(runner, block, self.int8)
        return checked_block(runner, block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        probe = StageProbe(stage)
        runner = OnnxStage(stage, self.int8)
        probe.check(runner, self.int8)
        return checked_stage(runner, stage)


class OnnxInt8Backend(OnnxBackend):
    """The same with matrices in int8, and what meets them rounded as it comes."""

    name = "onnxruntime-int8"
    int8 = True
