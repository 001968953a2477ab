"""What a mode of generation is: one request in, pieces of text out, every sweep booked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, get_args

from serving.accounting import Account
from serving.spelling import IN_BYTES, Spelling
from serving.worth import MAX_DRAFT
from stages.alphabet import Alphabet
from stages.codec import CODECS
from stages.samplers import DEFAULT_SAMPLER

DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK = 32, 8
"""Symbols a sweep, of bytes and of tokens."""
DEFAULT_STEPS = 8
DEFAULT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Generation:
    """A validated request."""

    prompt: bytes
    """In the mode's symbols, as is the suffix: text, until it was spelled (serving/spelling.py)."""
    max_symbols: int
    """To write, if the text does not end before."""
    seed: int
    deadline_unix_ms: int
    temperature: float = DEFAULT_TEMPERATURE
    chunk: int | None = None
    """Symbols a sweep; None = as many as the mode does best with."""
    steps: int = DEFAULT_STEPS
    codec: str = ""
    """How states travel between hosts."""
    drafter: str | None = None
    draft: int | None = None
    """Symbols to guess for a sweep; None = as many as pay."""
    branches: int | None = None
    """Alternatives to guess at a place; None = as many as pay."""
    scorer: str | None = None
    candidates: int | None = None
    """Continuations scored in a sweep; None = as many as the weights ask for."""
    suffix: bytes = b""
    """What follows the text."""
    budget_ms: int | None = None
    """Latency to keep to; None = no matter how long it takes."""
    own_temperature: bool = False
    """Whether the temperature is the user's, not the default."""
    sampler: str = DEFAULT_SAMPLER
    """How a chain goes from noise to text."""
    ends: frozenset[int] = frozenset()
    """Symbols that end a text."""

    def until_end(self, symbols: bytes, alphabet: Alphabet) -> tuple[bytes, bool]:
        """`symbols` to the first that ends the text, and whether there is one."""
        written = alphabet.symbols(symbols) if self.ends else []
        end = next((i for i, symbol in enumerate(written) if symbol in self.ends), None)
        return (symbols, False) if end is None else (alphabet.cut(symbols, 0, end + 1), True)


Choosable = Literal["chunk", "steps", "codec", "sampler", "drafter", "draft", "branches", "scorer", "candidates"]
"""Settings of a request that a mode may take upon itself."""
CHOOSABLE: tuple[Choosable, ...] = get_args(Choosable)


class Mode(ABC):
    """One way of generating text."""

    name: str
    codecs: tuple[str, ...] = tuple(CODECS)
    """How states may travel between hosts."""
    default_codec: str = "int8"
    most_draft: int = MAX_DRAFT
    """Symbols that may be guessed for a sweep."""
    uses_hosts: bool = True
    fills: bool = False
    """Whether it writes what stands before a given suffix."""
    chooses: tuple[Choosable, ...] = ()
    """Settings that are the mode's to choose: a request that names one is refused."""
    keeps_budget: bool = False

    @property
    def spelling(self) -> Spelling:
        """The symbols that this mode reads and writes. Meaningful while there is no `problem`."""
        return IN_BYTES

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why this mode has no weights to work with; empty when it has."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """Most symbols of prompt and output together. Meaningful while there is no `problem`."""

    def check(self, request: Generation) -> None:
        """Raise Refusal where this mode cannot do `request`, before any host is asked. Meaningful as above."""
        return

    @abstractmethod
    def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """Pieces of text, in symbols and in order, each booked in `account`. Raises Refusal."""
