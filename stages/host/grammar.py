"""JSON by a schema: which symbols may come next, from the symbols so far.

The masks are a pure function of schema, vocabulary and text, so `ar`, and what verifies guesses of it, draw from the
same distribution. llguidance parses (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onesweep.stages.checkpoint.checkpoint import read_companion
from onesweep.stages.checkpoint.manifest import TOKENIZER_NAME, read_manifest
from onesweep.stages.host.parts import ModelSource
from onesweep.stages.model.vocabulary import BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_BYTES = 16 << 10  # it travels with every hop
MAX_ENDS = 64
# Memory that one schema may come to take: up to 2 KB a state.
MAX_LEXER_STATES = 10_000
ABSENT = "llguidance is not installed: pip install 'onesweep[schema]'"


@dataclass(frozen=True)
class GrammarSettings:
    """The schema that a text is held to, and the place where the text begins."""

    schema: str  # a JSON schema, as JSON
    ends: tuple[int, ...]  # symbols that end a text; they may come once the text is complete
    prompt: int  # symbols before the text


def grammar_absent() -> str:
    """Why no text can be held to a schema here; empty where one can."""
    return "" if importlib.util.find_spec("llguidance") else ABSENT


def schema_problem(schema: str) -> str:
    """Why no text can be held to a JSON schema; empty where one can. Takes some milliseconds, a second at most."""
    if len(schema.encode()) > MAX_SCHEMA_BYTES:
        return f"the JSON schema has {len(schema.encode())} bytes, at most {MAX_SCHEMA_BYTES}: simplify it"
    if absent := grammar_absent():
        return absent
    matcher = _matcher(_byte_tokenizer(), schema)
    if isinstance(matcher, str) or matcher.is_error():
        words = matcher if isinstance(matcher, str) else matcher.get_error()
        return f"the JSON schema cannot be used: {' '.join(words.split())[:300]}"
    return ""


class Grammar:
    """The texts that a schema allows, and a place in one of them."""

    def __init__(self, source: ModelSource, settings: GrammarSettings) -> None:
        """Raises CheckpointError for a tokenizer that is missing or damaged, ValueError for a schema that is none."""
        self.settings, self._size = settings, source.alphabet.size
        tokens = source.alphabet != BYTES
        tokenizer = _tokenizer(source, settings.ends) if tokens else _byte_tokenizer()
        matcher = _matcher(tokenizer, settings.schema)
        if isinstance(matcher, str):
            raise ValueError(matcher)
        self._matcher, self._read = matcher, list[int]()

    @property
    def problem(self) -> str:
        """Why it cannot go on: the schema turned out to be too complex; else empty."""
        return self._matcher.get_error().partition("\n")[0]  # its state follows, which may be long

    @property
    def complete(self) -> bool:
        """True if nothing can follow the text that was read."""
        return self._matcher.is_stopped() and not self.problem

    def read(self, written: Sequence[int]) -> None:
        """Go to the end of a text, which may part from the one that was read before."""
        same = next((i for i, (a, b) in enumerate(zip(self._read, written, strict=False)) if a != b), None)
        if same is None:
            same = min(len(self._read), len(written))
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        self._matcher.consume_tokens(list(written[same:]))
        self._read = list(written)

    def masked(self, logits: Tensor) -> Tensor | None:
        """Logits with -inf for symbols that cannot follow; None where none can. logits: (1, vocabulary), as the
        result."""
        if self._matcher.is_stopped():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        if self.problem or not allowed.any():
            return None
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -torch.inf)


class _ByteVocabulary:
    """A byte model's symbols, and one more that ends a text, which the model cannot write."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()))


@lru_cache(maxsize=4)
def _token_tokenizer(directory: Path, digest: str, size: int, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    text = read_companion(directory, read_manifest(directory), TOKENIZER_NAME).decode()
    return LLTokenizer(text, n_vocab=size, eos_token=list(ends))


def _tokenizer(source: ModelSource, ends: tuple[int, ...]) -> LLTokenizer:
    """That of a token model. Raises CheckpointError."""
    return _token_tokenizer(source.directory, source.digest, source.alphabet.size, ends)


def _matcher(tokenizer: LLTokenizer, schema: str) -> LLMatcher | str:
    """The schema's texts; a sentence where it is no JSON object."""
    from llguidance import LLMatcher, LLParserLimits

    # one way of spacing: with any white space allowed, a weak model writes nothing else
    spacing: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=spacing)
    except ValueError as error:
        return str(error)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))
