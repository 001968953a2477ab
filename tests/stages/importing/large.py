"""GGUF files of the shape of larger models, with random weights: `python -m tests.stages.importing.large 8B FILE`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.checkpoint.gate import PROBE_TEXT
from stages.importing.source import expected_shapes
from stages.model.architecture import LlamaArchitecture
from tests.stages.importing.published import describe_shape, gguf_name, letters, random_blocks

SHAPES = {
    "1.1B": LlamaArchitecture((22,), 2048, 32, 4, 64, 5632, 2048, 32_000),
    "8B": LlamaArchitecture((32,), 4096, 32, 8, 128, 14336, 8192, 128_256),
}


def _merges() -> Iterator[str]:
    """Letter by letter to each word of the probe text: a text has as few tokens as with a real vocabulary."""
    for word in dict.fromkeys(re.findall(r" ?[A-Za-z]+", PROBE_TEXT)):
        word = word.replace(" ", "Ġ")
        yield from (f"{word[:at]} {word[at]}" for at in range(1, len(word)))


def describe_words(writer: Any, vocabulary: int) -> None:
    """A tokenizer of so many tokens, all of which are text."""
    merges = list(dict.fromkeys(_merges()))
    tokens = [*letters()[:256], *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    tokens += [f"[{i}]" for i in range(len(tokens), vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_chat_template("{{ messages }}")


def write_large(path: Path, a: LlamaArchitecture, kind: str = "Q4_K") -> Path:
    """Tensor by tensor: memory holds one. Matrices are of `kind`, norms of ones."""
    import gguf

    writer, stored = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType[kind]
    describe_shape(writer, a)
    describe_words(writer, a.vocabulary)
    shapes = expected_shapes(a)
    numbers, size = gguf.GGML_QUANT_SIZES[stored]
    for name, shape in shapes.items():
        of_matrix = len(shape) > 1
        held = shape if not of_matrix else (shape[0], shape[1] // numbers * size)
        bytes_each = 1 if of_matrix else 4
        writer.add_tensor_info(
            gguf_name(name),
            held,
            np.dtype(np.uint8 if of_matrix else np.float32),
            bytes_each * int(np.prod(held)),
            raw_dtype=stored if of_matrix else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, shape in enumerate(shapes.values()):
        writer.write_tensor_data(random_blocks(*shape, stored, seed) if len(shape) > 1 else torch.ones(shape).numpy())
    writer.close()
    return path


if __name__ == "__main__":
    write_large(Path(sys.argv[2]), SHAPES[sys.argv[1]])
