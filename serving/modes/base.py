"""The interface of a mode: one request in, pieces of text out, every sweep booked."""

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
from stages.wire.status import internal, invalid

# Tokens a sweep, of bytes and of tokens.
DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK = 32, 8
DEFAULT_STEPS = 8  # past them, time doubles for 0.07 bits a byte
DEFAULT_TEMPERATURE = 0.8
# English has 3.2 bytes a token with the shipped 3,072 tokens, and 4.5 with vocabularies of 50,000. An output made at
# once is cut at the request's bytes: too many tokens cost time, too few a trip.
LEAST_BYTES_A_TOKEN = 2.5


def words_of(sampling: Mapping[str, Any]) -> str:
    """Settings for people, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items() if isinstance(value, int | float))


def whole(most_bytes: int, vocabulary: Vocabulary) -> int:
    """Tokens that are enough for most texts of so many bytes."""
    return most_bytes if vocabulary == BYTES else math.ceil(most_bytes / LEAST_BYTES_A_TOKEN)


@dataclass(frozen=True, kw_only=True)
class Generation(Request):
    """A request that was checked, for one mode: what it left out has the defaults, except what the mode chooses."""

    # In the mode's tokens; UTF-8 until the request is `tokenized`.
    prompt: bytes
    # To generate, if the text does not end before.
    max_tokens: int
    due_at: float
    temperature: float = DEFAULT_TEMPERATURE
    # Settings that the request names: where it does not, the model's publisher, or `auto`, may have another default.
    given: frozenset[str] = frozenset()
    steps: int = DEFAULT_STEPS
    codec: str = ""
    sampler: str = DEFAULT_SAMPLER
    # Tokens that end a text.
    ends: frozenset[int] = frozenset()
    # Of the prompt, those that the user gave: `auto` may have one mode go on with what another wrote.
    given_tokens: int = 0

    def sampled_for(self, mode: Mode) -> Generation:
        """As the model's publisher has it sampled, where the request does not say."""
        names = mode.tokenizer.sampling.keys() - self.given - (SHAPES.keys() if mode.name not in SHAPED else set())
        own: dict[str, Any] = {name: mode.tokenizer.sampling[name] for name in names}
        return replace(self, **own)

    @property
    def sampling_words(self) -> str:
        """Settings that tokens are drawn with, for people."""
        return words_of({"temperature": self.temperature, **self.shapes})

    def check_fit(self, tokenizer: Tokenizer, positions: int, whose: str = "the model's context is") -> None:
        """Raise StatusError where a context has no room. A byte may be a token, so a limit in bytes counts so many."""
        counts_bytes = tokenizer is not BYTE_TOKENIZER and self.max_tokens == self.max_bytes
        prompt, unit = tokenizer.vocabulary.count(self.prompt), " bytes, each counted as a token" * counts_bytes
        if (whole := prompt + self.max_tokens) > positions:
            parts = [f"prompt ({prompt} {tokenizer.noun})", f"output ({self.max_tokens}{unit})"]
            # an output that no prompt leaves room for is what was wrong
            said = " and ".join(parts if self.max_tokens < positions else reversed(parts))
            raise invalid(f"{said} together take {whole}, {whose} {positions}: shorten one of them")

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
        """The settings that shape what is drawn, as far as they are given."""
        biases = {"logit_bias": self.logit_bias} if self.logit_bias else {}
        return {name: value for name in SHAPES if (value := getattr(self, name)) is not None} | biases

    def whole(self, vocabulary: Vocabulary) -> int:
        """Tokens of an output that is made at once: enough for most texts of `max_bytes`."""
        return self.max_tokens if self.max_bytes is None else min(self.max_tokens, whole(self.max_bytes, vocabulary))

    def until_end(self, tokens: bytes, vocabulary: Vocabulary) -> tuple[bytes, bool]:
        """`tokens` to the first that ends the text, and whether there is one."""
        written = vocabulary.tokens(tokens) if self.ends else []
        end = next((i for i, token in enumerate(written) if token in self.ends), None)
        return (tokens, False) if end is None else (vocabulary.cut(tokens, 0, end + 1), True)


class Mode(ABC):
    """One way of generating text."""

    name: str
    default_codec: str = "int8"  # how states travel between hosts
    uses_hosts: bool = True

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokens that this mode reads and writes. Meaningful while there is no `problem`."""
        return BYTE_TOKENIZER

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why this mode has no weights to work with; empty when it has."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """Most tokens of prompt and output together. Meaningful while there is no `problem`."""

    def length(self, request: Generation) -> int:
        """Most tokens that this mode writes for `request`, if the text does not end before."""
        return request.max_tokens

    def check(self, request: Generation) -> None:
        """Raise StatusError where this mode cannot do `request`, before any host is asked. Meaningful as above."""
        return

    @abstractmethod
    def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """Pieces of text, in tokens and in order, each booked in `account`. Raises StatusError."""


class PipelineMode(Mode):
    """A mode whose text one kind of the hosts' models writes."""

    kind: ModelKind
    # What the hosts lack where they have none of that kind.
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
    """Tokens that a result brings. Raises StatusError for what is no text. source: "sweep" or "step"."""
    try:
        return len(vocabulary.tokens(event.text))
    except CodecError as error:
        raise internal(f"a {source} came back with nonsense: {error}") from None


async def book(
    session: Session, request: Generation, tokens: bytes, left: int, told: stage_pb2.Logprobs | None = None
) -> tuple[bytes, int]:
    """Book what a result brings. Returns it as far as the text, and how many tokens may follow: none after its end,
    at which the session is finished. told: of these tokens."""
    piece, ended = request.until_end(tokens, session.vocabulary)
    session.account.add_text(piece, told)
    left = 0 if ended or session.account.complete else left - session.vocabulary.count(tokens)
    if not left:
        await session.finish()
    return piece, left
