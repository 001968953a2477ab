"""POST /v1/responses, a chat in OpenAI's newer format: its fields, and its answers, whole and as events."""

import json
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from serving.gateway.base_fields import Fields
from serving.gateway.completions import Choice, ChoiceEnd, ChoiceText, CompletionOrder, own_part, usage, whole_choices
from serving.gateway.fields import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    ChatTool,
    Count,
    FunctionKind,
    FunctionName,
    FunctionTool,
    JsonSchemaFormat,
    NamedSchema,
    PlainFormat,
    SampledRequest,
    ToolChoice,
)
from serving.gateway.messages import Arguments, ChatMessage, Sent, Text, ToolCall, words_of
from serving.router.request import MAX_MESSAGES, MAX_TOOLS

# Fields that an item of each type must have.
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id",),
}
# Items of answers that are not words for our models: actions of OpenAI's tools, and items that nothing here reads.
_IGNORED = re.compile("(?!function_|custom_tool_).+_(call|output)|compaction|mcp_.+|program|reasoning")


# one fewer than a chat, because the instructions are a message too
ITEMS = Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)


def _as_items(value: object) -> object:
    if isinstance(value, list):
        return [each for each in value if not (isinstance(each, dict) and _IGNORED.fullmatch(str(each.get("type"))))]
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class InputItem(Sent):
    """A message, a call of a tool that the model wrote before, or the output of one."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text = None
    call_id: str | None = Field(default=None, description="id of a call, and of its output")
    name: str | None = Field(default=None, description="name of the called tool")
    arguments: Arguments = Field(default={}, description="a JSON object, or its text")
    output: Text = Field(default=None, description="result of the call")

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: object) -> object:
        """Turn calls of custom tools into calls of functions, and keep only the words of an answer."""
        if not isinstance(value, dict):
            return value
        fields = dict(value)
        if fields.get("type") == "item_reference":
            raise ValueError("nothing is stored, so an item_reference names nothing: send the item (store: false)")
        if isinstance(kind := fields.get("type"), str):
            fields["type"] = kind.replace("custom_tool", "function")
        if kind == "custom_tool_call":
            fields["arguments"] = fields.get("input")
        if fields.get("role") == "assistant":
            fields["content"] = words_of(fields.get("content"))
        return fields

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if lacking := [name for name in _ITEMS[self.type] if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type} needs {lacking[0]}")
        return self


def _check_outputs(items: list[InputItem]) -> list[InputItem]:
    """Raise ValueError for an output of a call that no earlier item makes."""
    called = set[str | None]()
    for item in items:
        if item.type == "function_call_output" and item.call_id not in called:
            raise ValueError(f"no earlier function_call has the call_id {item.call_id!r} of this output")
        called |= {item.call_id}
    return items


# the type is the first field, so an error names another tool's type before its missing fields
class ResponseTool(FunctionTool, FunctionKind):
    """A function that the model may call."""


class ResponseToolChoice(FunctionName, FunctionKind):
    """The function that it must call."""


class NamedSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class ResponseText(Fields):
    format: Annotated[NamedSchemaFormat | PlainFormat, Field(discriminator="type")] | None = Field(
        default=None, description="as response_format of a chat"
    )
    verbosity: Any = Field(default=None, description="no effect")


class ResponseRequest(SampledRequest):
    """POST /v1/responses: a chat in OpenAI's newer form. Nothing of it is stored."""

    input: Annotated[
        list[InputItem],
        ITEMS,
        BeforeValidator(_as_items, json_schema_input_type=str | Annotated[list[InputItem], ITEMS]),
        AfterValidator(_check_outputs),
    ]
    instructions: str | None = Field(default=None, description="a system message before the others")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="functions that the model may call, as in a chat"
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = Field(
        default=None, description="whether, or which, a tool must be called, as in a chat"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="as in a chat")
    max_output_tokens: Count | None = Field(default=None, description=f"maximum to generate ({DEFAULT_MAX_TOKENS})")
    text: ResponseText | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(default=None, description="sent back")
    stream_options: Any = Field(default=None, description="no effect")

    def chat(self) -> ChatRequest:
        """The chat request that it stands for."""
        kind: Any = self.text.format if self.text else None
        if isinstance(kind, NamedSchemaFormat):
            kind = JsonSchemaFormat(type="json_schema", json_schema=kind)
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = ToolChoice(type="function", function=choice)
        return ChatRequest(
            **{name: getattr(self, name) for name in SampledRequest.model_fields},
            messages=self._messages(),
            response_format=kind,
            tools=[ChatTool(type="function", function=tool) for tool in self.tools or []],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
        )

    def _messages(self) -> list[ChatMessage]:
        """The messages of the chat: one of role assistant holds the model's text and the calls that follow it."""
        turns = list[dict[str, Any]]()
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "message":
                turns.append({"role": item.role, "content": item.content})
            elif item.type == "function_call_output":
                turns.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            else:
                if not turns or turns[-1]["role"] != "assistant" or len(turns[-1].get("tool_calls", ())) == MAX_TOOLS:
                    turns.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
        return [ChatMessage(**each) for each in turns]


# Answers


class ResponseFormat:
    """The objects of one answer, which share ids and time."""

    def __init__(self, request: ResponseRequest, order: CompletionOrder) -> None:
        self.request, self.created, self.order = request, int(time.time()), order
        self.id, self.message_id = (f"{kind}_{secrets.token_hex(12)}" for kind in ("resp", "msg"))
        self._events = 0

    async def whole(self, choice: Choice) -> dict[str, Any]:
        """The complete answer. Raises OnesweepError."""
        (answer,), (end,) = await whole_choices(choice, 1)
        return self._response(answer, end)

    async def events(self, choice: Choice) -> AsyncGenerator[bytes, None]:
        """Yield events as the text arrives; the first waits for the router, so that a refusal has a status. Raises
        OnesweepError."""
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        answer, began = ChoiceText(0, ""), False
        async with aclosing(choice):
            async for item in choice:
                if not began:
                    began = True
                    for name in ("created", "in_progress"):
                        yield self._event(name, response=self._response(answer, None))
                if isinstance(item, ChoiceText):
                    if item.text:
                        if not answer.text:
                            yield self._opening(place)
                        yield self._event("output_text.delta", **place, delta=item.text, logprobs=[])
                    answer += item
                    continue
                # calls are known only at the end, and come whole
                done = self._response(answer, item)
                for index, output in enumerate(done["output"]):
                    if output["type"] == "function_call":
                        yield self._call_events(index, output)
                    else:
                        if not answer.text:
                            yield self._opening(place)
                        yield self._event("output_text.done", **place, text=answer.text, logprobs=[])
                        yield self._event("content_part.done", **place, part=_part(answer.text))
                    yield self._event("output_item.done", output_index=index, item=output)
                yield self._event(done["status"], response=done)

    def _opening(self, place: dict[str, Any]) -> bytes:
        added = self._event("output_item.added", output_index=0, item=self._message("", "in_progress"))
        return added + self._event("content_part.added", **place, part=_part(""))

    def _call_events(self, index: int, call: dict[str, Any]) -> bytes:
        """The events of a call, from its beginning to the end of its arguments."""
        place = {"item_id": call["id"], "output_index": index}
        begun = {**call, "arguments": "", "status": "in_progress"}
        added = self._event("output_item.added", output_index=index, item=begun)
        delta = self._event("function_call_arguments.delta", **place, delta=call["arguments"])
        return added + delta + self._event("function_call_arguments.done", **place, arguments=call["arguments"])

    def _event(self, name: str, **content: object) -> bytes:
        kind = f"response.{name}"
        event = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + json.dumps(event).encode() + b"\n\n"

    def _response(self, answer: ChoiceText, end: ChoiceEnd | None) -> dict[str, Any]:
        """:param end: None while the text is being generated."""
        request, choice = self.request, self.request.tool_choice
        kind = request.text.format if request.text else None
        status = "in_progress" if end is None else "incomplete" if end.reason == "length" else "completed"
        message = [self._message(answer.text, status)] if end and (answer.text or not answer.calls) else []
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
            "output": [*message, *(_call(call) for call in answer.calls if end)],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": kind.model_dump(by_alias=True, exclude_none=True) if kind else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(end, self.order) if end else None,
            "onesweep": own_part([end] if end else [], self.order),
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(text)]
        return {"type": "message", "id": self.message_id, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": call.id.replace("call_", "fc_"), **about, "status": "completed"}


def _usage(end: ChoiceEnd, order: CompletionOrder) -> dict[str, Any]:
    counts = usage([end], order)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
