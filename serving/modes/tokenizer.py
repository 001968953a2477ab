"""Tokenizers and detokenizers: text in the tokens of a model, and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition

# What a manifest calls the tokenizer of a byte model.
BYTES_NAME = "bytes"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    # Of a message about tools: the fields that the chat template is given beside the others.
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that the model is to go on with, as `GenerateRequest` has it."""

    messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    # Names of the tools of which it must call one.
    must_call: Sequence[str] = ()
    # The last message is continued where it ends.
    continues: bool = False
    # JSON schema of what is written where no tool is called; empty where it is any text.
    answer: str = ""


class EncodedChat(NamedTuple):
    """A conversation in the tokens of a model."""

    tokens: bytes
    text_bytes: int
    # That the answer must follow; empty where it is any text.
    json_schema: str = ""


class Detokenizer(ABC):
    """Makes text of the tokens that come, piece by piece, after a prompt."""

    @abstractmethod
    def feed(self, tokens: bytes) -> bytes:
        """The text of the tokens so far that was not told yet, as far as it cannot change any more: UTF-8."""

    @abstractmethod
    def end(self) -> bytes:
        """The rest."""


class Tokenizer(ABC):
    """The tokens of one model."""

    # What sentences call them.
    noun: ClassVar[str]
    vocabulary: Vocabulary
    # Which tokens they are: `bytes`, or the SHA-256 of a tokenizer's file.
    id: str
    # Tokens that say that a text ends.
    ends: frozenset[int] = frozenset()
    # The model's, where it was published.
    model_name: str = ""
    # How the model's publisher has its tokens drawn, by the names of a request's settings.
    sampling: Mapping[str, float] = MappingProxyType({})
    # Whether the model knows whose turn it is in a conversation.
    chats: bool = False
    # Bytes that one token stands for at most.
    most_bytes: int = 1

    @abstractmethod
    def encode_text(self, text: bytes) -> bytes:
        """A text in tokens. text: UTF-8. Blocks."""

    @abstractmethod
    def encode_piece(self, text: str) -> bytes:
        """A piece of a text in tokens, without those that texts begin with. Blocks."""

    @abstractmethod
    def encode_chat(self, chat: ChatPrompt) -> EncodedChat:
        """Blocks. Raises StatusError for a conversation that the model's template does not take."""

    def unwritten(self, names: Sequence[bytes]) -> frozenset[int]:
        """Tokens with one of these names that are left out of a text: control tokens."""
        return frozenset()

    @abstractmethod
    def token_text(self, token: int) -> bytes:
        """The bytes that a token stands for in the middle of a text, which may cut a character in two."""

    @abstractmethod
    def detokenizer(self, prompt: bytes) -> Detokenizer:
        """For what is written after `prompt`, given in tokens."""


class _Bytes(Detokenizer):
    """Bytes as they come. A character may come in two pieces; `TextDecoder` joins them."""

    def feed(self, tokens: bytes) -> bytes:
        return tokens

    def end(self) -> bytes:
        return b""


class ByteTokenizer(Tokenizer):
    """A text is its own tokens. The model continues with texts and knows no roles: messages are a line each."""

    noun = "bytes"
    vocabulary, id = BYTES, BYTES_NAME

    def encode_text(self, text: bytes) -> bytes:
        return text

    def encode_piece(self, text: str) -> bytes:
        return text.encode()

    def encode_chat(self, chat: ChatPrompt) -> EncodedChat:
        if chat.tools or any(message.more for message in chat.messages):
            raise failed_precondition("this model has no chat template: it takes no tools and no messages about them")
        # without labels, which the model never saw: one user message gives the text of the same completion
        text = "\n".join(message.content for message in chat.messages).encode()
        return EncodedChat(text, len(text))

    def token_text(self, token: int) -> bytes:
        return bytes([token])

    def detokenizer(self, prompt: bytes) -> Detokenizer:
        return _Bytes()


BYTE_TOKENIZER = ByteTokenizer()

# The tokenizers of the models that a router can serve.


class Tokenizers:
    """Tokenizers of token models by the models' digests, which say which tokenizer belongs to them."""

    def __init__(self, of_tokens: Mapping[str, Tokenizer]) -> None:
        self._of_tokens = of_tokens

    def of(self, digest: str) -> Tokenizer:
        """That of the model with this digest, here or on the hosts; meaningful while there is no `problem`."""
        return self._of_tokens.get(digest, BYTE_TOKENIZER)

    def problem(self, model: stage_pb2.ModelInfo) -> str:
        """Why texts for a model of the hosts cannot be tokenized; empty when they can."""
        if model.tokenizer == BYTES_NAME or model.digest in self._of_tokens:
            return ""
        return (
            f"the hosts' model {model.digest[:12]} reads tokens, and the router has no tokenizer of it: start it with "
            "--checkpoint DIR, the same checkpoint"
        )


NO_TOKENIZERS = Tokenizers({})


def tokenizer_id(manifest: Manifest) -> str:
    """Which tokens a model reads, as `Tokenizer.id` has it."""
    return BYTES_NAME if manifest.tokenizer == BYTES_NAME else manifest.files[TOKENIZER_NAME]
