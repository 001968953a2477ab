"""The interface of a mode: takes one request, yields pieces of text, and accounts for every sweep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serving.modes import SHAPED
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account
from serving.router.request import SHAPES, Request
from serving.router.ring import RingView
from serving.router.session import Session
from stages.errors import CodecError
from stages.host.plan import ModelKind
from stages.model.samplers import DEFAULT_SAMPLER
from stages.model.scoring import Shaping
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import internal, too_long

# Tokens per sweep, for byte models and for token models.
DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK = 32, 8
DEFAULT_STEPS = 8  # twice as many double the time for 0.07 bits a byte
DEFAULT_TEMPERATURE = 0.8
# English has 3.2 bytes a token with the shipped vocabulary of 3,072, and 4.5 with vocabularies of 50,000. An output
# generated at once is cut at the request's bytes: too many tokens cost time, too few cost a trip.
MIN_BYTES_A_TOKEN = 2.5


def words_of(sampling: Mapping[str, Any]) -> str:
    """Settings in readable form, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items() if isinstance(value, int | float))


@dataclass(frozen=True, kw_only=True)
class Generation(Request):
    """A checked request for one mode; omitted settings have their defaults, except those that the mode chooses."""

    # In the mode's tokens; UTF-8 until the request is `tokenized`.
    prompt: bytes
    # To generate, unless the text ends earlier.
    max_tokens: int
    due_at: float
    temperature: float = DEFAULT_TEMPERATURE
    # Settings that the request names; for others, the model's publisher or `auto` may have another default.
    given: frozenset[str] = frozenset()
    steps: int = DEFAULT_STEPS
    codec: str = ""
    sampler: str = DEFAULT_SAMPLER
    # Tokens that end a text.
    ends: frozenset[int] = frozenset()
    # Prompt tokens from the user: the rest may be text of another mode that this one continues.
    given_tokens: int = 0

    def sampled_for(self, mode: Mode) -> Generation:
        """This request with the publisher's sampling settings where it names none."""
        names = mode.tokenizer.sampling.keys() - self.given - (SHAPES.keys() if mode.name not in SHAPED else set())
        own: dict[str, Any] = {name: mode.tokenizer.sampling[name] for name in names}
        return replace(self, **own)

    @property
    def sampling_words(self) -> str:
        """The sampling settings in readable form."""
        return words_of({"temperature": self.temperature, **self.shapes})

    def check_fit(self, tokenizer: Tokenizer, positions: int, owner: str = "this model's") -> None:
        """Raise StatusError if a context lacks room. A limit in bytes counts as that many tokens: a byte may be one."""
        counts_bytes = tokenizer is not BYTE_TOKENIZER and self.max_tokens == self.max_bytes
        prompt, unit = tokenizer.vocabulary.count(self.prompt), " bytes, each counted as a token" * counts_bytes
        if (total := prompt + self.max_tokens) > positions:
            parts = [f"prompt ({prompt} {tokenizer.noun})", f"output ({self.max_tokens}{unit})"]
            # an output too long for any prompt is the mistake to name first
            taken = " and ".join(parts if self.max_tokens < positions else reversed(parts)) + f" together take {total}"
            raise too_long(f"{taken}, but {owner} maximum context length is {positions}: shorten one of them")

    @property
    def shaping(self) -> Shaping:
        return Shaping(**self.shapes, prompt=self.given_tokens)

    @property
    def sampling(self) -> stage_pb2.Sampling:
        shaping = stage_pb2.Shaping(**self.shapes, prompt=self.given_tokens) if self.shapes else None
        schema, ends = self.json_schema, sorted(self.ends)
        grammar = stage_pb2.Grammar(json_schema=schema, ends=ends, prompt=self.given_tokens) if schema else None
        return stage_pb2.Sampling(
            seed=self.seed, temperature=self.temperature, shaping=shaping, logprobs=self.logprobs, grammar=grammar
        )

    @property
    def shapes(self) -> dict[str, Any]:
        """The given settings that shape sampling."""
        biases = {"logit_bias": self.logit_bias} if self.logit_bias else {}
        return {name: value for name in SHAPES if (value := getattr(self, name)) is not None} | biases

    def whole(self, vocabulary: Vocabulary) -> int:
        """Tokens of an output generated at once: enough for most texts of `max_bytes`."""
        if self.max_bytes is None:
            return self.max_tokens
        return min(self.max_tokens, math.ceil(self.max_bytes / (1 if vocabulary == BYTES else MIN_BYTES_A_TOKEN)))

    def until_end(self, tokens: bytes, vocabulary: Vocabulary) -> tuple[bytes, bool]:
        """`tokens` up to and with the first one that ends the text, and whether there is such a token."""
        written = vocabulary.tokens(tokens) if self.ends else []
        end = next((i for i, token in enumerate(written) if token in self.ends), None)
        return (tokens, False) if end is None else (vocabulary.cut(tokens, 0, end + 1), True)


class Mode(ABC):
    """One way of generating text."""

    name: str
    default_codec: str = "int8"  # encodes states between hosts
    uses_hosts: bool = True

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this mode's model. Meaningful while there is no `problem`."""
        return BYTE_TOKENIZER

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why this mode has no weights; empty if it has."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """Most tokens of prompt and output together. Meaningful while there is no `problem`."""

    def length(self, request: Generation) -> int:
        """Tokens that this mode generates for `request`, unless the text ends earlier."""
        return request.max_tokens

    def check(self, request: Generation) -> None:
        """Raise StatusError if this mode cannot do `request`, before any host works. Meaningful as above."""
        return

    @abstractmethod
    def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """Yield pieces of text, in tokens and in order, and add each to `account`. Raises StatusError."""


class PipelineMode(Mode):
    """A mode whose text comes from one kind of the hosts' models."""

    kind: ModelKind
    # The missing thing, for the error when the hosts have no model of that kind.
    absent: str

    def __init__(self, ring: RingView, tokenizers: Tokenizers) -> None:
        self.ring, self.tokenizers = ring, tokenizers

    @property
    def problem(self) -> str:
        model = self._model
        return self.absent if model is None else self.tokenizers.problem(model)

    @property
    def positions(self) -> int:
        return self._model.positions if self._model else 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.of(self._model.digest) if self._model else BYTE_TOKENIZER

    @property
    def _model(self) -> stage_pb2.ModelInfo | None:
        model = self.ring.model(self.kind)
        return None if model is None or model.HasField("pictures") else model


def count_tokens(event: stage_pb2.Event, vocabulary: Vocabulary, source: str) -> int:
    """Number of tokens in a result. Raises StatusError if it is not text. source: "sweep" or "step"."""
    try:
        return len(vocabulary.tokens(event.text))
    except CodecError as error:
        raise internal(f"a {source} returned invalid data: {error}") from None


async def book(
    session: Session, request: Generation, tokens: bytes, left: int, logprobs: stage_pb2.Logprobs | None = None
) -> tuple[bytes, int]:
    """Add a result to the account. Returns its tokens up to the text's end, and how many tokens may follow: none after
    the end, where this also finishes the session. logprobs: the tokens' logprobs."""
    piece, ended = request.until_end(tokens, session.vocabulary)
    session.account.add_text(piece, logprobs)
    left = 0 if ended or session.account.complete else left - session.vocabulary.count(tokens)
    if not left:
        await session.finish()
    return piece, left
