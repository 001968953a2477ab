"""GGUF files of the shape of larger models, with random weights: `python -m tests.stages.importing.large 8B FILE`."""

import re
import sys
from pathlib import Path

import torch

from stages.checkpoint.gate import PROBE_TEXT
from stages.importing.source import expected_shapes
from stages.model.architecture import LlamaArchitecture
from tests.stages.importing.published import letters, write_gguf

SHAPES = {
    "1.1B": LlamaArchitecture((22,), 2048, 32, 4, 64, 5632, 2048, 32_000),
    "8B": LlamaArchitecture((32,), 4096, 32, 8, 128, 14336, 8192, 128_256),
}


def write_large(path: Path, a: LlamaArchitecture) -> Path:
    """Matrices are in Q4_K, norms of ones. Each word of the probe text is a token, so it has as few as elsewhere: a
    text cut as Llama 3's takes a word that is a token, without merges. llama.cpp
    refuses a file that has none."""
    words = (word.replace(" ", "Ġ") for word in re.findall(r" ?[A-Za-z]+", PROBE_TEXT))
    tokens = list(dict.fromkeys([*letters()[:256], *words]))
    tokens += [f"[{i}]" for i in range(len(tokens), a.vocabulary)]
    metadata = {"tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_list": tokens, "token_merges": ["Ġ a"]}
    metadata |= {"token_types": [1] * a.vocabulary, "chat_template": "{{ messages }}"}
    tensors = {
        name: torch.ones(x) if len(x) == 1 else torch.empty(x, device="meta") for name, x in expected_shapes(a).items()
    }
    return write_gguf(path, tensors, a, metadata=metadata, matrices=lambda name: "Q4_K")


if __name__ == "__main__":
    write_large(Path(sys.argv[2]), SHAPES[sys.argv[1]])
