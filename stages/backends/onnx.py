"""The onnxruntime backend: graphs made of the loaded modules."""

from collections.abc import Sequence
from functools import lru_cache, partial

import onnxruntime
import torch
from torch import Tensor, nn

from stages.backends.attention import attention_shape
from stages.backends.base import Backend, BlockRunner, CleanPiece, Denoised, NoisyPiece, PictureRunner, StageRunner
from stages.backends.onnx_graphs import (
    AnyLayer,
    Graph,
    after_graph,
    before_graph,
    denoise_graph,
    head_graph,
    product_graph,
)
from stages.backends.packed import NOISE_LEVELS, Angles, PackedReader, PipelineLayer, PipelineRunner
from stages.backends.pictures import PackedPictures, Product
from stages.backends.rows import Rows
from stages.backends.runner_checks import Probe, checked
from stages.errors import InputError
from stages.model.architecture import WEIGHT_WORDS
from stages.model.block import Block
from stages.model.layers import soft_capped
from stages.model.llama import LlamaStage
from stages.model.pipeline import PipelineStage
from stages.pictures.part import PicturePart


class OnnxSession:
    """A graph with as many threads as torch uses. It holds its matrices in a layout of its own, and nothing of those
    that it was made of."""

    def __init__(self, graph: Graph) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # a thread that spins while it waits takes the processor from the event loop
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # buffers that a session keeps for itself would add up: there are two sessions for each layer
        options.enable_cpu_mem_arena = False
        matrices = [onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()) for x in graph.matrices.values()]
        options.add_external_initializers(list(graph.matrices), matrices)
        self.session = onnxruntime.InferenceSession(
            graph.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        results = self.session.run(self.outputs, {name: x.contiguous().numpy() for name, x in feeds.items()})
        return dict(zip(self.outputs, map(torch.from_numpy, results), strict=True))

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The only output, of contiguous inputs in the graph's order."""
        feeds = {name: x.numpy() for name, x in zip(self.inputs, inputs, strict=True)}
        (result,) = self.session.run(self.outputs, feeds)
        return torch.from_numpy(result)


# Attention is torch's for every backend, and onnxruntime computes what lies between: rows of several requests then
# share every product, and a stage of any family is the same few nodes. A whole graph takes one request at a time,
# because each has read another length.
class OnnxLayer(PipelineLayer):
    """Rows of several pieces through one layer of any family."""

    def __init__(self, part: Block | PipelineStage, layer: AnyLayer, int8: bool) -> None:
        self.shape = attention_shape(layer)
        self.before = OnnxSession(before_graph(part, layer, int8))
        self.after = OnnxSession(after_graph(part, layer, int8))

    def project(self, x: Tensor, angles: Angles) -> Tensor:
        # a copy, so that it lies where torch's tensors do: the order of additions depends on addresses
        return self.before(x[None], *angles)[0].clone()

    def finish(self, x: Tensor, mixed: Tensor) -> None:
        x.copy_(self.after(x[None], mixed[None])[0])


class OnnxReader(PackedReader):
    """The clean stream of a part."""

    def __init__(self, part: Block | PipelineStage, layers: Sequence[OnnxLayer]) -> None:
        super().__init__(part, layers, part.layers[0].mlp_in.out_features)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        """Unpadded but for whole vectors: these kernels add up one row as they add up many."""
        return Rows.of(counts, self.hidden, least=1)

    def spread(self, factors: Tensor) -> Angles:
        """cos and sin of each row, (rows, head_dim / 2)."""
        # of keys, whose factors are not scaled, and of the half whose sine is positive
        return factors[:, 0, 1, 0, 0].contiguous(), factors[:, 1, 1, 0, 1].contiguous()


class OnnxBlock(BlockRunner):
    def __init__(self, block: Block, int8: bool) -> None:
        self.block = block
        self.reader = OnnxReader(block, [OnnxLayer(block, layer, int8) for layer in block.layers])
        self.session = OnnxSession(denoise_graph(block, int8))
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
        head = OnnxSession(head_graph(stage, int8)) if stage.is_last else None
        cap = stage.architecture.logit_softcap if isinstance(stage, LlamaStage) else None
        super().__init__(OnnxReader(stage, layers), None if head is None else partial(_logits, head, cap))
        if stage.head is not None:
            _free(stage.head)


def _logits(head: OnnxSession, cap: float | None, x: Tensor) -> Tensor:
    logits = head(x[None])[0]
    return logits if cap is None else soft_capped(logits, cap)


def _free(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.Linear):
            each.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class OnnxBackend(Backend):
    """onnxruntime on graphs made of the loaded modules, float32."""

    name = "onnxruntime"
    int8 = False

    @property
    def machine(self) -> str:
        return f"{super().machine}, onnxruntime {onnxruntime.__version__}"

    def block(self, block: Block) -> BlockRunner:
        runner = OnnxBlock(block, self.int8)
        Probe(block).check(runner, self.int8)
        return checked(runner, block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        if isinstance(stage, LlamaStage) and stage.architecture.experts is not None:
            raise InputError(f"the backend {self.name} does not run mixtures of experts: choose --backend torch")
        if isinstance(stage, LlamaStage) and stage.architecture.weights != "float32":
            words = WEIGHT_WORDS[stage.architecture.weights]
            raise InputError(f"the backend {self.name} does not run {words}: choose --backend torch")
        probe = Probe(stage)
        runner = OnnxStage(stage, self.int8)
        probe.check(runner, self.int8)
        return checked(runner, stage)

    def picture(self, part: PicturePart) -> PictureRunner:
        probe = Probe(part)
        # these kernels add up one row as they add up many
        runner = PackedPictures(part, partial(_product, self.int8), least=1)
        probe.check(runner, self.int8)
        return checked(runner, part)


def _product(int8: bool, linears: Sequence[nn.Linear]) -> Product:
    """Takes the matrices over, as `OnnxStage` does."""
    session = OnnxSession(product_graph(linears, int8))
    for linear in linears:
        _free(linear)
    # a copy, so that it lies where torch's tensors do, and may be written to
    return lambda x: session(x[None])[0].clone()


# torch has no int8 backend here: one row through ten layers took 3.5 ms with MatMulNBits, 3.3 with fbgemm's
# linear_dynamic and 5.1 with oneDNN's (one scale for all rows), 5.7 with _int_mm, 41 with _weight_int8pack_mm.
class OnnxInt8Backend(OnnxBackend):
    """The same with matrices in int8, and what meets them rounded as it comes."""

    name = "onnxruntime-int8"
    int8 = True
