"""A GGUF file: weights in one of its quantisations, and the tokenizer, in one file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onesweep.stages.errors import CheckpointError, InputError, ShapeError
from onesweep.stages.importing.gguf_tokenizer import gguf_speech
from onesweep.stages.importing.source import Shape, Source
from onesweep.stages.model.llama import LlamaArchitecture, RopeScaling, stretch

# The reader of the package gguf, which by itself reads as many elements as a damaged file says it has.
MAX_ELEMENTS = 1 << 22  # of an array: tokens of the largest vocabulary


def gguf_package() -> Any:  # noqa: ANN401
    """Raises InputError where it is missing."""
    try:
        import gguf
    except ImportError:
        raise InputError("a .gguf file is read with the package gguf: pip install 'onesweep[pretrained]'") from None
    return gguf


def open_gguf(path: Path) -> Any:  # noqa: ANN401
    """Its `GGUFReader` of a file. Raises whatever a damaged file makes that raise, and InputError."""
    gguf = gguf_package()
    base: Any = gguf.GGUFReader
    array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

    class Reader(base):
        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:  # noqa: ANN401
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too soon")
            return super()._get(offset, dtype, count, **order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # noqa: ANN401
            if raw_type != array:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if count[0] > MAX_ELEMENTS:
                raise ValueError(f"an array of {count[0]} elements; at most {MAX_ELEMENTS} are read")
            scalar = self.gguf_scalar_to_np.get(int(kind[0]))
            # The package reads one element at a time, which takes seconds for a vocabulary.
            if scalar is not None:
                elements = [self._get(orig_offs + 12, scalar, count[0])]
            elif kind[0] == string and self.byte_order == "I":
                elements = self._strings(orig_offs + 12, int(count[0]))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            size = 12 + sum(part.nbytes for part in elements) + (8 * len(elements) if scalar is None else 0)
            types = [array, gguf.GGUFValueType(int(kind[0]))] if count[0] else [array]
            # `contents` joins the parts that are named here, one of all numbers or one a text.
            data = range(2, 2 + len(elements)) if count[0] else ()
            return size, [kind, count, *elements], list(data), types

        def _strings(self, offset: int, count: int) -> list[Any]:
            data, found = memoryview(self.data), []
            for _ in range(count):
                begin = offset + 8
                offset = begin + int.from_bytes(data[offset:begin], sys.byteorder)
                if offset > len(data):
                    raise ValueError("it ends too soon")
                found.append(data[begin:offset])
            return found

    return Reader(path)


FAMILIES = ("llama", "qwen2")
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_FACTORS = (8.0, 32.0)
PIECE_ROWS = 4096  # rows that are dequantised at once: what that takes in between is several times the result
JOINED_ROWS = 32  # of these, as one: the package works on 16 rows at a time, which alone are too few
_TOP = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight", "output.weight": "head.weight"}
_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "attention_out",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "mlp_out",
}


class GgufSource(Source):
    """Raises CheckpointError for a file that holds no supported model, InputError where the package gguf is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = gguf_package()
        try:
            reader = open_gguf(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # what a damaged file makes the reader raise has no common class
            raise CheckpointError(f"{path} is no GGUF file, or is damaged ({error}); fetch it again") from None
        self._tensors = {our_name(tensor.name): tensor for tensor in reader.tensors}
        self._factors = self._tensors.pop(ROPE_FACTORS, None)
        self.family = self._fields.get("general.architecture")
        if self.family not in FAMILIES:
            raise CheckpointError(
                f"the architecture {self.family!r} is not supported; in GGUF, {', '.join(FAMILIES)} are"
            )
        if (count := self._fields.get("split.count", 1)) != 1:
            raise CheckpointError(f"{path} is one of {count} files of a model: join them with llama-gguf-split --merge")
        self._check_quantisations()
        self.architecture = self._architecture()
        self.speech = gguf_speech(path, self._fields, self.architecture.vocabulary)
        kinds = sorted({tensor.tensor_type.name for tensor in self._tensors.values()})
        licence = self._fields.get("general.license", "unknown")
        self.about = {"source": path.name, "format": "gguf", "dtype": " ".join(kinds), "licence": licence}

    def shapes(self) -> dict[str, Shape]:
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        result = torch.empty(_shape(tensor))
        for begin in range(0, len(tensor.data), PIECE_ROWS):
            piece = np.asarray(tensor.data[begin : begin + PIECE_ROWS])
            joined = piece.reshape(len(piece) // JOINED_ROWS, -1) if len(piece) % JOINED_ROWS == 0 else piece
            numbers = np.array(self._gguf.dequantize(joined, tensor.tensor_type), dtype=np.float32)
            rows = result[begin : begin + PIECE_ROWS]
            rows.copy_(torch.from_numpy(numbers).view(rows.shape))
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if self.family == "llama" and kind in ("q", "k"):
            return half_split(result, self.architecture.heads if kind == "q" else self.architecture.kv_heads)
        return result

    def _check_quantisations(self) -> None:
        """On a row of each kind: before anything is written."""
        firsts = {tensor.tensor_type: tensor for tensor in reversed(self._tensors.values())}
        for kind, tensor in firsts.items():
            try:
                self._gguf.dequantize(tensor.data[:1], kind)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} is quantised as {kind.name}, which the package gguf cannot "
                    f"read ({error}); take a file in Q4, Q5, Q6, Q8, F16 or BF16"
                ) from None

    def _architecture(self) -> LlamaArchitecture:
        try:
            a = self._shape_of()
            return a if self._factors is None else self._scaled(a)
        except KeyError as error:
            raise CheckpointError(f"{self.path} does not say {error.args[0]}") from None
        except (TypeError, ValueError, ArithmeticError, ShapeError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None

    def _shape_of(self, scaling: RopeScaling | None = None) -> LlamaArchitecture:
        def says(name: str, default: Any = None) -> Any:  # noqa: ANN401
            key = f"{self.family}.{name}"
            return self._fields[key] if default is None else self._fields.get(key, default)

        if says("rope.scaling.type", "none") not in ("none", ""):
            raise CheckpointError(
                f"rotary scaling {says('rope.scaling.type')!r} is not supported; there are none and llama3"
            )
        width, heads = says("embedding_length"), says("attention.head_count")
        head_dim = says("attention.key_length", width // heads)
        if (turned := says("rope.dimension_count", head_dim)) != head_dim:
            raise CheckpointError(
                f"{turned} of a head's {head_dim} numbers are rotated; only models that rotate all are read"
            )
        context, embedding = says("context_length"), self._tensors.get("embedding.weight")
        return LlamaArchitecture(
            layers=(says("block_count"),),
            width=width,
            heads=heads,
            kv_heads=says("attention.head_count_kv", heads),
            head_dim=head_dim,
            mlp_width=says("feed_forward_length"),
            positions=min(context, says("attention.sliding_window", 0) or context),
            vocabulary=says("vocab_size", len(self._fields["tokenizer.ggml.tokens"]))
            if embedding is None
            else _shape(embedding)[0],
            norm_epsilon=float(f"{says('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in float32
            rope_theta=float(says("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            tied_head="head.weight" not in self._tensors,
            attention_bias="none" if "layers.0.q.bias" not in self._tensors else "qkv",
        )

    def _scaled(self, plain: LlamaArchitecture) -> LlamaArchitecture:
        """Llama 3's scaling is stored as what it divides each frequency by: find the settings that give just that."""
        assert self._factors is not None
        found = torch.from_numpy(np.array(self._factors.data, dtype=np.float64).flatten())
        frequency = plain.rope_theta ** (-torch.arange(0, plain.head_dim, 2, dtype=torch.float64) / plain.head_dim)
        for factor in LLAMA3_FACTORS:
            scaling = RopeScaling(factor, 1.0, 4.0, 8192)
            if found.shape == frequency.shape and torch.allclose(stretch(frequency, scaling), found, rtol=1e-4):
                return self._shape_of(scaling)
        raise CheckpointError(f"{ROPE_FACTORS} holds rotary scaling that is none of Llama 3's")


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head from interleaved pairs (0, 1), (2, 3), ..., as GGUF has them for Llama, to the half-split form."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `half_split`."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def our_name(name: str) -> str:
    """A tensor's name in GGUF -> ours; unknown ones stay."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def _shape(tensor: Any) -> Shape:  # noqa: ANN401
    return tuple(int(size) for size in reversed(tensor.shape))
