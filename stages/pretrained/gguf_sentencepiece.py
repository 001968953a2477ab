"""BPE as SentencePiece has it, in the format of the package tokenizers: Llama 1 and 2, Mistral and their kin."""

from __future__ import annotations

from typing import Any

from stages.errors import CheckpointError
from stages.pretrained.gguf_vocabulary import NORMAL, SPACE, Vocabulary

MAX_LETTERS = 512
"""Of a token, each place of which is tried as one where it was put together."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The tokens that a character is spelled with which is none itself."""
_INSTEAD = "put the model's own tokenizer.json beside the file"


def sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    """The steps of its tokenizer.json. Raises CheckpointError for a vocabulary that does not tell them."""
    _check(vocabulary)
    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if vocabulary.is_prefixed else []
    read: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    read += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.is_prefixed:
        read.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": read},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.text(vocabulary.unknown),
            "fuse_unk": True,
            "byte_fallback": numbers.keys() >= set(BYTES),
            "vocab": numbers,
            "merges": _merges(vocabulary),
        },
    }


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the one to be made first first.

    SentencePiece makes the token with the best score, and of several places for it the leftmost. A list of merges can
    say the first and not the second: the longer left side first comes nearest, as where " " and "  " both could begin.
    """
    kinds = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in kinds if kind == NORMAL}
    if told := [tuple(merge.split(" ")) for merge in vocabulary.merges]:
        return [pair for pair in told if len(pair) == 2 and {*pair, "".join(pair)} <= scores.keys()]
    return [
        (token[:at], token[at:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in scores and token[at:] in scores
    ]


def _check(vocabulary: Vocabulary) -> None:
    tokens, kinds, scores = vocabulary.tokens, vocabulary.kinds, vocabulary.scores
    if not (tokens and kinds and scores):
        raise CheckpointError(
            "a SentencePiece tokenizer is rebuilt from tokenizer.ggml.tokens, token_type and scores, and one of them "
            f"is not in this file: {_INSTEAD}"
        )
    if vocabulary.changes_text:
        raise CheckpointError(
            "the tokenizer in this file changes text before it cuts it (precompiled_charsmap or "
            f"remove_extra_whitespaces), which is not rebuilt from a file: {_INSTEAD}"
        )
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
    if any(scores[i] % 1 for i in normal):  # BPE numbers its merges, unigram has logarithms of frequencies
        raise CheckpointError(
            "tokenizer.ggml.scores are those of a unigram model, and only BPE is rebuilt from a file of SentencePiece: "
            + _INSTEAD
        )
    if long := next((i for i in normal if len(tokens[i]) > MAX_LETTERS), None):
        raise CheckpointError(f"token {long} has {len(tokens[long])} letters, over {MAX_LETTERS}: the file is damaged")
    if vocabulary.unknown is None and not set(BYTES) <= set(tokens):
        raise CheckpointError(f"this file has neither tokens for all bytes nor one for what is unknown: {_INSTEAD}")
