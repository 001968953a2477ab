"""The answers of POST /v1/responses: their objects, whole and as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from serving.gateway.calls import ToolCall
from serving.gateway.completions import Choice, ChoiceEnd, ChoiceText, CompletionOrder, own_part, usage, whole_choices
from serving.gateway.response_fields import NamedSchemaFormat, ResponseRequest, ResponseToolChoice


class ResponseFormat:
    """The objects of one answer, which share ids and time."""

    def __init__(self, request: ResponseRequest, order: CompletionOrder) -> None:
        self.request, self.created, self.order = request, int(time.time()), order
        self.id, self.message_id = (f"{kind}_{secrets.token_hex(12)}" for kind in ("resp", "msg"))
        self._events = 0

    async def whole(self, choice: Choice) -> dict[str, Any]:
        """The answer, once it is there. Raises OnesweepError."""
        (said,), (end,) = await whole_choices(choice, 1)
        return self._response(said, end)

    async def events(self, choice: Choice) -> AsyncGenerator[bytes, None]:
        """Events as the text comes; the first waits for the router, so that its refusal has a status. Raises
        OnesweepError."""
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        said, began = ChoiceText(0, ""), False
        async with aclosing(choice):
            async for item in choice:
                if not began:
                    began = True
                    for name in ("created", "in_progress"):
                        yield self._event(name, response=self._response(said, None))
                if isinstance(item, ChoiceText):
                    if item.text:
                        if not said.text:
                            yield self._opening(place)
                        yield self._event("output_text.delta", **place, delta=item.text, logprobs=[])
                    said += item
                    continue
                # calls are known at the end only, and come whole
                done = self._response(said, item)
                for index, output in enumerate(done["output"]):
                    if output["type"] == "function_call":
                        yield self._call_events(index, output)
                    else:
                        if not said.text:
                            yield self._opening(place)
                        yield self._event("output_text.done", **place, text=said.text, logprobs=[])
                        yield self._event("content_part.done", **place, part=_part(said.text))
                    yield self._event("output_item.done", output_index=index, item=output)
                yield self._event(done["status"], response=done)

    def _opening(self, place: dict[str, Any]) -> bytes:
        added = self._event("output_item.added", output_index=0, item=self._message("", "in_progress"))
        return added + self._event("content_part.added", **place, part=_part(""))

    def _call_events(self, index: int, call: dict[str, Any]) -> bytes:
        """A call from its beginning to the end of its arguments."""
        place = {"item_id": call["id"], "output_index": index}
        begun = {**call, "arguments": "", "status": "in_progress"}
        added = self._event("output_item.added", output_index=index, item=begun)
        delta = self._event("function_call_arguments.delta", **place, delta=call["arguments"])
        return added + delta + self._event("function_call_arguments.done", **place, arguments=call["arguments"])

    def _event(self, name: str, **content: object) -> bytes:
        kind = f"response.{name}"
        told = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + json.dumps(told).encode() + b"\n\n"

    def _response(self, said: ChoiceText, end: ChoiceEnd | None) -> dict[str, Any]:
        """:param end: None while the text is being written."""
        request, choice = self.request, self.request.tool_choice
        status = "in_progress" if end is None else "incomplete" if end.reason == "length" else "completed"
        message = [self._message(said.text, status)] if end and (said.text or not said.calls) else []
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
            "output": [*message, *(_call(call) for call in said.calls if end)],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(end) if end else None,
            "onesweep": own_part([end] if end else [], self.order),
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(text)]
        return {"type": "message", "id": self.message_id, "status": status, "role": "assistant", "content": content}

    def _text_format(self) -> dict[str, Any]:
        kind = self.request.text.format if self.request.text else None
        if isinstance(kind, NamedSchemaFormat):
            return {"type": "json_schema", "name": kind.name, "schema": kind.schema_, "strict": bool(kind.strict)}
        return {"type": kind.type if kind else "text"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> dict[str, Any]:
    told = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": call.id.replace("call_", "fc_"), **told, "status": "completed"}


def _usage(end: ChoiceEnd) -> dict[str, Any]:
    counts = usage([end])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
