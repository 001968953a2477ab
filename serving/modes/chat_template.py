"""A model's own chat template: renders a conversation as one text, in a process with limited time and memory.

Templates come with models, and the template language does not bound the cost of even ten characters. This module
imports nothing heavy, because a template's process starts it.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.errors import CheckpointError, OnesweepError
from stages.host.schema_check import CALL_END, CALL_TAG, OF_CALLS, held_part

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

# Characters of a conversation as one text.
MAX_RENDERED = 4 << 20
# Limits of a template's process: CPU time for one conversation, and memory.
RENDER_CPU_S = 2.0
TEMPLATE_BYTES = 512 << 20


class TemplateProblem(OnesweepError):
    """The template cannot render a conversation."""


class ChatTemplate:
    """One template, rendered as `transformers` does: blocks leave no blank lines, and the model's turn is opened."""

    def __init__(self, source: str, named: Mapping[str, str] | None = None) -> None:
        """:param named: tokens that a template inserts by name, such as `bos_token`.

        Raises CheckpointError for a text that is not a template.
        """
        self._source, self._given = source, {"bos_token": "", "eos_token": "", "documents": None, **(named or {})}
        # two formats of a call in JSON, recognized by the instructions in templates: that of Hermes and Qwen, in a
        # tag, and that of Llama 3; answers in other formats could not be parsed
        tagged = re.search(r'<tool_call>(\\n|[^\w<])*\{ *\\*"(name|arguments)', source)
        bare = re.search(r'\{\\*"name\\*": [^{}]*"parameters\\*":', source)
        self._arguments = "arguments" if tagged else "parameters" if bare else ""
        self.call_opening = f"{CALL_TAG}\n" if tagged else ""
        self._lock, self._process = threading.Lock(), self._start()
        try:
            self._rendered([])
        except TemplateProblem as problem:
            raise CheckpointError(f"the chat template {problem}; use the one that came with the weights") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), turn: bool = True) -> str:
        """The conversation so far, and the opening of the model's turn. Blocks. Raises TemplateProblem.

        :param tools: functions that the model may call, in OpenAI's format.
        :param turn: False for the conversation alone.
        """
        called = any("tool_calls" in each or each["role"] == "tool" for each in messages)
        if called and "tool_calls" not in self._source:
            messages, called = calls_as_text(messages), False
        plain = {**self._given, "messages": messages, "tools": None, "add_generation_prompt": turn}
        try:
            (text,) = self._rendered([{**plain, "tools": tools or None}])
            # a template that supports tools writes their names; one that formats calls itself renders another text
            if tools and not (self._arguments and (_names(tools, text) or [text] != self._rendered([plain]))):
                raise TemplateProblem("takes no tools, or uses a call format other than `<tool_call>` and Llama's")
        except TemplateProblem as problem:
            if called:  # some templates allow one call a turn, or reject other servers' ids
                return self.render(calls_as_text(messages), tools, turn)
            raise TemplateProblem(f"the model's chat template {problem}") from None
        return text

    def call_schema(self, tools: Sequence[Any], must_call: Sequence[str], answer: str = "") -> str:
        """JSON schema of one call of one of the tools `must_call`, after `call_opening`. If none must be called but one
        is strict, or answers have a schema, that of each call in a text; else empty. Raises TemplateProblem.

        :param answer: JSON schema of a text without a call; empty if any text will do.
        """
        key, calls, parameters = self._arguments, list[dict[str, Any]](), dict[str, Any]()
        try:
            functions = {tool["function"]["name"]: tool["function"] for tool in tools}
            strict = any(function.get("strict") is True for function in functions.values())
            free = not must_call and (strict or bool(answer))
            for name in functions if free else must_call:
                parts = {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}}
                closed = {"required": [*parts], "additionalProperties": False}
                calls.append({"type": "object", "properties": parts, **closed})
                parameters[name] = _relocated(held_part(functions[name]["parameters"])[0], f"#/$defs/{name}")
        except (LookupError, TypeError, AttributeError, RecursionError):
            raise TemplateProblem("must_call needs tools, each a function with name and parameters") from None
        try:
            enforced = {OF_CALLS: dict(json.loads(answer)) if answer else True} if free else {}
        except (ValueError, TypeError, RecursionError):
            raise TemplateProblem("the JSON schema is not a JSON object") from None
        return json.dumps({"anyOf": calls, "$defs": parameters, **enforced}) if calls else ""

    def _rendered(self, given: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render a text for each of `given`, the values of the template's variables. Raises TemplateProblem."""
        with self._lock:
            if self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps([self._source, given]).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if not answer:
                slow = process.wait() == -signal.SIGPROF
                raise TemplateProblem(f"takes more than {RENDER_CPU_S:g} s" if slow else "takes too much memory")
        texts: list[str] | str = json.loads(answer)
        if isinstance(texts, str):
            raise TemplateProblem(texts)
        return texts

    def _start(self) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-P", "-m", "serving.modes.chat_template")
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        # in a session of its own: Ctrl-C is for the router, which still answers running requests
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        weakref.finalize(self, _end, process)
        return process


def calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with calls as text of the model's turn and results as text of the user's, in the format of Qwen's and
    Hermes' templates. Merges turns of one role, for templates that require alternation. Raises TemplateProblem."""
    turns = list[tuple[str, str]]()
    for each in messages:
        try:
            functions = [call["function"] for call in each.get("tool_calls", ())]
            calls = [{name: function[name] for name in ("name", "arguments")} for function in functions]
        except (LookupError, TypeError):
            raise TemplateProblem("tool_calls must be a list of functions with name and arguments") from None
        if each["role"] == "tool":
            turns.append(("user", f"<tool_response>\n{each['content']}\n</tool_response>"))
        else:
            tagged = [f"{CALL_TAG}\n{_json(call)}\n{CALL_END}" for call in calls]
            turns.append((each["role"], "\n".join([each["content"]] * bool(each["content"]) + tagged)))
    runs = groupby(turns, lambda turn: turn[0])
    return [{"role": role, "content": "\n".join(text for _, text in run)} for role, run in runs]


def _names(tools: Sequence[Any], text: str) -> bool:
    """True if a text contains the name of every tool, as a JSON string."""
    try:
        return all(f'"{tool["function"]["name"]}"' in text for tool in tools)
    except (LookupError, TypeError):
        return False


def _relocated(schema: Any, place: str) -> Any:  # noqa: ANN401
    """A JSON schema whose references to itself still work when it stands at `place` in another one."""
    if isinstance(schema, list):
        return [_relocated(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _relocated(each, place) for name, each in schema.items()}
    if isinstance(target := moved.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# In the process: a sandbox keeps the template away from everything else there, and limits bound its resources.


class _Rejected(TemplateError):
    """Raised by a template for messages that it does not accept."""


class _Generation(Extension):
    """`{% generation %}`: marks the model's text for training, and renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=_reject, strftime_now=lambda form: datetime.now(UTC).strftime(form))
    environment.filters["tojson"] = _json
    return environment.from_string(source)


def _texts(source: str, given: Sequence[Mapping[str, Any]]) -> list[str] | str:
    """A text for each of `given`, or the end of a sentence about the template."""
    try:
        template = _compiled(source)
    except TemplateSyntaxError as error:
        return f"is damaged (line {error.lineno}): {error.message}"
    except RecursionError:
        return "is damaged: it is nested too deeply"
    try:
        return [_text(template, each) for each in given]
    except SecurityError as error:
        return f"uses a forbidden operation: {error}"
    except _Rejected as error:
        return f"rejects these messages: {error.message}"
    except RecursionError as error:
        return f"does not end: {error}"
    except MemoryError:
        return "takes too much memory"
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return f"fails with these messages: {str(error)[:300]}"


def _text(template: Template, given: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(**given):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_RENDERED:
            raise _Rejected(f"it renders them to more than {MAX_RENDERED} characters")
    return "".join(pieces)


def _reject(message: object) -> NoReturn:
    raise _Rejected(str(message)[:200])


def _json(value: object, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: ANN401
    """JSON without HTML escapes: Jinja's own filter escapes `<`, `>`, `&` and `'` for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_BYTES, TEMPLATE_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)  # its signal ends the process
        answer = _texts(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        # a template can write half a surrogate pair, which is not valid text
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()
