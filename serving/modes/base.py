"""What a mode of generation is: one request in, pieces of text out, every sweep booked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from serving.accounting import Account
from stages.codec import CODECS

DEFAULT_CHUNK = 32
DEFAULT_STEPS = 8
DEFAULT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Generation:
    """A validated request."""

    prompt: bytes
    max_bytes: int
    seed: int
    deadline_unix_ms: int
    temperature: float = DEFAULT_TEMPERATURE
    chunk: int = DEFAULT_CHUNK
    steps: int = DEFAULT_STEPS
    codec: str = ""
    """How states travel between hosts."""
    drafter: str | None = None
    draft: int | None = None
    """Bytes to guess for a sweep; None = as many as pay."""


class Mode(ABC):
    """One way of generating text."""

    name: str
    codecs: tuple[str, ...] = tuple(CODECS)
    """How states may travel between hosts."""
    default_codec: str = "int8"
    uses_hosts: bool = True

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why this mode has no weights to work with; empty when it has."""

    @property
    @abstractmethod
    def context_bytes(self) -> int:
        """Most bytes of prompt and output together. Meaningful while there is no `problem`."""

    @abstractmethod
    def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """Pieces of text, in order, each booked in `account`. Raises Refusal."""
