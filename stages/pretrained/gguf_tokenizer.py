"""tokenizer.json of what a GGUF file says of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.errors import CheckpointError
from stages.pretrained.gguf_byte_level import byte_level
from stages.pretrained.gguf_sentencepiece import sentencepiece
from stages.pretrained.gguf_vocabulary import (
    CONTROL,
    SENTENCEPIECE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)
from stages.pretrained.licences import licence_texts
from stages.pretrained.source import Speech, end_tokens, read_text

STEPS = {"gpt2": byte_level, SENTENCEPIECE: sentencepiece}
"""By `tokenizer.ggml.model`."""


def gguf_speech(path: Path, fields: Mapping[str, Any], size: int) -> Speech:
    """One beside the file comes first. Raises CheckpointError for a tokenizer that cannot be told from either.

    :param size: of the model's vocabulary.
    """
    beside = path.parent / "tokenizer.json"
    vocabulary = read_vocabulary(fields)
    specials = {"bos_token": vocabulary.text(vocabulary.bos), "eos_token": vocabulary.text(vocabulary.eos)}
    return Speech(
        read_text(beside) if beside.is_file() else tokenizer_json(vocabulary),
        str(fields.get("tokenizer.chat_template", "")),
        {**specials, "end_tokens": end_tokens(vocabulary.ends, size)},
        licence_texts(path.parent),
    )


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """In the format of the package tokenizers. Raises CheckpointError."""
    if vocabulary.model not in STEPS:
        raise CheckpointError(
            f"the tokenizer in this file ({vocabulary.model!r}) cannot be rebuilt from it; those of "
            f"{', '.join(STEPS)} can: put the model's own tokenizer.json beside the file"
        )
    vocabulary.require_unique()
    steps = STEPS[vocabulary.model](vocabulary)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added(vocabulary),
            "post_processor": _beginning(vocabulary) if vocabulary.begins else None,
            **steps,
        }
    )


def _added(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found before any merging; special ones are left out of what is read."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = (CONTROL, UNKNOWN) if vocabulary.model == SENTENCEPIECE else (CONTROL,)
    return [
        {"id": i, "content": vocabulary.tokens[i], "special": kind in special, **flags}
        for i, kind in enumerate(vocabulary.kinds)
        if kind in (*special, USER_DEFINED)
    ]


def _beginning(vocabulary: Vocabulary) -> dict[str, Any]:
    """Puts the token that begins a text before it."""
    bos = str(vocabulary.text(vocabulary.bos))
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos], "tokens": [bos]}},
    }
