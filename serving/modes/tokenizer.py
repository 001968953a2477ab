"""Tokenizers and detokenizers: from text to a model's tokens, and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition

# A manifest's name for the tokenizer of a byte model.
BYTES_NAME = "bytes"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    # Further fields for the chat template, of a message about tools.
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation to continue, as in `GenerateRequest`."""

    messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    # Names of the tools; the model must call one of them.
    must_call: Sequence[str] = ()
    # The model continues the last message instead of answering it.
    continues: bool = False
    # JSON schema of an answer without a tool call; empty if any text will do.
    answer: str = ""


class EncodedChat(NamedTuple):
    """A conversation in a model's tokens."""

    tokens: bytes
    text_bytes: int
    # Schema that the answer must follow; empty if any text will do.
    json_schema: str = ""


class Detokenizer(ABC):
    """Turns tokens that follow a prompt into text, piece by piece."""

    @abstractmethod
    def feed(self, tokens: bytes) -> bytes:
        """The new text that later tokens can no longer change: UTF-8."""

    @abstractmethod
    def end(self) -> bytes:
        """The rest."""


class Tokenizer(ABC):
    """The tokens of one model."""

    # Their name in messages.
    noun: ClassVar[str]
    vocabulary: Vocabulary
    # Identifies the vocabulary: `bytes`, or the SHA-256 of a tokenizer's file.
    id: str
    # Tokens that end a text.
    ends: frozenset[int] = frozenset()
    # The name under which the model was published.
    model_name: str = ""
    # The publisher's sampling settings, by the names of a request's settings.
    sampling: Mapping[str, float] = MappingProxyType({})
    # Whether the model knows the turns of a conversation.
    chats: bool = False
    # Most bytes that one token stands for.
    max_token_bytes: int = 1

    @abstractmethod
    def encode_text(self, text: bytes) -> bytes:
        """A text in tokens. text: UTF-8. Blocks."""

    @abstractmethod
    def encode_piece(self, text: str) -> bytes:
        """A piece of a text in tokens, without the tokens that begin a text. Blocks."""

    @abstractmethod
    def encode_chat(self, chat: ChatPrompt) -> EncodedChat:
        """Blocks. Raises StatusError for a conversation that the model's template rejects."""

    def hidden_tokens(self, names: Sequence[bytes]) -> frozenset[int]:
        """Control tokens with one of these names, which texts leave out."""
        return frozenset()

    @abstractmethod
    def token_text(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text, which may split a character."""

    @abstractmethod
    def detokenizer(self, prompt: bytes) -> Detokenizer:
        """A detokenizer for text after `prompt`, given in tokens."""


class _Bytes(Detokenizer):
    """Bytes as they come. A character may arrive in two pieces; `TextDecoder` joins them."""

    def feed(self, tokens: bytes) -> bytes:
        return tokens

    def end(self) -> bytes:
        return b""


class ByteTokenizer(Tokenizer):
    """A text is its own tokens. The model continues texts and knows no roles: each message becomes a line."""

    noun = "bytes"
    vocabulary, id = BYTES, BYTES_NAME

    def encode_text(self, text: bytes) -> bytes:
        return text

    def encode_piece(self, text: str) -> bytes:
        return text.encode()

    def encode_chat(self, chat: ChatPrompt) -> EncodedChat:
        if chat.tools or any(message.more for message in chat.messages):
            raise failed_precondition("this model has no chat template: it takes no tools and no messages about them")
        # without role labels, which the model never saw: one user message gives the same text as a completion
        text = "\n".join(message.content for message in chat.messages).encode()
        return EncodedChat(text, len(text))

    def token_text(self, token: int) -> bytes:
        return bytes([token])

    def detokenizer(self, prompt: bytes) -> Detokenizer:
        return _Bytes()


BYTE_TOKENIZER = ByteTokenizer()

# The tokenizers of all models that a router can serve.


class Tokenizers:
    """Tokenizers of token models, keyed by the models' digests."""

    def __init__(self, of_tokens: Mapping[str, Tokenizer]) -> None:
        self._of_tokens = of_tokens

    def of(self, digest: str) -> Tokenizer:
        """The tokenizer of the model with this digest, here or on the hosts; meaningful while there is no `problem`."""
        return self._of_tokens.get(digest, BYTE_TOKENIZER)

    def problem(self, model: stage_pb2.ModelInfo) -> str:
        """Why texts for one of the hosts' models cannot be tokenized; empty if they can."""
        if model.tokenizer == BYTES_NAME or model.digest in self._of_tokens:
            return ""
        return (
            f"the router has no tokenizer for the hosts' model {model.digest[:12]}: start it with their checkpoint "
            "(--checkpoint DIR)"
        )


NO_TOKENIZERS = Tokenizers({})


def tokenizer_id(manifest: Manifest) -> str:
    """The `Tokenizer.id` of a model's tokens."""
    return BYTES_NAME if manifest.tokenizer == BYTES_NAME else manifest.files[TOKENIZER_NAME]
