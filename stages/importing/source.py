"""Sources of pretrained models: one interface for every format of their files."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from stages.checkpoint.manifest import MAX_PROBE_TOKENS
from stages.errors import CheckpointError, library_errors, regular
from stages.importing.family import ModelFamily
from stages.model.architecture import LlamaArchitecture
from stages.model.layers import quantised
from stages.model.llama import LlamaLayer
from stages.model.pipeline import without_memory

MAX_ENDS = 64
EMBEDDING, NORM, HEAD = "embedding.weight", "norm.weight", "head.weight"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Speech:
    """Everything of a model beside its weights."""

    tokenizer: str  # tokenizer.json
    chat_template: str = ""
    # `bos_token` and `eos_token` as text or None, and `end_tokens`, the ids that a text ends with.
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    licences: Mapping[str, bytes] = field(default_factory=dict)  # file name -> text


class Source(ABC):
    """A model as it was published.

    Its tensors have the names of `expected_shapes`, and rotary pairs in the half-split form, whatever the format has.
    """

    family: ModelFamily
    architecture: LlamaArchitecture  # with all layers in one stage
    speech: Speech
    about: Mapping[str, Any]  # what the manifest notes under `data`

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor; one of no known name keeps the format's own name."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor as it is in the files, but for the order of its rows, float32. Raises CheckpointError."""

    def tensor(self, name: str) -> Tensor:
        """One tensor as the layers here take it, read now, float32. Raises CheckpointError, also where it holds what is
        no finite number: rows that the probe text does not use would go unseen."""
        found = self.family.adapted(name, self.read(name), self.architecture)
        if not all(math.isfinite(end) for end in found.aminmax()):
            raise CheckpointError(f"tensor {name} holds NaN or infinite numbers: the weights are damaged")
        return found

    def four_bits(self, name: str) -> dict[str, Tensor]:
        """A matrix as `QuantLinear` has it, its rows as the layers here take them. Raises CheckpointError where float16
        does not hold a scale."""
        found = {
            part: self.family.adapted(name, each, self.architecture) for part, each in self.read_four_bits(name).items()
        }
        if not all(found[part].isfinite().all() for part in ("scales", "offsets")):
            raise CheckpointError(f"tensor {name} holds numbers that 4 bits and their scales do not: use float32")
        return found

    def read_four_bits(self, name: str) -> dict[str, Tensor]:
        """A matrix of codes, scales and offsets, its rows as those of `read`."""
        return quantised(self.read(name))

    def rounded_twice(self) -> str:
        """A sentence on matrices that `four_bits` rounds although they are rounded already; empty: there are none."""
        return ""

    def check(self) -> None:
        """Raises CheckpointError where the tensors are not those that the configuration promises."""
        found, expected = self.shapes(), expected_shapes(self.architecture)
        if self.architecture.tied_head and HEAD in found:
            expected[HEAD] = expected[EMBEDDING]  # a copy of it, which some files have all the same
        for name, shape in expected.items():
            if name not in found:
                hint = ": its head is tied to the embedding, it seems, and the configuration denies it"
                said = f"tensor {name} is missing, which the configuration asks for"
                raise CheckpointError(said + (hint if name == HEAD else ""))
            if found[name] != shape:
                raise CheckpointError(f"tensor {name} has shape {found[name]}, the configuration asks for {shape}")
        if unknown := sorted(found.keys() - expected.keys()):
            raise CheckpointError(
                f"{len(unknown)} tensors have no place in the architecture that the configuration describes, "
                f"{unknown[0]} first"
            )


@dataclass(frozen=True)
class TensorPlace:
    """One of our tensors in a source: all of a stored one, some of its rows, or one of its matrices."""

    stored: str
    shape: Shape
    part: slice | int | None = None


def places_of(
    stored: Mapping[str, Shape], our_names: Callable[[str], str], expected: Mapping[str, Shape]
) -> dict[str, TensorPlace]:
    """TensorPlace of each tensor, by our names.

    :param our_names: those of a stored tensor, as in the tables of families.
    :param expected: of `expected_shapes`.

    Raises CheckpointError where a tensor has not the rows of those that stand in it.
    """
    found: dict[str, TensorPlace] = {}
    for name, shape in stored.items():
        if not shape:
            raise CheckpointError(f"tensor {name} is a single number: the weights are damaged, fetch them again")
        names = our_names(name).split(" ")
        rows = [expected.get(each, (0,))[0] for each in names]
        if len(names) > 1 and sum(rows) != shape[0]:
            raise CheckpointError(f"tensor {name} has {shape[0]} rows, the configuration asks for {sum(rows)}")
        if "*" in names[0]:
            if names[0].replace("*", str(shape[0] - 1)) not in expected:  # rows without numbers take no room in a file
                raise CheckpointError(f"tensor {name} has {shape[0]} rows: the configuration asks for another number")
            found |= {names[0].replace("*", str(i)): TensorPlace(name, shape[1:], i) for i in range(shape[0])}
        elif len(names) == 1:
            found[names[0]] = TensorPlace(name, shape)
        else:
            for each, end, count in zip(names, accumulate(rows), rows, strict=True):
                found[each] = TensorPlace(name, (count, *shape[1:]), slice(end - count, end))
    return found


def expected_shapes(architecture: LlamaArchitecture) -> dict[str, Shape]:
    """Name and shape of every tensor of a model, by our names: those of the layers here, what is joined there apart."""
    a = replace(architecture, weights="float32")
    parts = {"qkv": {"q": a.query_width, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}}
    parts["mlp_in"] = {"gate": a.mlp_width, "up": a.mlp_width}
    with without_memory():
        stored = LlamaLayer(a, 0).state_dict()
    layer: dict[str, Shape] = {}
    for name, tensor in stored.items():
        *within, kind, end = name.removeprefix("mixture.").split(".")
        for each, rows in parts.get(kind, {kind: len(tensor)}).items():
            layer[".".join([*within, each, end])] = (rows, *tensor.shape[1:])
    shapes: dict[str, Shape] = {EMBEDDING: (a.vocabulary, a.width), NORM: (a.width,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(a.total_layers) for name, shape in layer.items()}
    return shapes if a.tied_head else shapes | {HEAD: (a.vocabulary, a.width)}


def is_matrix(name: str, shape: Shape) -> bool:
    """True for a tensor that has fewer bits than float32 where weights have 4: norms, biases, the embedding, the head
    and the router of a mixture have not."""
    return name.startswith("layers.") and len(shape) == 2 and not name.endswith("router.weight")


def end_tokens(numbers: Iterable[object], vocabulary: int) -> list[int]:
    """End tokens that the model can write: files name numbers beyond the vocabulary for none."""
    ends = sorted({end for end in numbers if type(end) is int and 0 <= end < vocabulary})
    if len(ends) > MAX_ENDS:
        raise CheckpointError(f"{len(ends)} tokens are said to end a text; at most {MAX_ENDS} are read")
    return ends


def read_text(path: Path) -> str:
    """Raises CheckpointError."""
    try:
        return regular(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None


# The texts that a model may not travel without.
_NAME = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY|ACCEPTABLE_USE)([._-][A-Za-z0-9._-]*)?", re.IGNORECASE)
MAX_TEXTS = 8
MAX_TEXT_BYTES = 1 << 20


def licence_texts(folder: Path) -> dict[str, bytes]:
    """Licences in a folder: file name -> text."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file())
    return {path.name: path.read_bytes() for path in paths[:MAX_TEXTS] if path.stat().st_size <= MAX_TEXT_BYTES}


LEAST_SHARE = 0.85  # of the vocabulary that a tokenizer must know: models round theirs up, by less than this


def probe_tokens(tokenizer: str, architecture: LlamaArchitecture, text: str) -> tuple[int, ...]:
    """`text` in tokens. Raises CheckpointError for a tokenizer that cannot be the model's."""
    made = open_tokenizer(tokenizer)
    ids = made.get_vocab(with_added_tokens=True).values()
    size, vocabulary = len(ids), architecture.vocabulary
    if size == 0 or max(ids) >= vocabulary or size < LEAST_SHARE * vocabulary:
        raise CheckpointError(
            f"the tokenizer does not match: it knows {size} tokens, up to number {max(ids, default=-1)}, and the model "
            f"{vocabulary}: take the tokenizer.json that was published with these weights"
        )
    with library_errors(lambda problem: CheckpointError(f"the tokenizer fails on the probe text ({problem})")):
        tokens = tuple(made.encode(text).ids[: min(architecture.positions, MAX_PROBE_TOKENS)])
    if len(tokens) < 2:
        raise CheckpointError(f"the tokenizer makes {len(tokens)} tokens of the probe text: it is none for text")
    return tokens


def open_tokenizer(tokenizer: str) -> Any:  # noqa: ANN401
    """The tokenizer that a tokenizer.json describes. Raises as `probe_tokens` does."""
    with library_errors(lambda problem: CheckpointError(f"tokenizer.json cannot be read ({problem})")):
        made = Tokenizer.from_str(tokenizer)
    made.no_truncation()  # some were stored as they were set for a training
    made.no_padding()
    return made
