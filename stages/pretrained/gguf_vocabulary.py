"""What a GGUF file says of its tokens, checked before use: the file is a user's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens, of those in `tokenizer.ggml.token_type`."""
SENTENCEPIECE = "llama"
"""What `tokenizer.ggml.model` calls SentencePiece."""
SPACE = "▁"
"""How SentencePiece writes a space."""
_PIECES_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Of a SentencePiece model that does not name them, as llama.cpp has it."""


@dataclass(frozen=True)
class Vocabulary:
    """Arrays have a place for every token, or are empty where the file has none."""

    model: str
    """Its algorithm: `gpt2`, `llama`, ..."""
    pre: str
    """How text is cut before merging."""
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str]
    """The two tokens of each with a space between, the first to be made first."""
    bos: int | None
    eos: int | None
    unknown: int | None
    ends: list[int]
    """Tokens that a text ends with."""
    begins: bool
    """Whether a text begins with `bos`."""
    is_prefixed: bool
    """Whether a space is put before a text."""
    changes_text: bool
    """Whether text is changed before it is cut, by tables or by leaving spaces out."""

    def text(self, number: int | None) -> str | None:
        return self.tokens[number] if number is not None and number < len(self.tokens) else None

    def require_unique(self) -> None:
        """Raises CheckpointError where two tokens are spelled alike."""
        numbers = dict[str, int]()
        for i, token in enumerate(self.tokens):
            if (first := numbers.setdefault(token, i)) != i:
                raise CheckpointError(
                    f"tokens {first} and {i} are both spelled {token[:40]!r}: the file is damaged, fetch it again"
                )


def read_vocabulary(fields: Mapping[str, Any]) -> Vocabulary:
    """From a file's metadata. Raises CheckpointError for what has another type or size than the format says."""
    said = _Said(fields)
    model = said.one("model", str, "")
    are_pieces = model == SENTENCEPIECE
    tokens = said.array("tokens", (str,), "texts")
    kinds = said.array("token_type", (int,), "whole numbers", len(tokens))
    scores = said.array("scores", (float, int), "numbers", len(tokens))
    if any(math.isnan(score) for score in scores):
        raise CheckpointError("tokenizer.ggml.scores holds what is no number: the file is damaged, fetch it again")
    if are_pieces:  # those that a user adds are found in the text as it is written
        spelled = zip(tokens, kinds or [NORMAL] * len(tokens), strict=True)
        tokens = [token.replace(SPACE, " ") if kind == USER_DEFINED else token for token, kind in spelled]
    default = _PIECES_IDS if are_pieces else {}
    bos, eos, unknown, eot, eom = (
        said.number(name, len(tokens), default.get(name)) for name in ("bos", "eos", "unknown", "eot", "eom")
    )
    return Vocabulary(
        model,
        said.one("pre", str, "gpt-2"),
        tokens,
        kinds,
        scores,
        said.array("merges", (str,), "texts"),
        bos,
        eos,
        unknown,
        sorted({end for end in (eos, eot, eom) if end is not None}),
        said.one("add_bos_token", bool, are_pieces) and bos is not None,
        said.one("add_space_prefix", bool, True),
        bool(fields.get("tokenizer.ggml.precompiled_charsmap")) or said.one("remove_extra_whitespaces", bool, False),
    )


class _Said:
    """Reads fields by the end of their names."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def one(self, name: str, kind: type, default: Any) -> Any:  # noqa: ANN401
        found = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(found, kind):
            raise CheckpointError(f"tokenizer.ggml.{name} is {found!r:.60}: the file is damaged, fetch it again")
        return found

    def array(self, name: str, kinds: tuple[type, ...], what: str, size: int | None = None) -> list[Any]:
        """:param size: that it must have, unless it is missing."""
        found = self.fields.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(found, list) or not all(type(each) in kinds for each in found):
            raise CheckpointError(f"tokenizer.ggml.{name} must hold {what}: the file is damaged, fetch it again")
        if found and size is not None and len(found) != size:
            raise CheckpointError(
                f"tokenizer.ggml.{name} is of {len(found)} tokens, the file has {size}: it is damaged, fetch it again"
            )
        return found

    def number(self, name: str, tokens: int, default: int | None) -> int | None:
        """A token's; files write numbers that there are not for none."""
        found = self.fields.get(f"tokenizer.ggml.{name}_token_id")
        if type(found) is int and found >= 0 and (found < tokens or not tokens):
            return found
        return default if default is not None and default < tokens else None
