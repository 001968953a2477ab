"""Sources of pretrained models: one interface for every format of their files."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from stages.errors import CheckpointError
from stages.importing.family import ModelFamily
from stages.importing.speech import Speech
from stages.model.architecture import GROUP, LlamaArchitecture, Matrix, Weights
from stages.model.few_bits import MAX_HALF, quantised, rounded
from stages.model.llama import LlamaLayer
from stages.model.pipeline import on_meta_device
from stages.progress import counted

EXPERT = r"(?<=\.experts\.)\d+(?=\.)"  # an expert's number in a name
EMBEDDING, NORM, HEAD = "embedding.weight", "norm.weight", "head.weight"
ALL = slice(None)
Shape = tuple[int, ...]
PIECE_ROWS = 128  # rows processed at once: they stay in the processor's cache


class Source(ABC):
    """A published model.

    Its tensors have the names in `expected_shapes`, and rotary pairs in the half-split form, whatever the format.
    """

    family: ModelFamily
    architecture: LlamaArchitecture  # with all layers in one stage
    speech: Speech
    about: Mapping[str, Any]  # for the manifest's `data`
    names: "TensorNames"
    places: Mapping[str, "TensorPlace"]  # of every tensor; one with an unknown name keeps the format's own name

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor, by name."""
        return {name: place.shape for name, place in self.places.items()}

    @abstractmethod
    def read(self, name: str, rows: slice = ALL) -> Tensor:
        """One tensor as it is in the files except for the order of its rows, or some rows of the embedding or the head,
        in float32. Raises CheckpointError."""

    def tensor(self, name: str, rows: slice = ALL) -> Tensor:
        """One tensor as the layers here need it, read now, float32. Raises CheckpointError, also if a number in it is
        not finite. :param rows: see `read`."""
        found = self.family.adapted(name, self.read(name, rows), self.architecture)
        if not all(math.isfinite(end) for end in found.aminmax()):
            stored = self.places[name].stored
            raise CheckpointError(f"tensor {stored} holds NaN or infinite numbers: fetch the model's files again")
        return found

    def parts(self, name: str, cut: LlamaArchitecture) -> dict[str, Tensor]:
        """A tensor as the layers of `cut` hold it, by name: codes, scales and offsets for a matrix in `q4` or `q8`, and
        8-bit codes for the embedding and the head. Raises CheckpointError if a scale is outside float16's range."""
        is_table, stored = name in (EMBEDDING, HEAD), self.places[name].stored
        if not cut.is_grouped or not (is_table or is_matrix(name, self.places[name].shape)):
            tensor = self.tensor(name)
            if cut.weights == "bfloat16" and tensor.ndim > 1 and tensor.abs().max() > MAX_HALF:
                raise CheckpointError(f"tensor {stored} holds values beyond {MAX_HALF:.0f}: use float32")
            return {name: tensor}
        bits = 8 if is_table or cut.weights_of(matrix_of(name)) == "q8" else 4
        if bits == 4:
            four = self.read_four_bits(name)
            found = {part: self.family.adapted(name, each, self.architecture) for part, each in four.items()}
        else:
            rows, width = self.places[name].shape
            # one buffer for all: pieces kept among freed memory would fragment it
            found = {"codes": torch.empty(rows, width, dtype=torch.int8)}
            found["scales"] = torch.empty(rows, width // GROUP, dtype=torch.float16)
            # a table in float32 may take more than a stage in 4 bits
            pieces = (slice(i, i + PIECE_ROWS) for i in range(0, rows, PIECE_ROWS)) if is_table else (ALL,)
            for at in pieces:
                for part, each in rounded(self.tensor(name, at)).items():
                    found[part][at] = each
        if not all(each.isfinite().all() for part, each in found.items() if part != "codes"):
            raise CheckpointError(f"tensor {stored} holds values that {bits} bits with scales cannot hold: use float32")
        return {name.removesuffix("weight") + part: each for part, each in found.items()}

    def read_four_bits(self, name: str) -> dict[str, Tensor]:
        """A matrix as codes, scales and offsets, with the row order of `read`."""
        return quantised(self.read(name))

    def usual_weights(self) -> Weights:
        """The fewest bits in which layers hold the files' weights without loss."""
        return "float32"

    def wide_matrices(self) -> tuple[Matrix, ...]:
        """Matrices already rounded to more than 4 bits in some layer: `q4` would round them again."""
        return ()

    def check(self) -> None:
        """Raise CheckpointError unless the tensors are those that the configuration promises."""
        found, expected = self.shapes(), expected_shapes(self.architecture)
        if self.architecture.tied_head and HEAD in found:
            expected[HEAD] = expected[EMBEDDING]  # a copy of it, which some files still contain
        for name, shape in expected.items():
            if name not in found:
                hint = ": its head seems to be tied to the embedding, but the configuration says that it is not"
                message = f"the configuration asks for tensor {self.names.stored_name(name)}, which is missing"
                raise CheckpointError(message + (hint if name == HEAD else ""))
            if found[name] != shape:
                message = f"tensor {self.places[name].stored} has shape {found[name]}"
                raise CheckpointError(f"{message}, but the configuration asks for {shape}")
        if unknown := sorted(self.places[name].stored for name in found.keys() - expected.keys()):
            count = counted(len(unknown), "tensor")
            raise CheckpointError(f"the configuration does not use {count} of the files, starting with {unknown[0]}")


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in a format, and our names for them."""

    layers: str  # precedes the number of a layer
    others: Mapping[str, str]  # theirs -> ours, for tensors outside of layers
    kinds: Mapping[str, str]  # for tensors in layers, as in the tables of families

    def own_names(self, name: str) -> str:
        """Our names for a tensor's contents, separated by spaces; an unknown tensor keeps its own name."""
        match = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)\.(weight|bias)", name)
        expert = re.search(EXPERT, name)
        if match is None or (own_names := self.kinds.get(re.sub(EXPERT, "*", match[2]))) is None:
            return self.others.get(name, name)
        own_names = own_names.replace("*", expert[0] if expert else "*")
        return " ".join(f"layers.{match[1]}.{each}.{match[3]}" for each in own_names.split(" "))

    def stored_name(self, name: str) -> str:
        """The name of the tensor that holds one of ours, even if the files lack it."""
        if name in self._stored_names:
            return self._stored_names[name]
        _, layer, *kind, end = name.split(".")
        expert = kind[1] if len(kind) > 1 else "*"
        stored_name = self._stored_names[".".join(kind).replace(expert, "*")]
        return f"{self.layers}.{layer}.{stored_name.replace('*', expert)}.{end}"

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        return {each: name for name, own in {**self.others, **self.kinds}.items() for each in own.split(" ")}


@dataclass(frozen=True)
class TensorPlace:
    """One of our tensors in a source: an entire stored tensor, some of its rows, or one of its matrices."""

    stored: str
    shape: Shape
    part: slice | int | None = None


def places_of(stored: Mapping[str, Shape], named: TensorNames, a: LlamaArchitecture) -> dict[str, TensorPlace]:
    """The TensorPlace of each tensor, by our names. Raises CheckpointError if a tensor's rows do not match the tensors
    that it holds."""
    expected, found = expected_shapes(a), dict[str, TensorPlace]()
    for name, shape in stored.items():
        if not shape:
            raise CheckpointError(f"tensor {name} is a single number: the weights are damaged, fetch them again")
        names = named.own_names(name).split(" ")
        rows = [expected.get(each, (0,))[0] for each in names]
        if len(names) > 1 and sum(rows) != shape[0]:
            raise CheckpointError(f"tensor {name} has {shape[0]} rows, but the configuration asks for {sum(rows)}")
        if "*" in names[0]:
            if names[0].replace("*", str(shape[0] - 1)) not in expected:  # rows without numbers take no space in a file
                raise CheckpointError(f"tensor {name} has {shape[0]} rows: the configuration asks for another number")
            found |= {names[0].replace("*", str(i)): TensorPlace(name, shape[1:], i) for i in range(shape[0])}
        elif len(names) == 1:
            found[names[0]] = TensorPlace(name, shape)
        else:
            for each, end, count in zip(names, accumulate(rows), rows, strict=True):
                found[each] = TensorPlace(name, (count, *shape[1:]), slice(end - count, end))
    return found


def expected_shapes(architecture: LlamaArchitecture) -> dict[str, Shape]:
    """Name and shape of every tensor of a model, by our names: those of the layers here, with joined ones separate."""
    a = replace(architecture, weights="float32")
    parts = {"qkv": {"q": a.query_width, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}}
    parts["mlp_in"] = {"gate": a.mlp_width, "up": a.mlp_width}
    with on_meta_device():
        stored = LlamaLayer(a, 0).state_dict()
    layer: dict[str, Shape] = {}
    for name, tensor in stored.items():
        *within, kind, end = name.removeprefix("mixture.").split(".")
        for each, rows in parts.get(kind, {kind: len(tensor)}).items():
            layer[".".join([*within, each, end])] = (rows, *tensor.shape[1:])
    shapes: dict[str, Shape] = {EMBEDDING: (a.vocabulary, a.width), NORM: (a.width,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(a.total_layers) for name, shape in layer.items()}
    return shapes if a.tied_head else shapes | {HEAD: (a.vocabulary, a.width)}


def matrix_of(name: str) -> Matrix:
    """The layer's matrix that a tensor is, or is part of. name: of a tensor for which `is_matrix` is true."""
    kind = name.split(".")[-2]
    parts: Mapping[str, Matrix] = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "mlp_in", "up": "mlp_in"}
    return parts.get(kind) or cast(Matrix, kind)


def is_matrix(name: str, shape: Shape) -> bool:
    """True for a tensor that has fewer bits than float32 where weights have 4. False for norms, biases, the embedding,
    the head and the router of a mixture."""
    return name.startswith("layers.") and len(shape) == 2 and not name.endswith("router.weight")
