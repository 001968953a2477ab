"""Byte-level BPE, in the format of the package tokenizers."""

from __future__ import annotations

from typing import Any

from stages.errors import CheckpointError
from stages.pretrained.gguf_vocabulary import Vocabulary

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
    ],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {"Regex": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")},
            "behavior": "Isolated",
            "invert": False,
        },
    ],
}
"""How text is cut before merging, by `tokenizer.ggml.pre`; then its bytes are written as letters."""
_OWN_WORDS = ("smollm", "gpt-2")
"""Those that leave the cutting into words to the last step."""


def byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """The steps of its tokenizer.json. Raises CheckpointError for a way of cutting that is not known."""
    pre = vocabulary.pre
    if pre not in SPLITS:
        raise CheckpointError(
            f"the tokenizer in this file ('gpt2', cut as {pre!r}) cannot be rebuilt from it; those cut as "
            f"{', '.join(SPLITS)} can: put the model's own tokenizer.json beside the file"
        )
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _OWN_WORDS}
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*SPLITS[pre], words]},
        "decoder": {**words, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ", 1) for merge in vocabulary.merges],
            "ignore_merges": pre == "llama-bpe",
        },
    }
