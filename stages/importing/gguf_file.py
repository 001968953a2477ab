"""A GGUF file, which holds weights in one of its quantisations, and the tokenizer."""

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.errors import CheckpointError, InputError
from stages.importing.families import gguf_family
from stages.importing.family import FULL, SLIDING, refused_with
from stages.importing.gguf_tokenizer import METADATA, OF_ARCHITECTURE, OLDER_NAMES, gguf_speech
from stages.importing.source import ALL, PIECE_ROWS, Shape, Source, TensorNames, is_matrix, matrix_of, places_of
from stages.importing.speech import require_file
from stages.model.architecture import GROUP, LlamaArchitecture, Matrix, RopeScaling, Weights
from stages.model.few_bits import LARGEST
from stages.model.llama import stretch

# The gguf package's reader, with bounds: by itself it reads as many elements as a damaged file claims.
MAX_ELEMENTS = 1 << 22  # of an array: more than the tokens of the largest vocabulary
READ_KINDS = "use a file in Q4, Q5, Q6, Q8, F16 or BF16"
# Sentences about whole files, by the reader's errors.
_UNSUPPORTED = {
    r"Sorry.* version (\d+)": "has version {}; use a file of version 2 or 3",
    r"(\d+)\)? is not a valid GGMLQ": f"has a tensor of kind {{}}, which the package gguf does not know; {READ_KINDS}",
    "endian": f"has numbers that are not {sys.byteorder}-endian; use a file that has",
}


def gguf_package() -> Any:  # noqa: ANN401
    """Import the package. Raises InputError if it is missing."""
    try:
        import gguf
    except ImportError:
        raise InputError("a .gguf file is read with the package gguf: pip install 'onesweep[pretrained]'") from None
    return gguf


def open_gguf(path: Path) -> Any:  # noqa: ANN401
    """The package's `GGUFReader` for a file. Raises InputError, and any error of the reader on a damaged file."""
    gguf = gguf_package()
    base: Any = gguf.GGUFReader
    array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

    class Reader(base):
        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:  # noqa: ANN401
            if self.byte_order != "I":
                raise ValueError("endian")
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too soon")
            return super()._get(offset, dtype, count, **order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # noqa: ANN401
            if raw_type != array:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if count[0] > MAX_ELEMENTS:
                raise ValueError(f"an array has {count[0]} elements; the limit is {MAX_ELEMENTS}")
            scalar = self.gguf_scalar_to_np.get(int(kind[0]))
            # The package reads one element at a time, which would take seconds for a vocabulary.
            if scalar is not None:
                elements = [self._get(orig_offs + 12, scalar, count[0])]
            elif kind[0] == string:
                elements = self._strings(orig_offs + 12, int(count[0]))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            size = 12 + sum(part.nbytes for part in elements) + (8 * len(elements) if scalar is None else 0)
            types = [array, gguf.GGUFValueType(int(kind[0]))] if count[0] else [array]
            # `contents` joins the parts named here: one for all numbers, or one per text.
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


PART = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)?", re.DOTALL)  # the name of one of a model's several files


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a model in one file or several, of which `path` is any one. Raises CheckpointError."""
    fields, tensors = _read(path)
    count = fields.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return fields, tensors
    if (named := PART.fullmatch(path.name)) is None:
        raise CheckpointError(
            f"{path} is one of {count} files of a model: keep the names that they were published with, "
            f"such as NAME-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{named[1]}-{i + 1:05}-of-{count:05}{named[2] or ''}") for i in range(count)]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise CheckpointError(f"missing {len(missing)} of {count} parts: {', '.join(missing[:8])}")
    found = [_read(each) for each in paths]  # a part missing from a file is missing from the model
    return found[0][0], {name: tensor for _, some in found for name, tensor in some.items()}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of one file. Raises CheckpointError."""
    require_file(path)
    try:
        reader = open_gguf(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, MemoryError) as error:  # the file may be whole
        raise CheckpointError(f"cannot read {path}: {error or 'not enough memory'}") from None
    except Exception as error:  # the reader's errors on damaged files have no common class
        for pattern, words in _UNSUPPORTED.items():
            if found := re.search(pattern, str(error)):
                raise CheckpointError(f"{path} {words.format(*found.groups())}") from None
        problem = re.sub(r"\S+ is not a valid GG\w+", "it has an unknown type", str(error))
        raise CheckpointError(f"{path} is not a GGUF file, or is damaged ({problem}); fetch it again") from None
    return fields, {tensor.name: tensor for tensor in reader.tensors}


ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3_SCALINGS = (RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192))
FLOATS, FOUR_BITS = ("F32", "F16", "BF16"), ("Q4_0", "Q4_1", "Q4_K")
_TOP = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight", "output.weight": "head.weight"}
# Metadata by their names in config.json; the first group is required.
_NEEDED = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


class GgufSource(Source):
    """Raises CheckpointError if the file holds no supported model, InputError if the package gguf is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = gguf_package()
        self._fields, self._tensors = _read_parts(path)
        self._factors = self._tensors.pop(ROPE_FACTORS, None)
        self._name = self._fields.get("general.architecture")
        self.family = gguf_family(self._name, bool(self._metadata_value("expert_count", 0)))
        self._check_quantisations()
        with refused_with(str(path)):
            a = self._shape_of()
            self.architecture = a if self._factors is None else self._scaled(a)
        stored = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        self.names = TensorNames("blk", _TOP, self.family.gguf_tensors)
        self.places = places_of(stored, self.names, self.architecture)
        self.speech = gguf_speech(path, self._fields, self.architecture.vocabulary)
        kinds = sorted({tensor.tensor_type.name for tensor in self._tensors.values()})
        licence = self._fields.get("general.license", "unknown")
        self.about = {"source": path.name, "format": "gguf", "dtype": " ".join(kinds), "licence": licence}

    def read(self, name: str, rows: slice = ALL) -> Tensor:
        place, data = self.places[name], self._data(name, rows)
        result = torch.empty(len(data), *place.shape[1:])
        for begin in range(0, len(data), PIECE_ROWS):
            # as one row: the package works on 16 rows at a time, which is too few
            joined = np.asarray(data[begin : begin + PIECE_ROWS]).reshape(1, -1)
            found = self._gguf.dequantize(joined, self._tensors[place.stored].tensor_type)
            numbers = result[begin : begin + PIECE_ROWS].numpy()
            numbers[:] = found.reshape(numbers.shape)
        return self._in_order(name, result)

    def _data(self, name: str, rows: slice = ALL) -> Any:  # noqa: ANN401
        """Stored rows, mapped only while they are read: else memory would hold everything read from a file."""
        place = self.places[name]
        tensor = self._tensors[place.stored]
        data = np.memmap(tensor.data.filename, tensor.data.dtype, "r", int(tensor.data_offset), tensor.data.shape)
        return data[rows if place.part is None else place.part]

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        if self.family.interleaved and kind in ("q", "k"):
            return half_split(rows, self.architecture.heads if kind == "q" else self.architecture.kv_heads)
        return rows

    def read_four_bits(self, name: str) -> dict[str, Tensor]:
        place = self.places[name]
        tensor = self._tensors[place.stored]
        if tensor.tensor_type.name not in FOUR_BITS:
            return super().read_four_bits(name)
        data = np.array(self._data(name))
        size = self._gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        blocks = torch.from_numpy(data).view(len(data), -1, size)
        found = _super_blocks(blocks) if tensor.tensor_type.name == "Q4_K" else _blocks(blocks)
        return {part: self._in_order(name, each.contiguous()) for part, each in found.items()}

    def usual_weights(self) -> Weights:
        kinds = Counter[str]()
        for name, place in self.places.items():
            if is_matrix(name, place.shape):
                kinds[self._tensors[place.stored].tensor_type.name] += math.prod(place.shape)
        if any(kind in FLOATS for kind in kinds):
            return "float32"
        return "q4" if 2 * sum(kinds[kind] for kind in FOUR_BITS) > kinds.total() else "q8"

    def wide_matrices(self) -> tuple[Matrix, ...]:
        wide = {
            matrix_of(name)
            for name, place in self.places.items()
            if is_matrix(name, place.shape)
            and self._tensors[place.stored].tensor_type.name not in (*FLOATS, *FOUR_BITS)
        }
        return tuple(sorted(wide))

    def _check_quantisations(self) -> None:
        """Check one row of each kind, before anything is written."""
        firsts = {tensor.tensor_type: tensor for tensor in reversed(self._tensors.values())}
        for kind, tensor in firsts.items():
            try:
                self._gguf.dequantize(tensor.data[:1], kind)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} is quantised as {kind.name}, which the package gguf cannot "
                    f"read ({error}); {READ_KINDS}"
                ) from None

    def _shape_of(self) -> LlamaArchitecture:
        config = self._settings()
        a = self.family.architecture(config | self.family.gguf_settings(config))
        if (turned := config["rotary_dim"]) != (a.rotary_dim or a.head_dim):
            raise CheckpointError(
                f"{turned} of a head's {a.head_dim} numbers are rotated; only models that rotate all are supported"
            )
        if a.attention_bias == "none" and "blk.0.attn_q.bias" in self._tensors:
            return replace(a, attention_bias="qkv")
        return a

    def _metadata_value(self, name: str, *default: Any) -> Any:  # noqa: ANN401
        """Metadata of the architecture. Raises KeyError if the file has none, and there is no default."""
        defaults = METADATA | OF_ARCHITECTURE.get(str(self._name), {})
        for each in (name, OLDER_NAMES.get(name, name)):
            if (found := self._fields.get(f"{self._name}.{each}")) is not None:
                return found
        if name not in defaults and not default:
            raise KeyError(f"{self._name}.{name}")
        return defaults.get(name, *default)

    def _settings(self) -> dict[str, Any]:
        """The metadata as in a config.json."""
        config = {key: self._metadata_value(name) for key, name in _NEEDED.items()}
        optional = {key: self._metadata_value(name, None) for key, name in _OPTIONAL.items()}
        config |= {key: value for key, value in optional.items() if value is not None}
        embedding = self._tensors.get("token_embd.weight")
        config["vocab_size"] = 2 if embedding is None else next(iter(_shape(embedding)), 0)  # None: refused later
        epsilon = float(f"{self._metadata_value('attention.layer_norm_rms_epsilon'):.6g}")  # stored in float32
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        scaling, factor = self._metadata_value("rope.scaling.type"), self._metadata_value("rope.scaling.factor")
        if any(name in self._tensors for name in LONG_ROPE):
            scaling = "longrope"
        is_plain = scaling == "none" or (scaling == "linear" and factor in (0, 1))
        rope = {"rope_type": "default" if is_plain else scaling, "factor": factor}
        turned = self._metadata_value("rope.dimension_count", head_dim)
        config |= {"rms_norm_eps": epsilon, "head_dim": head_dim, "rotary_dim": turned, "rope_scaling": rope}
        if isinstance(pattern := config.get("sliding_window_pattern"), list):
            config["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
        config.setdefault("num_key_value_heads", heads)
        config["sliding_window"] = config.get("sliding_window") or None
        return config | {"tie_word_embeddings": "output.weight" not in self._tensors}

    def _scaled(self, plain: LlamaArchitecture) -> LlamaArchitecture:
        """GGUF stores Llama 3's scaling as the divisor of each frequency: find the settings that give these."""
        assert self._factors is not None
        found = torch.from_numpy(np.array(self._factors.data, dtype=np.float64).flatten())
        frequency = plain.rope_theta ** (-torch.arange(0, plain.head_dim, 2, dtype=torch.float64) / plain.head_dim)
        for scaling in LLAMA3_SCALINGS:
            if found.shape == frequency.shape and torch.allclose(stretch(frequency, scaling), found, rtol=1e-4):
                return replace(plain, rope_scaling=scaling)
        raise CheckpointError(f"{ROPE_FACTORS} holds rotary scaling other than Llama 3's")


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorder a head's rows from interleaved pairs (0, 1), (2, 3), ..., as GGUF has Llama's, to the half-split form."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `half_split`."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _blocks(blocks: Tensor) -> dict[str, Tensor]:
    """Q4_0 and Q4_1 in `QuantLinear`'s form. blocks: (rows, groups, bytes) uint8."""
    numbers = blocks[..., : -GROUP // 2].contiguous().view(torch.float16)
    # Q4_0 has a scale d and means d * (code - 8); Q4_1 also has an offset. Float16 holds -8 d exactly.
    scales = numbers[..., 0]
    offsets = numbers[..., 1] if numbers.shape[2] == 2 else -8 * scales
    return {"codes": blocks[..., -GROUP // 2 :].flatten(1), "scales": scales, "offsets": offsets}


def _super_blocks(blocks: Tensor) -> dict[str, Tensor]:
    """Q4_K in `QuantLinear`'s form: the same codes; scales and offsets, products of a float16 and an integer of 6 bits,
    are rounded to float16. blocks: (rows, super-blocks of 8 groups, bytes) uint8."""
    whole = blocks[..., :4].contiguous().view(torch.float16).float()
    # Integers of groups 0 to 3, then the upper two bits of groups 4 to 7, whose lower four bits come last.
    scales, offsets, lower = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([scales & 63, lower & LARGEST | scales >> 2 & 48], dim=-1)
    offsets = torch.cat([offsets & 63, lower >> 4 | offsets >> 2 & 48], dim=-1)
    # A byte has weight i of one group and weight i of the next; here, weights i and i + 16 of one.
    first, second = blocks[..., 16:].unflatten(-1, (4, 2, GROUP // 2)).unbind(-2)
    codes = torch.stack([first & LARGEST | second << 4, first >> 4 | second & LARGEST << 4], dim=-2)
    return {
        "codes": codes.flatten(1),
        "scales": (whole[..., :1] * scales).half().flatten(1),
        "offsets": (-whole[..., 1:] * offsets).half().flatten(1),
    }


def _shape(tensor: Any) -> Shape:  # noqa: ANN401
    return tuple(int(size) for size in reversed(tensor.shape))
