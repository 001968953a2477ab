"""Responses: OpenAI's newer objects for a chat, whole and as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from onesweep.serving.gateway.completions import ChoiceEnd, ChoiceText, usage
from onesweep.serving.gateway.fields import NamedSchemaFormat, ResponseRequest

Choice = AsyncGenerator[ChoiceText | ChoiceEnd, None]


class ResponseFormat:
    """The objects of one answer, which share ids and time."""

    def __init__(self, request: ResponseRequest) -> None:
        self.request, self.created = request, int(time.time())
        self.id, self.message_id = (f"{kind}_{secrets.token_hex(12)}" for kind in ("resp", "msg"))
        self._events = 0

    async def whole(self, choice: Choice) -> dict[str, Any]:
        """The answer, once it is there. Raises OnesweepError."""
        text, end = "", None
        async with aclosing(choice):
            async for item in choice:
                if isinstance(item, ChoiceText):
                    text += item.text
                else:
                    end = item
        assert end is not None
        return self._response(text, end)

    async def events(self, choice: Choice) -> AsyncGenerator[bytes, None]:
        """Events as the text comes; the first waits for the router, so that its refusal has a status. Raises
        OnesweepError."""
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        text, began = "", False
        async with aclosing(choice):
            async for item in choice:
                if not began:
                    began = True
                    for name in ("created", "in_progress"):
                        yield self._event(name, response=self._response("", None))
                    yield self._event("output_item.added", output_index=0, item=self._message("", "in_progress"))
                    yield self._event("content_part.added", **place, part=_part(""))
                if isinstance(item, ChoiceText):
                    text += item.text
                    yield self._event("output_text.delta", **place, delta=item.text, logprobs=[])
                    continue
                yield self._event("output_text.done", **place, text=text, logprobs=[])
                yield self._event("content_part.done", **place, part=_part(text))
                done = self._response(text, item)
                yield self._event("output_item.done", output_index=0, item=done["output"][0])
                yield self._event(done["status"], response=done)

    def _event(self, name: str, **content: object) -> bytes:
        kind = f"response.{name}"
        told = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + json.dumps(told).encode() + b"\n\n"

    def _response(self, text: str, end: ChoiceEnd | None) -> dict[str, Any]:
        """:param end: None while the text is being written."""
        request = self.request
        status = "in_progress" if end is None else "completed" if end.result.stopped else "incomplete"
        message = [self._message(text, status)] if end else []
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": message,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(end) if end else None,
            "onesweep": {"accounting": [end.costs] if end else []},
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(text)]
        return {"type": "message", "id": self.message_id, "status": status, "role": "assistant", "content": content}

    def _text_format(self) -> dict[str, Any]:
        kind = self.request.text.format if self.request.text else None
        if isinstance(kind, NamedSchemaFormat):
            return {"type": "json_schema", "name": kind.name, "schema": kind.schema_, "strict": True}
        return {"type": kind.type if kind else "text"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(end: ChoiceEnd) -> dict[str, Any]:
    counts = usage([end])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
