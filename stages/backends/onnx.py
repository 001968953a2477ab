"""Stages of AR models on onnxruntime, with graphs made from the loaded modules."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.attention import Heads
from stages.backends.onnx_graphs import OUTSIDE, AnyLayer, Graph, after_graph, before_graph, product_graph
from stages.backends.packed import Attend, PackedReader, PipelineRunner, normed_head
from stages.backends.rows import PRODUCT_THREADS, Rows
from stages.errors import CheckpointError
from stages.model.few_bits import GroupedLinear, Int8Linear, QuantLinear
from stages.model.layers import TiedHead
from stages.model.pipeline import PipelineStage

# Bytes of matrices: fewer are read before another thread wakes up.
BYTES_PER_THREAD = 1 << 20


class OnnxSession:
    """A graph with its own threads. It holds its matrices in its own layout, and keeps none of the tensors that it was
    made from."""

    def __init__(self, graph: Graph, keeps_few_bits: bool = False) -> None:
        options = onnxruntime.SessionOptions()
        some = sum(x.nbytes for x in graph.matrices.values()) // BYTES_PER_THREAD
        options.intra_op_num_threads = min(PRODUCT_THREADS.get(), 1 + some)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # a spinning thread takes the processor from the event loop
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # buffers that a session keeps would add up: each layer has a session
        options.enable_cpu_mem_arena = False
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()) for name, x in graph.matrices.items()}
        # A session copies tensors that it does not lay out anew. It uses these as they are, so they must outlive it.
        self.few_bits = {name: graph.matrices[name] for name in graph.few_bits}
        for name in self.few_bits:
            options.add_initializer(name, values[name])
        copied = [name for name in values if name not in self.few_bits]
        options.add_external_initializers(copied, [values[name] for name in copied])
        # It checks that the named file exists, but does not read it.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(OUTSIDE.parent))
        self.session = onnxruntime.InferenceSession(
            graph.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]
        if not keeps_few_bits and not reads_few_bits():
            for given in self.few_bits.values():
                give_back(given)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs for contiguous inputs, both in the graph's order."""
        feeds = {name: x.numpy() for name, x in zip(self.inputs, inputs, strict=True)}
        return list(map(torch.from_numpy, self.session.run(None, feeds)))

    def bound(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], None]:
        """A call that computes these outputs from the current contents of these inputs: contiguous float32, in the
        graph's order. It keeps neither: their memory must outlive it."""
        binding = self.session.io_binding()
        for bind, names, tensors in (
            (binding.bind_input, self.inputs, inputs),
            (binding.bind_output, self.outputs, outputs),
        ):
            for name, x in zip(names, tensors, strict=True):
                bind(name, "cpu", 0, np.float32, tuple(x.shape), x.data_ptr())
        return partial(self.session.run_with_iobinding, binding)


SCALE_ERROR = 0.02  # relative error of a product; rounding a row's groups costs 0.006 for weights of few bits
BATCH_SIZES = (1, 2, 3, 4, 7, 16, 33)
# A session lays a matrix out from a copy of it: the head of SmolLM2, 113 of its stage's 175 MB, would briefly exist
# three times.
BLOCK_BYTES = 32 << 20
FEW_ROWS = 16  # up to this, the tensors of a pass are kept for the next one


class OnnxProduct:
    """x @ weight.T + bias as a graph of its own. It takes the weight and bias over."""

    def __init__(self, linear: nn.Linear | TiedHead) -> None:
        self.sessions = list(map(OnnxSession, _block_graphs(linear)))
        self.least = min_rows(bits_of(linear))
        _free(linear)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        padded = F.pad(x, (0, 0, 0, max(0, self.least - len(x))))[None]
        results = [session(padded)[0][0, : len(x)] for session in self.sessions]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def _block_graphs(linear: nn.Linear | TiedHead) -> Iterator[Graph]:
    """Graphs of blocks of rows. Memory of a block with no other owner is given back when the next is requested."""
    # a tied head has no weights of its own
    whole = linear.state_dict() or {"weight": linear.weight.detach()}
    numbers = max(whole.values(), key=lambda x: x.nbytes)
    if numbers.nbytes <= BLOCK_BYTES:
        yield product_graph(linear)
        return
    kind, width = (nn.Linear, numbers.shape[1]) if isinstance(linear, TiedHead) else (type(linear), linear.in_features)
    count = BLOCK_BYTES // (numbers.nbytes // len(numbers))
    _free(linear)
    owned = is_owned(numbers)
    for begin in range(0, len(numbers), count):
        rows = slice(begin, begin + count)
        with torch.device("meta"):
            block = kind(width, len(numbers[rows]), bias="bias" in whole).requires_grad_(False)
        block.load_state_dict({name: x[rows] for name, x in whole.items()}, assign=True)
        yield product_graph(block)
        if owned:
            give_back(numbers[rows])


def bits_of(linear: nn.Linear | TiedHead) -> int:
    return linear.bits if isinstance(linear, GroupedLinear) else 32


@lru_cache
def min_rows(bits: int) -> int:
    """The number of rows from which a row's product is batch-invariant on this machine: its kernels promise nothing.

    Raises CheckpointError if they compute something else.
    """
    generator, (numbers, rows) = torch.Generator().manual_seed(0), (1056, BATCH_SIZES[-1])
    linear = {4: QuantLinear, 8: Int8Linear, 32: nn.Linear}[bits](numbers, numbers, bias=False).requires_grad_(False)
    if isinstance(linear, GroupedLinear):
        codes = torch.randint(256, linear.codes.shape, generator=generator, dtype=torch.uint8)
        codes[:8], codes[8:16] = 0x7F, 0x81  # the largest sums, which overflow narrow registers
        linear.codes = codes.view(linear.codes.dtype)
        linear.scales.uniform_(0.5, 1, generator=generator)
    x = torch.cat([torch.randn(rows - 1, numbers, generator=generator), torch.ones(1, numbers)])
    product, expected = OnnxSession(product_graph(linear)), linear(x)
    whole = product(x[None])[0][0]
    error = float(((whole - expected).norm(dim=1) / expected.norm(dim=1)).max())
    if not error <= SCALE_ERROR:
        raise CheckpointError(
            f"this machine multiplies {bits}-bit weights wrongly (relative error {error:.2g}): import the model "
            "with other --weights"
        )
    same = [torch.equal(product(x[None, :count])[0][0], whole[:count]) for count in BATCH_SIZES]
    return next(count for i, count in enumerate(BATCH_SIZES) if all(same[i:]))


@lru_cache
def reads_few_bits() -> bool:
    """True if products of few bits still need the given codes and scales after a session has laid them out."""
    generator = torch.Generator().manual_seed(0)  # not the generator of a training or test in this process
    for kind in (QuantLinear, Int8Linear):
        linear = kind(1024, 64, bias=False)
        linear.codes.random_(100, generator=generator)
        linear.scales.uniform_(0.5, 1, generator=generator)
        session = OnnxSession(product_graph(linear), keeps_few_bits=True)
        rows = [torch.ones(1, count, 1024) for count in BATCH_SIZES]
        before = [session(x)[0] for x in rows]
        for given in session.few_bits.values():
            given.zero_()
        if not all(session(x)[0].equal(y) for x, y in zip(rows, before, strict=True)):
            return True
    return False


# torch computes attention, and onnxruntime the rest: rows of several requests then share
# every product, and a stage of any family is the same few nodes. A whole graph could take only one request at a
# time, because each has another length.
class OnnxReader(PackedReader):
    """The clean stream of a part. It frees the modules that its sessions were made from."""

    def __init__(self, part: PipelineStage) -> None:
        layers = list[AnyLayer](part.layers)
        super().__init__(part, (), layers[0].mlp_in.out_features)
        self.architecture = part.architecture
        bits = {bits_of(each) for each in layers[0].modules() if isinstance(each, nn.Linear)}
        self.least = max(map(min_rows, bits))
        self.first = OnnxSession(before_graph(part, layers[0]))
        self.bound = dict[tuple[int, int], BoundLayers]()  # by rows and layers
        # From attention to attention: a call takes as long as a small product, so a layer has one call, not two.
        self.others, self.kinds_after = list[OnnxSession](), [*self.kind_of[1:], None]
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            graph = after_graph(part, layer, following)
            _free(layer)  # before the session lays out the graph's matrices
            self.others.append(OnnxSession(graph))

    def take_layers(self, x: Tensor, positions: Tensor, attend: Attend) -> None:
        rows, layers = len(x), len(self.kind_of)
        if (bound := self.bound.get((rows, layers))) is None:
            bound = BoundLayers(self, rows)
            if rows <= FEW_ROWS:
                self.bound[rows, layers] = bound
        bound.take(x, positions, attend)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        # between products, onnxruntime's operations give the same bits wherever a thread's share ends
        return replace(Rows.of(counts, self.hidden, 1, self.least), threads=self.threads)


class BoundLayers:
    """The sessions of a reader, bound to tensors for a fixed number of rows: looking up the addresses of its inputs and
    making its outputs would take a call as long as a small operation."""

    @torch.inference_mode(False)
    def __init__(self, reader: OnnxReader, rows: int) -> None:
        a, kind_of = reader.architecture, reader.kind_of
        self.x, self.other = torch.empty(2, 1, rows, a.width)
        mixed = torch.zeros(1, rows, a.heads * a.head_dim)
        qkv = torch.zeros(1, rows, (a.heads + 2 * a.kv_heads) * a.head_dim)
        self.heads = Heads(qkv[0], a.heads, a.kv_heads, mixed[0])
        self.angles = torch.empty(len(reader.kinds), 2, rows, a.head_dim // 2)
        self.tables = [kind.rotary.transpose(0, 1) for kind in reader.kinds]  # cos and sin: (2, positions, half)
        self.first = reader.first.bound([self.x, *self.angles[kind_of[0]]], [qkv])
        self.others, source, target = list[Callable[[], None]](), self.x, self.other
        for session, following in zip(reader.others[: len(kind_of)], reader.kinds_after, strict=False):
            inputs, outputs = [source, mixed], [target]
            if following is not None:
                inputs, outputs = [*inputs, *self.angles[following]], [target, qkv]
            self.others.append(session.bound(inputs, outputs))
            source, target = target, source
        self.result = source

    def take(self, x: Tensor, positions: Tensor, attend: Attend) -> None:
        """See `PackedReader.take_layers`."""
        self.x[0].copy_(x)
        for angles, table in zip(self.angles, self.tables, strict=True):
            torch.index_select(table, 1, positions, out=angles)
        self.first()
        for number, after in enumerate(self.others):
            if (mixed := attend(number, self.heads)) is not self.heads.mixed:
                self.heads.mixed.copy_(mixed)
            after()
        x.copy_(self.result[0])


def onnx_stage(stage: PipelineStage) -> PipelineRunner:
    """The runner of a stage whose matrices sessions take over: each is freed once a session has it, so memory stays
    near a stage."""
    # The head first, which is the largest matrix: little else is held yet besides its layouts.
    head = None if stage.head is None else OnnxProduct(stage.head)
    return PipelineRunner(OnnxReader(stage), normed_head(stage, head))


def _free(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, GroupedLinear):
            for name, _ in list(each.named_buffers()):
                setattr(each, name, torch.empty(0))
        elif isinstance(each, nn.Linear):
            each.weight = nn.Parameter(torch.empty(0), requires_grad=False)


# Memory of tensors, given back to the system page by page before the tensor itself ends.
def is_owned(tensor: Tensor) -> bool:
    """True if only `tensor` refers to its memory: no view, no other name."""
    # the tensor's own reference, and the one of the queried object
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2)


def give_back(tensor: Tensor) -> None:
    """Give the memory of a contiguous tensor back while it exists: its contents must not be read again.

    Covers whole pages only, and does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
