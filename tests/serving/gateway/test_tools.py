"""Tools of the official client: a model's template gets them, and its calls come back as OpenAI has them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai as api
import pytest
from openai import OpenAI

from serving.gateway.messages import CallReader
from stages.host.schema_check import CALL_END, CALL_TAG
from tests.conftest import PATIENCE_S
from tests.serving.gateway.conftest import run
from tests.serving.pretrained import ARCHITECTURE, TEMPLATE, ids, write_model

ASK: list[Any] = [{"role": "user", "content": "the sea"}]
SHIP = {"type": "object", "properties": {"where": {"$ref": "#/$defs/Sea"}, "now": {"type": "boolean"}}}
SHIP |= {"required": ["where", "now"], "additionalProperties": False, "$defs": {"Sea": {"enum": ["north", "south"]}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "ship", "description": "a ship", "parameters": SHIP}},
    {"type": "function", "function": {"name": "old_man"}},
]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
AS_GIVEN = [TOOLS[0], {"type": "function", "function": {"name": "old_man", "parameters": NOTHING}}]
# As Qwen's template and those of its kind, and as Llama 3's.
TAGGED = r"""
{%- if tools %}{{ tools | tojson }}{{ "\nas <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>\n" }}
{%- endif %}
{%- for message in messages %}
{{- message.role + (message.name or "") + ": " + message.content }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "assistant: " }}{% endif %}"""
BARE = """
{%- if tools %}{{ tools | tojson }} Respond as {"name": function, "parameters": values}.{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %} assistant:"""
REQUIRED: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 90}


@pytest.fixture(scope="module", params=["tagged", pytest.param("bare", marks=pytest.mark.slow), "plain"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    template = {"tagged": TAGGED, "bare": BARE, "plain": TEMPLATE}[request.param]
    write_model(directory, ends=ids("~")[:1], template=template, architecture=replace(ARCHITECTURE, positions=2048))
    with local_ring(directory, 2) as client:
        yield request.param, client


@pytest.fixture(scope="module")
def kind(served: Any) -> str:
    return str(served[0])


@pytest.fixture(scope="module")
def chat(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        run(tmp_path_factory.mktemp("http"), "--router", served[1].address) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as openai,
    ):
        yield openai


def test_a_required_call_is_valid_with_any_drafter(chat: OpenAI, kind: str) -> None:
    if kind == "plain":
        with pytest.raises(api.BadRequestError, match="takes no tools, or uses a call format other"):
            chat.chat.completions.create(model="onesweep", **REQUIRED)
        return
    called = set[str]()
    for seed in range(4):
        texts = set[str]()
        for model in ("onesweep-ar", "onesweep-ar-speculative", "onesweep"):
            (choice,) = chat.chat.completions.create(model=model, **REQUIRED, seed=seed, temperature=1.5).choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.id.startswith("call_")
            texts.add(f"{call.function.name} {call.function.arguments}")
            arguments = json.loads(call.function.arguments)
            if call.function.name == "ship":
                assert arguments["where"] in ("north", "south")
                assert isinstance(arguments["now"], bool)
            else:
                assert (call.function.name, arguments) == ("old_man", {})
            called.add(call.function.name)
        assert len(texts) == 1
    assert called == {"ship", "old_man"}


def test_the_template_gets_tools_calls_and_their_results(chat: OpenAI, kind: str) -> None:
    if kind != "tagged":
        pytest.skip("the other templates have no calls")
    message = chat.chat.completions.create(model="onesweep", **REQUIRED, seed=1).choices[0].message
    (call,) = message.tool_calls or []
    messages: Any = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "blue"}]
    asked: dict[str, Any] = {"model": "onesweep-ar", "messages": messages, "max_tokens": 1}
    name, arguments = call.function.name, call.function.arguments  # type: ignore[union-attr]
    spelled = f'user: the sea\nassistant: \n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    spelled += f"\ntool{name}: blue\nassistant: "
    taught = f'{json.dumps(AS_GIVEN)}\nas <tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>\n'
    for choice, tools, expected in (
        ("none", TOOLS, spelled),
        ("auto", [], spelled),
        ("auto", TOOLS, taught + spelled),
        ("required", TOOLS, taught + spelled + "<tool_call>\n"),
    ):
        usage = chat.chat.completions.create(**asked, tools=tools, tool_choice=choice).usage
        assert usage.prompt_tokens == len(ids(expected))


def test_the_last_message_is_continued(chat: OpenAI, kind: str) -> None:
    messages: Any = [*ASK, {"role": "assistant", "content": "<|end|> it is "}]
    for flags in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        asked: dict[str, Any] = {"model": "onesweep-ar", "messages": messages, "extra_body": flags, "max_tokens": 1}
        usage = chat.chat.completions.create(**asked).usage
        assert usage is not None
        if kind == "tagged":  # the end of its turn is no control token: what a client sends is text
            assert usage.prompt_tokens == len(ids("user: the sea\nassistant: <")) + len(ids("|end|> it is "))
        with pytest.raises(api.BadRequestError, match="for a last message of role assistant"):
            chat.chat.completions.create(**asked | {"messages": ASK})


def test_an_optional_call_of_a_strict_tool_follows_its_schema(chat: OpenAI, kind: str) -> None:
    if kind == "plain":
        pytest.skip("it takes no tools")
    strict = [tool(**TOOLS[0]["function"], strict=True), TOOLS[1]]
    asked: dict[str, Any] = {"messages": ASK, "max_tokens": 90, "seed": 5}
    brace: dict[str, Any] = {"logit_bias": {str(ids("{")[0]): 100}}
    for model in ("onesweep-ar", "onesweep-ar-speculative", "onesweep"):
        create = partial(chat.chat.completions.create, model=model, **asked)
        assert create(tools=TOOLS, **brace).choices[0].message.content == "{" * 90
        choice = create(tools=strict, **brace).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "old_man" else set(arguments) == {"where", "now"}
        formed: dict[str, Any] = {"tools": TOOLS, "response_format": FORMED}
        assert create(**formed, **brace).choices[0].message.tool_calls, "a call, or an answer that has the form"
        assert create(**formed, logit_bias={str(ids('"')[0]): 100}).choices[0].message.content == '"sea"'
        assert create(**formed, tool_choice="required").choices[0].finish_reason == "tool_calls"
        choice = create(tools=strict, logit_bias={str(ids("a")[0]): 100}).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "a" * 90)
    form: Any = [{"type": "function", **each["function"]} for each in strict]
    (item,) = chat.responses.create(model="onesweep", input=ASK, tools=form, max_output_tokens=9, temperature=0).output
    assert item.type == "message"


FORMED: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "sea"}}}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()] * 129}, "tools must have at most 128 entries"),
    ({"tools": [tool(), tool()]}, "two tools have the same name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function', not"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters: the parameters of a tool"),
    ({"tools": [tool(parameters={"type": "object", "required": 3})]}, "the JSON schema cannot be used"),
    ({"tools": [tool(strict=True, parameters={"type": "object", "required": 3})], "tool_choice": "auto"}, "required"),
    ({"tools": [tool(strict=True, parameters={"type": "object", "not": {}})]}, "tools: not in a schema cannot be"),
    ({"tools": [tool(paramters={})]}, "'tools.0.function.paramters' (did you mean parameters?)"),
    ({"tool_choice": "auto", "response_format": {"type": "text", "schema": {}}}, "type text takes no schema"),
    ({"tool_choice": tool("plane")}, "tool_choice names 'plane'"),
    ({"tools": api.NOT_GIVEN}, "tool_choice needs tools"),
    ({"model": "onesweep-local"}, "mode local does not take must_call"),
    ({"messages": [*ASK, {"role": "tool", "tool_call_id": "x", "content": "y"}]}, "makes the call 'x'"),
    ({"extra_body": {"functions": []}}, "unknown or unsupported field 'functions': send tools"),
]


H = '{"name": "f", "arguments": {"x": "</tool_call>"}}'
F, G = '{"name": "f", "arguments": {"x": "<é>"}}', '{"parameters": {}, "name": "g"}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello < there", "hello < there", []),
        (f"<tool_call>\n{F}\n</tool_call>", "", ["f"]),
        (f"Look:\n<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call> Done", "Look:\nDone", ["f", "g"]),
        (f"<tool_call>\n{F}", "", ["f"]),
        (f"  {G}\n", "", ["g"]),
        (f"<tool_call>{H}</tool_call>", "", ["f"]),
        (f"{G} or so", f"{G} or so", []),
        ('{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
        ('{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": NaN}}', []),
        (f"<tool_call>{F}</tool_call><tool_call>[]", f"<tool_call>{F}</tool_call><tool_call>[]", []),
        ("{" * 5000, "{" * 5000, []),
    ],
)
def test_calls_are_separated_from_text_in_any_pieces(text: str, content: str, calls: list[str]) -> None:
    for size in (1, 7, len(text)):
        reader = CallReader(["f", "g"])
        before = "".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size))
        rest, found = reader.end()
        assert (before + rest, [call.name for call in found]) == (content, calls)
        for call in found:
            assert json.loads(call.arguments).get("x") in (("<é>", "</tool_call>") if call.name == "f" else (None,))
        first = CallReader(["f", "g"], most=1)
        first.feed(text)
        assert [call.name for call in first.end()[1]] == calls[:1]


FORM: dict[str, Any] = {"model": "onesweep-ar", "input": ASK, "max_output_tokens": 90}
FORM |= {"tools": [{"type": "function", **each["function"]} for each in TOOLS], "tool_choice": "required"}


def test_a_response_calls_tools_like_a_chat(chat: OpenAI, kind: str) -> None:
    if kind == "plain":
        with pytest.raises(api.BadRequestError, match="takes no tools, or uses a call format other"):
            chat.responses.create(**FORM)
        return
    ship = {"type": "function", "name": "ship"}
    for in_form, in_chat in (("required", "required"), (ship, tool("ship"))):
        more = {"model": "onesweep-ar", "tool_choice": in_chat, "seed": 3}
        (expected,) = chat.chat.completions.create(**REQUIRED | more).choices[0].message.tool_calls or []
        asked = FORM | {"tool_choice": in_form, "extra_body": {"seed": 3}}
        whole = chat.responses.create(**asked)
        (call,) = whole.output
        assert (whole.status, call.status, call.type) == ("completed", "completed", "function_call")
        assert {"name": call.name, "arguments": call.arguments} == expected.function.model_dump()
        assert whole.model_dump()["tool_choice"] == in_form
        with chat.responses.stream(**asked) as stream:  # the client puts the pieces together
            events = [*stream]
            (again,) = stream.get_final_response().output
        assert (again.name, again.arguments) == (call.name, call.arguments)  # type: ignore[union-attr]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        turn: Any = [*ASK, *whole.model_dump()["output"], result]
        assert chat.responses.create(**asked | {"input": turn, "tool_choice": "auto"}).status == "incomplete"
        assert [(event.sequence_number, event.type.removeprefix("response.")) for event in events] == [
            *enumerate(["created", "in_progress", "output_item.added", "function_call_arguments.delta"]),
            *enumerate(["function_call_arguments.done", "output_item.done", "completed"], 4),
        ]


def form_item(**more: Any) -> dict[str, Any]:
    return {"input": [{"call_id": "x", **more}]}


REFUSED_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function', not"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools"),
    ({"tool_choice": {"type": "function", "name": "plane"}}, "tool_choice names 'plane'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing is stored, so an item_reference names nothing"),
    (
        form_item(type="function_call_output", output="y"),
        "input: no earlier function_call has the call_id 'x'",
    ),
    (form_item(type="function_call"), "input.0: an item of type function_call needs name"),
    ({"previous_response_id": "x"}, "unsupported field 'previous_response_id': nothing is stored: send the"),
]


def test_invalid_tools_are_refused(chat: OpenAI, kind: str) -> None:
    if kind != "tagged":
        pytest.skip("once is enough")
    in_chats = (chat.chat.completions.create, {"model": "onesweep-ar", **REQUIRED}, REFUSED)
    for create, asked, refused in (in_chats, (chat.responses.create, FORM, REFUSED_FORMS)):
        for changes, words in refused:
            for stream in (False, True):
                with pytest.raises(api.BadRequestError) as caught:
                    create(**asked | changes, stream=stream)  # type: ignore[operator]
                assert words in caught.value.message


def test_an_unterminated_call_is_returned_as_text() -> None:
    reader, text = CallReader(["f"]), CALL_TAG + '{"name": "' + '\\"' * 200_000 + "\\"
    before = reader.feed(text)
    rest, calls = reader.end()
    assert (before + rest, calls) == (text, [])


def test_an_end_tag_inside_a_string_does_not_end_a_call() -> None:
    reader = CallReader(["f"])
    call = json.dumps({"name": "f", "arguments": {"x": f'{CALL_END} \\"{CALL_TAG}'}})
    before = reader.feed(f"One. {CALL_TAG}{call}{CALL_END} two {CALL_TAG}{call}")
    rest, calls = reader.end()
    assert (before + rest, [each.name for each in calls]) == ("One. two", ["f", "f"])
