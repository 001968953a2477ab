"""OpenAI's objects: what a completion and a chat look like, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from serving.http.choice import End, Piece


class Shape(ABC):
    """Writes the objects of one answer, which share id, time and model."""

    whole_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, model: str) -> None:
        self.model, self.created = model, int(time.time())
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a stream begins with, if it has one."""

    @abstractmethod
    def part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice with the next of its text."""

    @abstractmethod
    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """A whole choice."""

    def chunk(self, choices: Sequence[dict[str, Any]], **more: object) -> dict[str, Any]:
        return self._object(self.chunk_name, choices, more)

    def piece_chunk(self, piece: Piece, **more: object) -> dict[str, Any]:
        return self.chunk([self.part(piece.index, piece.text, None)], **more)

    def end_chunk(self, end: End, **more: object) -> dict[str, Any]:
        return self.chunk([self.part(end.index, "", end.reason)], onesweep={"accounting": [end.costs]}, **more)

    def whole(self, texts: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
        choices = [self.choice(end.index, text, end.reason) for text, end in zip(texts, ends, strict=True)]
        more = {"usage": usage(ends), "onesweep": {"accounting": [end.costs for end in ends]}}
        return self._object(self.whole_name, choices, more)

    def _object(self, name: str, choices: Sequence[dict[str, Any]], more: Mapping[str, object]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}


class CompletionShape(Shape):
    whole_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        return self.part(index, text, reason)


class ChatShape(Shape):
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._part(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return self._part(index, {"content": text} if text else {}, reason)

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _part(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def usage(ends: Sequence[End]) -> dict[str, int]:
    """In the model's tokens. The prompt counts once, as it is sent once for all choices to read."""
    prompt, output = ends[0].result.prompt_tokens, sum(end.result.output_tokens for end in ends)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
