"""tokenizer.json of what a GGUF file says of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.errors import CheckpointError
from stages.pretrained.licences import licence_texts
from stages.pretrained.source import Speech

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are found before any merging: `tokenizer.ggml.token_type`."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[dict[str, Any]]] = {
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


def gguf_speech(path: Path, fields: Mapping[str, Any]) -> Speech:
    """Raises CheckpointError for a tokenizer that cannot be told from the file; one beside it comes first."""
    beside = path.parent / "tokenizer.json"
    tokens = fields.get("tokenizer.ggml.tokens") or []
    bos, eos = (_token(fields, tokens, name) for name in ("bos", "eos"))
    ends = {fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    return Speech(
        beside.read_text(encoding="utf-8") if beside.is_file() else tokenizer_json(fields, bos),
        str(fields.get("tokenizer.chat_template", "")),
        {"bos_token": bos, "eos_token": eos, "end_tokens": sorted(ends)},
        licence_texts(path.parent),
    )


def tokenizer_json(fields: Mapping[str, Any], bos: str | None) -> str:
    """A byte-level BPE, in the format of the package tokenizers."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _SPLITS:
        raise CheckpointError(
            f"the tokenizer in this file ({kind!r}, cut as {pre!r}) cannot be rebuilt from it; those of "
            f"'gpt2' can, cut as {', '.join(_SPLITS)}: put the model's own tokenizer.json beside the file"
        )
    tokens, merges = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.merges", [])
    kinds = fields.get("tokenizer.ggml.token_type", [])
    added = [i for i, token_kind in enumerate(kinds) if token_kind in (CONTROL, USER_DEFINED)]
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _OWN_WORDS}
    begins = bos is not None and fields.get("tokenizer.ggml.add_bos_token", False)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(i, tokens[i], kinds[i] == CONTROL) for i in added],
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITS[pre], words]},
            "post_processor": _beginning(str(bos), tokens.index(bos)) if begins else None,
            "decoder": {**words, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [merge.split(" ", 1) for merge in merges],
                "ignore_merges": pre == "llama-bpe",
            },
        }
    )


def _added(number: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def _beginning(bos: str, number: int) -> dict[str, Any]:
    """Puts the token that begins a text before it."""
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }


def _token(fields: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    number = fields.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
