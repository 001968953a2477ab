"""Text that follows a JSON schema: computes which tokens may come next from the tokens so far.

The masks are a pure function of schema, vocabulary and text, so `ar` and the verification of its draft tokens sample
from the same distribution. llguidance parses (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.checkpoint.files import read_companion
from stages.checkpoint.manifest import TOKENIZER_NAME
from stages.errors import CheckpointError, library_errors, printable
from stages.host.drafter import Allowed, AllowedAfter
from stages.host.plan import ModelSource
from stages.host.schema_check import NOT_FOLLOWED, byte_tokenizer, compiled
from stages.model.vocabulary import BYTES
from stages.wire.status import invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A compiled schema takes about 5 MB, which count in its session's memory; a few more are cached for later sessions.
GRAMMAR_BYTES, KEPT_GRAMMARS = 5 << 20, 8


@dataclass(frozen=True)
class GrammarSettings:
    """The schema that a text is held to, and the place where the text begins."""

    schema: str  # a JSON schema, as JSON
    ends: tuple[int, ...]  # tokens that end a text; they may come once the text is complete
    prompt: int  # tokens before the text


class Grammar:
    """The texts that a schema allows, and a place in one of them."""

    def __init__(self, source: ModelSource, settings: GrammarSettings) -> None:
        """Raises CheckpointError for a tokenizer that is missing or damaged, StatusError for an invalid schema."""
        self.settings, self._size = settings, source.vocabulary.size
        tokens = source.vocabulary != BYTES
        tokenizer = token_tokenizer(source, settings.ends) if tokens else byte_tokenizer()
        matcher = _matcher(tokenizer, settings.schema)
        if isinstance(matcher, str):
            raise invalid(f"{NOT_FOLLOWED}: {printable(matcher)[:300]}")
        self._matcher, self._read = matcher.deep_copy(), list[int]()

    @property
    def problem(self) -> str:
        """The error if the schema turned out to be too complex; else empty."""
        return self._matcher.get_error().partition("\n")[0]  # the parser's state follows, which may be long

    @property
    def complete(self) -> bool:
        """True if nothing can follow the text that was read."""
        return self._matcher.is_stopped() and not self.problem

    def read(self, written: Sequence[int]) -> None:
        """Move to the end of a text, which may diverge from the text read before."""
        both = enumerate(zip(self._read, written, strict=False))
        same = next((i for i, (a, b) in both if a != b), min(len(self._read), len(written)))
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        self._matcher.consume_tokens(list(written[same:]))
        self._read = list(written)

    def allowed(self) -> Allowed | None:
        """Mask of the tokens that can follow, (vocabulary,); None where none can."""
        if self._matcher.is_stopped():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        return None if self.problem or not allowed.any() else allowed

    def masked(self, logits: Tensor) -> Tensor | None:
        """Logits with -inf for tokens that cannot follow; None where none can. logits: (1, vocabulary), as the
        result."""
        if (allowed := self.allowed()) is None:
            return None
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def allowed_after(self, text: NDArray[np.int64]) -> AllowedAfter:
        """`allowed` after `text` and a draft that follows it, whose tokens must be allowed themselves."""

        known = text.tolist()

        def after(draft: Sequence[int]) -> Allowed | None:
            self.read([*known, *draft])
            return self.allowed()

        return after


def with_tags_as_text(tokenizer: str) -> str:
    """A tokenizer's file with added tokens such as `<think>` in its vocabulary, unless they are marked as special:
    llguidance takes every added token in angle brackets for a control token, which no text has."""
    record = json.loads(tokenizer)
    vocabulary, added = record["model"].get("vocab"), record.get("added_tokens") or []
    tags = [each for each in added if not each.get("special") and re.fullmatch("<[!-~]*>", each["content"])]
    if tags and isinstance(vocabulary, dict):
        vocabulary.update({each["content"]: each["id"] for each in tags})
        record["added_tokens"] = [each for each in added if each not in tags]
    return json.dumps(record)


@lru_cache(maxsize=4)
def token_tokenizer(source: ModelSource, ends: tuple[int, ...]) -> LLTokenizer:
    """llguidance's tokenizer of a token model. Raises CheckpointError."""
    from llguidance import LLTokenizer

    directory, size = source.directory, source.vocabulary.size
    text = read_companion(directory, source.manifest, TOKENIZER_NAME).decode()
    with library_errors(lambda problem: CheckpointError(f"{directory / TOKENIZER_NAME} is not a tokenizer: {problem}")):
        return LLTokenizer(with_tags_as_text(text), n_vocab=size, eos_token=list(ends))


@lru_cache(maxsize=KEPT_GRAMMARS)
def _matcher(tokenizer: LLTokenizer, schema: str) -> LLMatcher | str:
    """A matcher at the beginning of a text. Callers copy it: the choices of one request share the compiled schema."""
    return compiled(tokenizer, schema)
