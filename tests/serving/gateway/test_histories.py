"""Conversations as clients send them again: what a server answered refuses none of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response

from serving.gateway.messages import CallReader, ChatMessage, request_messages
from serving.gateway.responses import ResponseRequest
from serving.modes.chat_template import ChatTemplate

TEXT = [{"type": "text", "text": "a"}]
# Answers of servers, ours and others, and the text and arguments that a template gets from each.
ANSWERS: list[tuple[dict[str, Any], str, list[Any]]] = [
    ({"content": "a"}, "a", []),
    ({"content": "a", "annotations": [{"type": "url_citation"}], "reasoning_content": "hm", "phase": "x"}, "a", []),
    ({"content": None, "refusal": "no"}, "no", []),
    ({"content": [*TEXT, {"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}]}, "ano", []),
    ({"content": None, "audio": {"id": "x", "transcript": "a"}}, "a", []),
    ({"content": None, "tool_calls": []}, "", []),
    ({"function_call": {"name": "f", "arguments": "{}"}}, "", [{}]),
    ({"tool_calls": [{"id": "x", "type": "custom", "custom": {"name": "f", "input": "a b"}}]}, "", ["a b"]),
]
ARGUMENTS: list[tuple[Any, Any]] = [
    ('{"x": 1}', {"x": 1}),
    ({"x": 1}, {"x": 1}),
    ("", {}),
    (" \n", {}),
    (None, {}),
    ('{"x": 1', '{"x": 1'),
    ("[]", "[]"),
    ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),
    ('{"x":' * 200 + "1" + "}" * 200, '{"x":' * 200 + "1" + "}" * 200),
]
# A history as Qwen 2.5's template writes it; templates that know no calls, that take turns alone, as Gemma's does, and
# one call a turn, as Llama 3.1's does.
QWEN = r"""{%- for m in messages %}{%- if m.role != "tool" %}{{ "<|im_start|>" + m.role }}
{%- if m.content %}{{ "\n" + m.content }}{% endif %}
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ "<|im_end|>\n" }}
{%- else %}{% if messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\n<tool_response>\n" + m.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}{% endif %}{% endfor %}"""
PLAIN = '{% for m in messages %}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}{% endfor %}'
TURNS = PLAIN.replace(
    "{{", "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception() }}{% endif %}{{", 1
)
ONE_CALL = TURNS.replace("{%", "{% if messages[1].tool_calls | length > 1 %}{{ raise_exception() }}{% endif %}{%", 1)
CALLS = [{"index": at, "id": f"c{at}", "function": {"name": "f", "arguments": '{"x": 1}'}} for at in range(3)]


def read_messages(*messages: Any) -> list[Any]:
    """Role, text and the other fields of each, as the router gets them."""
    read = request_messages([ChatMessage.model_validate(each) for each in messages])
    return [(role, text, json.loads("".join(more) or "{}")) for role, text, *more in read]


@pytest.mark.parametrize(("answer", "text", "arguments"), ANSWERS)
def test_an_answer_can_be_sent_back_as_a_message(answer: dict[str, Any], text: str, arguments: list[Any]) -> None:
    plain: dict[str, Any] = ChatCompletionMessage.model_construct(role="assistant", **answer).model_dump(warnings=False)
    for sent in ({"role": "assistant", **answer}, plain):
        ((role, content, more),) = read_messages(sent)
        assert (role, content) == ("assistant", text)
        assert [call["function"]["arguments"] for call in more.get("tool_calls", [])] == arguments


@pytest.mark.parametrize(("sent", "read"), ARGUMENTS)
def test_call_arguments_are_parsed_if_possible(sent: Any, read: Any) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": sent}}
    ((_, _, more),) = read_messages({"role": "assistant", "tool_calls": [call]})
    assert more["tool_calls"] == [{"id": "x", "type": "function", "function": {"name": "f", "arguments": read}}]
    items = [{"type": "function_call", "call_id": "x", "name": "f", "arguments": sent}]
    (message,) = ResponseRequest.model_validate({"model": "x", "input": items}).chat().messages
    assert [call.function.arguments for call in message.tool_calls or []] == [read]


@given(st.permutations(range(3)), st.sampled_from([None, "", "a", TEXT, [*TEXT, None]]))
def test_tool_results_are_sorted_by_their_calls(order: list[int], content: Any) -> None:
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": content} for at in order]
    _, *read = read_messages({"role": "assistant", "tool_calls": CALLS}, *results)
    assert [more for _, _, more in read] == [{"tool_call_id": f"c{at}", "name": "f"} for at in range(3)]
    assert {text for _, text, _ in read} == {"a" if content else ""}


@pytest.mark.parametrize("content", ["", "Let me see."])
@pytest.mark.parametrize("template", [PLAIN, TURNS, ONE_CALL])
def test_a_template_without_calls_gets_them_in_the_format_of_qwen(template: str, content: str) -> None:
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": f"<{at}>"} for at in range(3)]
    called = {"role": "assistant", "content": content, "tool_calls": CALLS}
    history = read_messages({"role": "user", "content": "é"}, called, *results, {"role": "assistant", "content": "so"})
    messages = [{"role": role, "content": text, **more} for role, text, more in history]
    assert ChatTemplate(template).render(messages) == ChatTemplate(QWEN).render(messages)


def test_output_items_can_be_sent_in_the_next_request() -> None:
    call = {"type": "function_call", "id": "fc", "call_id": "x", "name": "f", "arguments": "{}", "status": "completed"}
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part], "phase": None}
    others = [{"type": kind} for kind in ("reasoning", "web_search_call", "shell_call_output", "mcp_list_tools")]
    output: Any = Response.model_construct(output=[*others, item, call]).model_dump(warnings=False)["output"]
    result = {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "b"}]}
    chat = ResponseRequest.model_validate({"model": "x", "input": [*output, result]}).chat()
    read = [(each.role, each.content, bool(each.tool_calls)) for each in chat.messages]
    assert read == [("assistant", "a", True), ("tool", "b", False)]


def test_half_of_a_surrogate_pair_in_a_call_can_be_sent_back() -> None:
    reader = CallReader(["f"])
    reader.feed('{"name": "f", "arguments": {"x": "\\ud800"}}')
    assert json.loads(reader.end()[1][0].arguments.encode()) == {"x": "?"}
