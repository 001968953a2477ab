"""What a mode of generation is: one request in, pieces of text out, every sweep booked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from serving.accounting import Account

DEFAULT_CHUNK = 32
DEFAULT_STEPS = 8
DEFAULT_TEMPERATURE = 0.8
DEFAULT_CODEC = "int8"


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
    codec: str = DEFAULT_CODEC


class Mode(ABC):
    """One way of generating text."""

    name: str

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why this mode has no weights to work with; empty when it has."""

    @property
    @abstractmethod
    def context_bytes(self) -> int:
        """Most bytes of prompt and output together. Meaningful while there is no `problem`."""

    uses_hosts: bool = True

    @abstractmethod
    def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """Pieces of text, in order, each booked in `account`. Raises Refusal."""
