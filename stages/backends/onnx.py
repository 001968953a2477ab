"""The onnxruntime backend: one piece at a time, so company changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import onnx
import onnxruntime
import torch
from torch import Tensor

from stages.ar import ArStage
from stages.backends.agreement import check_block, check_stage
from stages.backends.base import Backend, BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.backends.graph import denoise_graph, head_graph, read_graph
from stages.backends.packed import NOISE_LEVELS
from stages.block import Block
from stages.errors import InputError
from stages.families import PipelineStage
from stages.layers import LayerCache
from stages.llama.stage import LlamaStage


class Session:
    """A graph ready to run, with as many threads as torch uses."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # a thread that spins while it waits takes the processor from the event loop
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.names = [output.name for output in self.session.get_outputs()]

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        results = self.session.run(self.names, {name: x.contiguous().numpy() for name, x in feeds.items()})
        return dict(zip(self.names, map(torch.from_numpy, results), strict=True))


class OnnxReader:
    """The clean stream of a part."""

    def __init__(self, part: Block | ArStage, int8: bool) -> None:
        self.part = part
        self.session = Session(read_graph(part, int8))

    def read(self, piece: CleanPiece) -> Tensor:
        """See `BlockRunner.read`."""
        embedding = self.part.embedding
        x = piece.source if embedding is None else embedding(piece.source)
        results = self.session.run({"x": x[None], **memory(piece.caches)})
        for i, cache in enumerate(piece.caches):
            cache.append(*(self._by_head(results[f"new_{name}_{i}"]) for name in ("keys", "values")))
        return results["features"][0]

    def branch(self, piece: BranchPiece) -> Tensor:
        """See `StageRunner.branch`."""
        embedding, branches = self.part.embedding, len(piece.source)
        x = piece.source if embedding is None else embedding(piece.source)
        return self.session.run({"x": x, **memory(piece.caches, branches)})["features"]

    def _by_head(self, x: Tensor) -> Tensor:
        """(1, positions, width) -> (1, heads, positions, head_dim)."""
        return x.unflatten(2, (self.part.architecture.heads, -1)).transpose(1, 2)


class OnnxBlock(BlockRunner):
    def __init__(self, block: Block, int8: bool) -> None:
        self.block = block
        self.reader = OnnxReader(block, int8)
        self.session = Session(denoise_graph(block, int8))
        self.modulation = lru_cache(NOISE_LEVELS)(partial(_modulation, block))

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.reader.read(piece) for piece in pieces]

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
        }
        results = self.session.run({**feeds, **memory(piece.caches)})
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


class OnnxStage(StageRunner):
    def __init__(self, stage: ArStage, int8: bool) -> None:
        self.reader = OnnxReader(stage, int8)
        self.head = Session(head_graph(stage, int8)) if stage.is_last else None

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.reader.read(piece) for piece in pieces]

    @torch.inference_mode()
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [self.reader.branch(piece) for piece in pieces]

    @torch.inference_mode()
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        assert self.head is not None, "only the last stage has a head"
        return [self.head.run({"x": piece[None]})["logits"][0] for piece in hidden]


class OnnxBackend(Backend):
    """onnxruntime on graphs made of the loaded modules, float32."""

    name = "onnxruntime"
    int8 = False

    def block(self, block: Block) -> BlockRunner:
        runner = OnnxBlock(block, self.int8)
        check_block(runner, block, self.int8)
        return runner

    def stage(self, stage: PipelineStage) -> StageRunner:
        if isinstance(stage, LlamaStage):
            raise InputError(f"the backend {self.name} has no graph for pretrained models; choose --backend torch")
        runner = OnnxStage(stage, self.int8)
        check_stage(runner, stage, self.int8)
        return runner


class OnnxInt8Backend(OnnxBackend):
    """The same with matrices in int8 and activations quantised as they come."""

    name = "onnxruntime-int8"
    int8 = True


def memory(caches: Sequence[LayerCache], sequences: int = 1) -> dict[str, Tensor]:
    """A graph's inputs for attention of some `sequences` over what the caches hold."""
    feeds = {"position": torch.tensor([caches[0].length])}
    for i, cache in enumerate(caches):
        for name, stored in zip(("keys", "values"), cache.stored(), strict=True):
            feeds[f"{name}_{i}"] = stored.expand(sequences, -1, -1, -1)
    return feeds
