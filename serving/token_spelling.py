"""Text in the tokens of a pretrained model: its own tokenizer and chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from serving.chat_template import ChatTemplate
from serving.spelling import Message, Reader, Spelling
from stages.alphabet import Alphabet
from stages.checkpoint import file_digest
from stages.errors import CheckpointError, InputError
from stages.manifest import Manifest
from stages.refusal import failed_precondition

try:
    from tokenizers import Tokenizer
except ImportError as error:
    raise InputError(
        f"a token model needs the tokenizers package, which is not installed here ({error}): "
        "pip install 'onesweep[pretrained]'"
    ) from None

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
MAX_FILE_BYTES = 64 << 20
INLINE_BYTES = 4096
"""A longer text is spelled on another thread: requests go on meanwhile."""
CONTEXT = 8
"""Tokens of a prompt that a reader looks at: whether a word begins with a space is seen from the one before."""
MOST_HELD = 64
"""Tokens without a whole character at their end, after which they are told as they are."""
UNKNOWN = "\ufffd"
"""What stands for bytes that are no character, or none yet."""


class TokenSpelling(Spelling):
    """The tokens of one model."""

    noun = "tokens"

    def __init__(
        self, tokenizer: Tokenizer, alphabet: Alphabet, ends: frozenset[int], template: ChatTemplate | None
    ) -> None:
        self.tokenizer, self.alphabet, self.ends, self.template = tokenizer, alphabet, ends, template

    async def spell(self, text: bytes) -> bytes:
        return await self._encoded(text.decode(), specials=True)

    async def spell_chat(self, messages: Sequence[Message]) -> tuple[bytes, int]:
        if self.template is None:
            raise failed_precondition("this model has no chat template: send a prompt in place of messages")
        text = await asyncio.to_thread(self.template.render, messages)
        return await self._encoded(text, specials=False), len(text.encode())

    def reader(self, prompt: bytes) -> Reader:
        known = self.alphabet.symbols(self.alphabet.cut(prompt, max(self.alphabet.count(prompt) - CONTEXT, 0)))
        return _Tokens(self.tokenizer, self.alphabet, known)

    async def _encoded(self, text: str, specials: bool) -> bytes:
        """:param specials: with the tokens that a text begins with, where the tokenizer has such."""

        def encode() -> list[int]:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=specials).ids
            return ids

        return self.alphabet.encode(encode() if len(text) < INLINE_BYTES else await asyncio.to_thread(encode))


class _Tokens(Reader):
    """Tells a token's text as what it adds to that of the tokens before it, once no character is cut at its end."""

    def __init__(self, tokenizer: Tokenizer, alphabet: Alphabet, prompt: list[int]) -> None:
        """:param prompt: its last tokens."""
        self.tokenizer, self.alphabet = tokenizer, alphabet
        endings = (prompt[at:] for at in range(len(prompt)))
        # one that begins in the middle of a character would spoil what follows it
        self._known = next((each for each in endings if UNKNOWN not in self._text(each)), [])
        self._held = list[int]()

    def feed(self, symbols: bytes) -> bytes:
        return "".join(self._told(symbol) for symbol in self.alphabet.symbols(symbols)).encode()

    def end(self) -> bytes:
        return self._added().rstrip(UNKNOWN).encode()

    def _told(self, symbol: int) -> str:
        self._held.append(symbol)
        text = self._added()
        if text.endswith(UNKNOWN) and len(self._held) <= MOST_HELD:
            return ""
        self._known, self._held = self._held if text else (self._known + self._held)[-CONTEXT:], []
        return text

    def _added(self) -> str:
        """What the tokens that are held add to the text."""
        return self._text(self._known + self._held)[len(self._text(self._known)) :]

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens)  # leaves special tokens out
        return text


def read_token_spelling(directory: Path, manifest: Manifest) -> TokenSpelling:
    """That of the checkpoint in `directory`. Blocks. Raises CheckpointError for a file that is missing or damaged."""
    raw = _checked(directory, manifest, TOKENIZER_NAME)
    try:
        tokenizer = Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library has no type of its own for it
        raise CheckpointError(f"{directory / TOKENIZER_NAME} is no tokenizer: {error}") from None
    size = manifest.architecture.vocabulary
    if tokenizer.get_vocab_size() > size:
        raise CheckpointError(
            f"the tokenizer of {directory} has {tokenizer.get_vocab_size()} tokens, the model {size}: "
            "it belongs to another one"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = frozenset(manifest.end_tokens)
    template = None
    if TEMPLATE_NAME in manifest.files:
        source = _checked(directory, manifest, TEMPLATE_NAME).decode(errors="replace")
        template = ChatTemplate(source, _first_token(tokenizer), _text_of(tokenizer, manifest.end_tokens))
    return TokenSpelling(tokenizer, Alphabet(size), ends, template)


def _first_token(tokenizer: Tokenizer) -> str:
    """What texts begin with, where the tokenizer adds something."""
    return _text_of(tokenizer, tokenizer.encode("", add_special_tokens=True).ids)


def _text_of(tokenizer: Tokenizer, symbols: Sequence[int]) -> str:
    """The first of them as it stands in a template; empty where there is none."""
    return (tokenizer.id_to_token(symbols[0]) or "") if symbols else ""


def _checked(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A file that the manifest names. Raises CheckpointError."""
    path = directory / name
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        if file_digest(path) != manifest.files[name]:
            raise CheckpointError(f"{path} does not have its manifest's SHA-256: it is damaged")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
