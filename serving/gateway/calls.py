"""Calls of tools in a model's text: one call, and the reader that tells calls from words."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.modes.tokenizer import StopCutter
from stages.host.schema_check import CALL_END, CALL_TAG

# A string in a call may hold the end. One that nothing ends goes to the end of the text: to look for its end from each
# quote in it anew took seconds.
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
    """Tells a model's words from its calls of tools, in a text that comes in pieces.

    A call is a JSON object in a tag, or the whole text. Where one is damaged or of no tool, all is content: the client
    sees what was written.
    """

    def __init__(self, tools: Sequence[str], most: int | None = None) -> None:
        """:param tools: the names of those that may be called.
        :param most: calls to tell of; None for all.
        """
        self._tools, self._most, self._cutter = tools, most, StopCutter([CALL_TAG.encode()])
        self._text, self._fed, self._content = "", 0, ""

    def feed(self, text: str) -> str:
        """Content that can be handed out now."""
        self._text += text
        if self._bare or not self._text.strip():  # perhaps a call, which is seen at its end
            return ""
        content = self._cutter.feed(self._text[self._fed :].encode(errors="replace")).decode()
        self._fed, self._content = len(self._text), self._content + content
        return content

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls."""
        try:
            calls = [self._call(json.loads(each)) for each in self._bare or _parted(self._text)[0]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            calls = []
        if not calls:
            return self._text[len(self._content) :], []
        return "" if self._bare else _parted(self._text)[1][len(self._content) :].strip(), calls[: self._most]

    @property
    def _bare(self) -> list[str]:
        """The text where all of it may be a call."""
        return [self._text] if self._text.lstrip(" \t\r\n").startswith("{") else []

    def _call(self, told: dict[str, Any]) -> ToolCall:
        arguments = told.get("arguments", told.get("parameters"))
        if told["name"] not in self._tools or not isinstance(arguments, dict):
            raise ValueError("no call of a tool")
        # half of a surrogate pair is no text: the client could not send the call back
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
        return ToolCall(told["name"], text)


def _parted(text: str) -> tuple[list[str], str]:
    """The calls in the tags of a text, and the words beside. The last call may lack its end, where a stop string or the
    limit cut it off."""
    calls, words, at = list[str](), list[str](), 0
    while (begin := text.find(CALL_TAG, at)) >= 0:
        words.append(text[at:begin])
        begin += len(CALL_TAG)
        end = next((each for each in _STRING_OR_END.finditer(text, begin) if each[0] == CALL_END), None)
        calls.append(text[begin : end.start() if end else len(text)])
        at = end.end() if end else len(text)
    return calls, "".join([*words, text[at:]])
