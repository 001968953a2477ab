"""How text is written in the symbols of a model, and read from them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stages.alphabet import BYTES, Alphabet

BYTES_NAME = "bytes"
"""What a manifest calls the tokenizer of a byte model."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class Reader(ABC):
    """Makes text of the symbols that come, piece by piece, after a prompt."""

    @abstractmethod
    def feed(self, symbols: bytes) -> bytes:
        """The text of the symbols so far that was not told yet, as far as it cannot change any more: UTF-8."""

    @abstractmethod
    def end(self) -> bytes:
        """The rest."""


class Spelling(ABC):
    """The symbols of one model."""

    noun: ClassVar[str]
    """What sentences call them."""
    alphabet: Alphabet
    tokenizer: str
    """Which symbols they are: `bytes`, or the SHA-256 of a tokenizer's file."""
    ends: frozenset[int] = frozenset()
    """Symbols that say that a text ends."""

    @abstractmethod
    async def spell(self, text: bytes) -> bytes:
        """A text in symbols. text: UTF-8."""

    @abstractmethod
    def plain(self, text: str) -> bytes:
        """A piece of a text in symbols, without those that texts begin with. Blocks."""

    @abstractmethod
    async def spell_chat(self, messages: Sequence[Message]) -> tuple[bytes, int]:
        """A conversation that the model is to go on with, in symbols, and how many bytes of text that is.

        Raises Refusal for one that the model's template does not take.
        """

    @abstractmethod
    def reader(self, prompt: bytes) -> Reader:
        """For what is written after `prompt`, given in symbols."""


class _Bytes(Reader):
    """Text as it comes. Whoever shows it puts characters together that come in two pieces."""

    def feed(self, symbols: bytes) -> bytes:
        return symbols

    def end(self) -> bytes:
        return b""


class ByteSpelling(Spelling):
    """A text is its own symbols. The model goes on with texts and knows no roles: messages are a line each."""

    noun = "bytes"
    alphabet, tokenizer = BYTES, BYTES_NAME

    async def spell(self, text: bytes) -> bytes:
        return text

    def plain(self, text: str) -> bytes:
        return text.encode()

    async def spell_chat(self, messages: Sequence[Message]) -> tuple[bytes, int]:
        text = "\n".join(message.content for message in messages).encode()
        return text, len(text)

    def reader(self, prompt: bytes) -> Reader:
        return _Bytes()


IN_BYTES = ByteSpelling()
