"""Messages of a conversation as clients send them, including answers of this or another server, and the tool calls in
a model's text.

Nothing in a server's answer makes a conversation that contains it fail: extra fields are dropped, and parts of a call
that cannot be parsed stay text.
"""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from serving.gateway.base_fields import Fields
from serving.gateway.errors import ApiError
from serving.modes.output_text import StopCutter
from serving.router.request import MAX_TOOLS
from stages.host.schema_check import CALL_END, CALL_TAG
from stages.limits import MAX_NESTING, nesting

# Types of text parts in chats and responses.
_TEXTS = ("text", "input_text", "output_text", "refusal")
# Objects and lists around a call's arguments that the router counts as nesting.
_OUTER_LEVELS = 5


class Sent(Fields):
    """An object that a server may have sent: drops fields that it does not know."""

    model_config = ConfigDict(extra="ignore")


def text_of(value: object) -> object:
    """The text of a message. Raises ValueError for parts that are not text."""
    if not isinstance(value, list):
        return value
    texts = [_text_of_part(part) for part in value if part is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a message's parts must have type text (in responses input_text): the model reads only text")
    return "".join(str(text) for text in texts)


def _text_of_part(part: object) -> object:
    """The text of a part; None if it is not text."""
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return None
    return part.get("refusal" if part["type"] == "refusal" else "text") or ""


def words_of(content: object) -> object:
    """The content of an answer without parts that are not text, such as reasoning."""
    return [each for each in content if _text_of_part(each) is not None] if isinstance(content, list) else content


def _read_arguments(value: object) -> object:
    """Parse a call's arguments into the object that chat templates expect; the text itself if it is not one."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value) if value.strip() else {}
        # half a surrogate pair is not valid text
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, dict) and nesting(read) <= MAX_NESTING - _OUTER_LEVELS else value


Text = Annotated[str | None, BeforeValidator(text_of, json_schema_input_type=str | list[Any] | None)]
Arguments = Annotated[dict[str, Any] | str, BeforeValidator(_read_arguments)]


class CalledFunction(Sent):
    name: str = ""
    arguments: Arguments = Field(default={}, description="a JSON object, or its text")


class MessageCall(Sent):
    """A call of a tool that a model wrote."""

    id: str = ""
    type: Any = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: object) -> object:
        """Turn calls of custom tools into calls of functions."""
        if not isinstance(value, dict):
            return value
        if isinstance(custom := value.get("custom"), dict):
            value = value | {"function": {"name": custom.get("name"), "arguments": custom.get("input")}}
        return value | {"type": "function"}


class ChatMessage(Sent):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = Field(default=None, description="no effect")
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(default=None, description="role tool: id of the call it answers")

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, value: object) -> object:
        """Convert other kinds of text in answers, and calls and results in the format that preceded tools."""
        if not isinstance(value, dict):
            return value
        fields, called, audio = dict(value), value.get("function_call"), value.get("audio")
        if fields.get("role") == "function":
            fields |= {"role": "tool", "tool_call_id": fields.get("name")}
        if fields.get("role") != "tool":
            fields.pop("tool_call_id", None)
        if fields.get("tool_calls") == []:
            del fields["tool_calls"]
        if fields.get("role") != "assistant":
            return fields
        fields["content"] = words_of(fields.get("content"))
        if fields["content"] in (None, "", []):
            fields["content"] = fields.get("refusal") or (audio.get("transcript") if isinstance(audio, dict) else None)
        if isinstance(called, dict) and not fields.get("tool_calls"):
            fields["tool_calls"] = [{"id": called.get("name"), "function": called}]
        return fields

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id of the call it answers")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of role assistant can have tool_calls")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("a message needs content: a string, or parts of type text")
        return self


def request_messages(messages: Sequence[ChatMessage]) -> list[tuple[str, ...]]:
    """Messages in the format of `Request`. Raises ApiError for a tool result without a matching call."""
    converted, names = list[tuple[str, ...]](), dict[str | None, str]()
    for each in _in_order(messages):
        more = each.model_dump(include={"tool_calls", "tool_call_id"}, exclude_none=True)
        if each.role == "tool":
            if each.tool_call_id not in names:
                message = f"no earlier message makes the call {each.tool_call_id!r} that a message of role tool answers"
                raise ApiError(400, message, param="messages")
            more["name"] = names[each.tool_call_id]  # some templates need it
        names |= {call.id: call.function.name for call in each.tool_calls or []}
        converted.append((each.role, each.content or "", *([json.dumps(more)] if more else [])))
    return converted


def _in_order(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield messages with tool results in the order of their calls: many templates match them only by order."""
    places = dict[str | None, int]()
    for are_results, group in groupby(messages, lambda each: each.role == "tool"):
        run = list(group)
        yield from sorted(run, key=lambda each: places.get(each.tool_call_id, 0)) if are_results else run
        places = {call.id: place for place, call in enumerate(run[-1].tool_calls or [])}


# Tool calls in a model's text: one call, and the reader that separates calls from words.

# A string in a call may contain the end tag. An unterminated string extends to the end of the text: searching for its
# end again from each quote took seconds.
_STRING_OR_END = re.compile(rf'"(?:\\(?:.|\Z)|[^"\\])*(?:"|\Z)|{CALL_END}', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: str  # a JSON object
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Separates a model's words from its tool calls, in a text that arrives in pieces.

    A call is a JSON object in a tag, or the whole text. If a call is damaged or names no tool, everything is content:
    the client sees the text as generated.
    """

    def __init__(self, tools: Sequence[str], most: int | None = None) -> None:
        """:param tools: the names of the tools that may be called.
        :param most: most calls to report; None for all.
        """
        self._tools, self._most, self._cutter = tools, most, StopCutter([CALL_TAG.encode()])
        self._text, self._consumed, self._content = "", 0, ""

    def feed(self, text: str) -> str:
        """The content that can be handed out now."""
        self._text += text
        if self._bare or not self._text.strip():  # perhaps a call, which shows only at its end
            return ""
        content = self._cutter.feed(self._text[self._consumed :].encode(errors="replace")).decode()
        self._consumed, self._content = len(self._text), self._content + content
        return content

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls."""
        try:
            calls = [self._call(json.loads(each)) for each in self._bare or _split_calls(self._text)[0]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            calls = []
        if not calls:
            return self._text[len(self._content) :], []
        return "" if self._bare else _split_calls(self._text)[1][len(self._content) :].strip(), calls[: self._most]

    @property
    def _bare(self) -> list[str]:
        """The whole text if it may be a call, else nothing."""
        return [self._text] if self._text.lstrip(" \t\r\n").startswith("{") else []

    def _call(self, call: dict[str, Any]) -> ToolCall:
        arguments = call.get("arguments", call.get("parameters"))
        if call["name"] not in self._tools or not isinstance(arguments, dict):
            raise ValueError("not a tool call")
        # half a surrogate pair is not valid text: the client could not send the call back
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
        return ToolCall(call["name"], text)


def _split_calls(text: str) -> tuple[list[str], str]:
    """The tagged calls in a text, and the words around them. The last call may lack its end tag if a stop string or the
    limit cut it off."""
    calls, words, at = list[str](), list[str](), 0
    while (begin := text.find(CALL_TAG, at)) >= 0:
        words.append(text[at:begin])
        begin += len(CALL_TAG)
        end = next((each for each in _STRING_OR_END.finditer(text, begin) if each[0] == CALL_END), None)
        calls.append(text[begin : end.start() if end else len(text)])
        at = end.end() if end else len(text)
    return calls, "".join([*words, text[at:]])
