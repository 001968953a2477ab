"""The official client against real hosts: the text is the router's own."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import openai as api
import pytest
from openai import OpenAI

from serving.cli.deployment import Deployment
from serving.client.client import Client
from tests.conftest import until
from tests.serving.conftest import sessions

PROMPT = "It was late when "


def accounting(answer: Any) -> list[dict[str, Any]]:
    return answer.model_extra["onesweep"]["accounting"]


def test_a_completion_has_the_text_of_grpc(openai: OpenAI, client: Client) -> None:
    for mode in ("sweep", "ar", "local"):
        own = client.generate(PROMPT, mode=mode, max_bytes=24, seed=7)
        one_text: Any = PROMPT if mode == "ar" else [PROMPT]
        answer: Any = openai.completions.create(model=f"onesweep-{mode}", prompt=one_text, max_tokens=24, seed=7)
        (choice,), (costs,) = answer.choices, accounting(answer)
        assert (choice.text, choice.finish_reason, choice.index) == (own.text, "length", 0)
        assert (answer.object, answer.model) == ("text_completion", f"onesweep-{mode}")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (17, 24, 41)
        same = ("mode", "seed", "output_bytes", "sweeps", "hops", "output_hex", "drafted")
        assert {name: costs[name] for name in same} == {name: own.as_json()[name] for name in same}


def test_a_stream_has_the_same_text_in_chunks_of_openai(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "prompt": PROMPT, "max_tokens": 24, "seed": 7}
    whole = openai.completions.create(**asked)
    chunks = list(openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *pieces, end, usage = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(pieces) > 1, "as it arrives"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * len(pieces)
    assert (end.choices[0].finish_reason, end.choices[0].text) == ("length", "")
    assert accounting(end)[0]["sweeps"] == 24
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("authorization", ["", "Bearer", "Basic x", "Bearer \xe9"])
def test_any_authorization_is_accepted_if_no_token_is_required(http: httpx.Client, authorization: str) -> None:
    headers = {"Authorization": authorization.encode("latin-1")}
    assert http.get("/v1/models", headers=headers).status_code == 200


def test_a_stream_is_server_sent_events(http: httpx.Client) -> None:
    asked = {"model": "onesweep-sweep", "prompt": PROMPT, "max_tokens": 8, "stream": True}
    answer = http.post("/v1/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_a_chat_continues_its_messages(openai: OpenAI, client: Client) -> None:
    own = client.generate("Be brief.\nIt was late when ", mode="ar", max_bytes=16, seed=3)
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "It was "}, {"type": "text", "text": "late when "}]},
    ]
    answer = openai.chat.completions.create(
        model="onesweep-ar",
        messages=messages,
        max_completion_tokens=16,
        seed=3,
        n=1,
        top_p=1,
        presence_penalty=0,
        store=False,
        user="x",
        reasoning_effort="low",
        metadata={"a": "b"},
        modalities=["text"],
    )
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", own.text)
    first, *chunks = openai.chat.completions.create(
        model="onesweep-ar", messages=messages, max_tokens=16, seed=3, stream=True
    )
    assert (first.object, first.choices[0].delta.role) == ("chat.completion.chunk", "assistant")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_response_has_the_text_of_a_chat(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "extra_body": {"seed": 3}}
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "It was late when "}]
    chat = openai.chat.completions.create(model="onesweep-ar", messages=messages, max_tokens=16, seed=3)
    text = chat.choices[0].message.content
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "It was late when "}]}]
    for given in ("It was late when ", parts):
        answer: Any = openai.responses.create(input=given, instructions="Be brief.", max_output_tokens=16, **asked)
        assert (answer.output_text, answer.status) == (text, "incomplete")
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.usage.output_tokens, answer.usage.input_tokens) == (16, chat.usage.prompt_tokens)  # type: ignore[union-attr]
    events = [*openai.responses.create(input=messages, max_output_tokens=16, stream=True, **asked)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    opening, closing = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *opening, "output_text.done", *closing, "incomplete"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "one", "schema": schema}}
    assert openai.responses.create(input="x", text=form, max_output_tokens=64, **asked).output_text == '{"a": 1}'
    for refused, words in (
        ({"store": True}, "store must be false, not true: nothing is stored"),
        ({"max_output_tokens": 600}, "context length is 512"),
        ({"input": [{"role": "user", "content": "x"}] * 1024}, "at most 1023"),
    ):
        for streamed in (False, True):
            with pytest.raises(api.BadRequestError, match=words):
                openai.responses.create(stream=streamed, **{"input": "x", **asked, **refused})  # type: ignore[call-overload]


def test_the_default_length_fits_the_context(openai: OpenAI, client: Client) -> None:
    long: dict[str, Any] = {"prompt": "x" * 500, "seed": 7}
    for mode in ("ar", "ar-speculative", "sweep", "chunked", "local", "resample"):
        answer: Any = openai.completions.create(model=f"onesweep-{mode}", **long)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (12, "length")
        assert client.generate(**long, mode=mode).text == answer.choices[0].text
    with pytest.raises(api.BadRequestError, match=r"prompt \(512 bytes\) and output \(1\)"):
        openai.completions.create(model="onesweep-ar", prompt="x" * 512)


def test_choices_use_consecutive_seeds(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "onesweep-chunked", "prompt": PROMPT, "max_tokens": 40}
    alone = [openai.completions.create(**asked, seed=seed).choices[0].text for seed in (11, 12, 13)]
    answer: Any = openai.completions.create(**asked, seed=11, n=3, best_of=3)
    assert [choice.text for choice in answer.choices] == alone
    assert [(costs["index"], costs["seed"]) for costs in accounting(answer)] == [(0, 11), (1, 12), (2, 13)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 120)
    texts = ["", "", ""]
    for chunk in openai.completions.create(**asked, seed=11, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone
    many: Any = openai.completions.create(model="onesweep-ar", prompt=PROMPT, max_tokens=2, seed=11, n=16)
    assert len({costs["seed"] for costs in accounting(many)}) == 16
    assert many.usage.completion_tokens == 32
    last = openai.completions.create(**asked, seed=(1 << 64) - 1, n=2)
    assert [costs["seed"] for costs in accounting(last)] == [(1 << 64) - 1, 0]


def test_choices_of_several_prompts_are_in_order(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "max_tokens": 8, "seed": 3}
    prompts = ["It was", "late"]
    alone = [openai.completions.create(**asked, prompt=each, n=2) for each in prompts]
    expected = [choice.text for answer in alone for choice in answer.choices]
    for given in (prompts, [[*each.encode()] for each in prompts]):
        answer: Any = openai.completions.create(**asked, prompt=given, n=2)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.total_tokens == sum(each.usage.total_tokens for each in alone if each.usage)
    choices = openai.completions.create(**asked, prompt=[[*each.encode()] for each in prompts], n=2, echo=True).choices
    assert [choice.text for choice in choices] == [prompts[at // 2] + text for at, text in enumerate(expected)]
    texts = [""] * 4
    for chunk in openai.completions.create(**asked, prompt=prompts, n=2, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in choices]


# Bytes that are no text by themselves are not written.
ASCII = {str(byte): -100 for byte in range(128, 256)}


def test_echoed_logprobs_are_those_of_the_written_text(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "seed": 3, "logprobs": 2}
    wrote: Any = openai.completions.create(**asked, prompt="x", max_tokens=200, logit_bias=ASCII).choices[0]
    for max_tokens in (0, 1, 9):
        answer: Any = openai.completions.create(
            **asked | {"model": "onesweep"}, prompt="x" + wrote.text, echo=True, max_tokens=max_tokens, top_p=0.9
        )
        scored, usage = answer.choices[0], answer.usage
        assert (usage.completion_tokens, usage.total_tokens) == (max_tokens, 201 + max_tokens)
        assert scored.text.startswith("x" + wrote.text)
        logprobs = scored.logprobs
        assert len(logprobs.tokens) == 1 + 200 + max_tokens
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0], logprobs.text_offset[:2]) == (None, None, [0, 1])
        assert logprobs.token_logprobs[1:201] == wrote.logprobs.token_logprobs, "to the last bit"
        assert logprobs.top_logprobs[1:201] == wrote.logprobs.top_logprobs
    for more in ({"model": "onesweep-ar-speculative"}, {"model": "onesweep-local", "logprobs": None, "max_tokens": 0}):
        with pytest.raises(api.BadRequestError, match=r"echo .* max_tokens 0\) is for mode ar") as refused:
            openai.completions.create(**asked | more, prompt="x", echo=True)
        assert refused.value.param == "echo"


def test_penalties_and_biases_reach_the_hosts(openai: OpenAI, client: Client) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 7}
    shaped: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    shaped |= {"logit_bias": {"32": -100, "115": 3}, "model": "onesweep"}
    own = {"repetition_penalty": 1.2, "top_k": 60, "min_p": 0.01}
    places = {**own, "onesweep": {}}, {"onesweep": own}, {"top_k": 1, "onesweep": {"mode": "ar", **own}}
    texts = {openai.completions.create(**asked, **shaped, extra_body=body).choices[0].text for body in places}
    own |= {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {32: -100.0, 115: 3.0}}
    assert texts == {client.generate(PROMPT, mode="ar", max_bytes=24, seed=7, **own).text}
    assert " " not in texts.pop()
    forced = openai.completions.create(model="onesweep-ar", **asked, logit_bias={"33": 100})
    assert forced.choices[0].text == "!" * 24
    for model, wrong, words in (
        ("onesweep-local", {"logit_bias": {"256": 1}}, "logit_bias names token 256, but the model has 0 to 255"),
        ("onesweep-ar", {"logit_bias": {"256": 1}}, "logit_bias names token 256, but the model has 0 to 255"),
        ("onesweep-sweep", {"logit_bias": {"2": 1}}, "mode sweep does not take logit_bias"),
        ("onesweep-chunked", {"presence_penalty": 1}, "mode chunked does not take presence_penalty"),
    ):
        with pytest.raises(api.BadRequestError, match=words):
            openai.completions.create(model=model, **asked, **wrong)


def test_chats_and_streams_have_logprobs(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "seed": 7}
    asked |= {"model": "onesweep", "logprobs": True, "top_logprobs": 2}
    whole: Any = openai.chat.completions.create(**asked).choices[0]
    assert [len(each.top_logprobs) for each in whole.logprobs.content] == [2] * 24
    assert b"".join(bytes(each.bytes or ()) for each in whole.logprobs.content).decode(errors="replace") == (
        whole.message.content
    )
    streamed = list[Any]()
    for chunk in openai.chat.completions.create(**asked, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content or [] if logprobs else []
    assert streamed == whole.logprobs.content
    stop = (whole.message.content or "")[10:12]
    cut = [
        openai.chat.completions.create(**asked | {"model": model}, stop=stop).choices[0].logprobs
        for model in ("onesweep-ar", "onesweep-ar-speculative")
    ]
    assert cut[0] == cut[1]
    plain: Any = openai.chat.completions.create(**asked | {"top_logprobs": None}).choices[0].logprobs
    assert [each.top_logprobs for each in plain.content] == [[]] * 24
    for wrong, words in (
        ({"model": "onesweep-local"}, "mode local does not take logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs needs logprobs"),
    ):
        with pytest.raises(api.BadRequestError, match=words):
            openai.chat.completions.create(**asked | wrong)


SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no", "never"]},
        "sure": {"type": "boolean"},
        "why": {"type": "string", "maxLength": 6},
    },
    "required": ["answer", "sure", "why"],
    "additionalProperties": False,
}


def json_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_an_answer_follows_a_schema_with_any_drafter(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 100}
    for seed, settings in ((1, {"temperature": 1.5}), (2, {"temperature": 0.8, "frequency_penalty": 1, "top_p": 0.9})):
        texts = dict[str, str]()
        for model in ("onesweep-ar", "onesweep-ar-speculative", "onesweep"):
            answer = openai.chat.completions.create(
                model=model, **asked, **settings, seed=seed, response_format=json_format(SCHEMA)
            )
            texts[model] = answer.choices[0].message.content or ""
            assert answer.choices[0].finish_reason == "stop", "it ends where the text is complete"
        assert len(set(texts.values())) == 1
        record = json.loads(texts["onesweep"])
        assert record["answer"] in ("yes", "no", "never")
        assert isinstance(record["sure"], bool)
        assert len(record["why"]) <= 6
    free = openai.chat.completions.create(model="onesweep", **asked, seed=1, response_format={"type": "json_object"})
    assert (free.choices[0].message.content or "").startswith("{")
    for name in ("value", "schema"):  # as clients of TGI and of llama.cpp send it
        theirs: Any = {"type": "json_object", name: SCHEMA}
        alike = openai.chat.completions.create(model="onesweep", **asked, **settings, seed=2, response_format=theirs)
        assert alike.choices[0].message.content == texts["onesweep"]
    with pytest.raises(api.BadRequestError, match="mode sweep does not take json_schema"):
        openai.chat.completions.create(model="onesweep-sweep", **asked, response_format=json_format(SCHEMA))


def test_unenforced_keywords_of_a_schema_are_reported(openai: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    schema |= {"propertyNames": {"pattern": "a"}}
    form: Any = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked: Any = {"model": "onesweep-ar", "messages": [{"role": "user", "content": PROMPT}], "response_format": form}
    answer: Any = openai.chat.completions.create(**asked)
    assert (answer.choices[0].message.content, answer.onesweep["unenforced"]) == ('{"a": 1}', ["propertyNames"])
    *_, last = openai.chat.completions.create(**asked, stream=True)
    assert last.onesweep["unenforced"] == ["propertyNames"]
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response: Any = openai.responses.create(model="onesweep-ar", input=PROMPT, text=text)
    assert (response.output_text, response.onesweep["unenforced"]) == ('{"a": 1}', ["propertyNames"])
    text["format"]["strict"] = True
    with pytest.raises(api.BadRequestError, match="propertyNames in a schema cannot be enforced"):
        openai.responses.create(model="onesweep-ar", input=PROMPT, text=text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "banana"}, "Invalid type: banana"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
        ({"$ref": "https://example.com/x.json"}, "cannot be used"),
        ({"description": "x" * 20_000}, "bytes; the limit is 16384"),
    ],
)
def test_an_invalid_or_unsatisfiable_schema_is_refused(openai: OpenAI, schema: Any, words: str) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "response_format": json_format(schema)}
    with pytest.raises(api.BadRequestError, match=words):
        openai.chat.completions.create(model="onesweep-ar", **asked)


def test_a_stop_string_ends_the_text_and_frees_the_hosts(openai: OpenAI, deployment: Deployment) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "prompt": PROMPT, "max_tokens": 64, "seed": 7}
    whole = openai.completions.create(**asked).choices[0].text
    found = re.search("[ -~]{2}", whole)
    assert found, "these weights write some ASCII"
    stop = found[0]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never there", stop]):
        answer: Any = openai.completions.create(**asked, stop=stops)
        (choice,), (costs,) = answer.choices, accounting(answer)
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        assert costs["sweeps"] < 64, "the rest was cancelled"
        assert costs["wire_bytes_total"] > 0
        assert re.fullmatch("[0-9a-f]{16}", costs["request"])
        assert {host["name"] for host in costs["hosts"]} == {"host-1", "host-2", "host-3"}
        output = bytes.fromhex(costs["output_hex"])
        assert output.decode(errors="replace") == expected
        assert len(output) == costs["output_bytes"] < answer.usage.completion_tokens == costs["output_tokens"]
    chunks = list(openai.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    until(lambda: sessions(deployment) == 0)


def test_closing_a_stream_ends_its_request(
    openai: OpenAI, deployment: Deployment, completed: Callable[[], int]
) -> None:
    before, length = completed(), 480
    asked: dict[str, Any] = {"model": "onesweep-chunked", "prompt": PROMPT, "max_tokens": length}
    stream = openai.completions.create(**asked, stream=True, extra_body={"onesweep": {"chunk": 1}})
    next(iter(stream))
    stream.close()
    until(lambda: sessions(deployment) == 0)
    assert completed() - before < 3 * length, "the rest was not computed"


def test_the_model_list_has_the_served_modes(openai: OpenAI, client: Client) -> None:
    models = {model.id: model.model_extra["onesweep"]["mode"] for model in openai.models.list()}
    served = client.status().modes
    assert models == {"onesweep": "auto", **{f"onesweep-{mode}": mode for mode in served}}
    assert openai.models.retrieve("onesweep-sweep").object == "model"
    answer = openai.completions.create(model="onesweep", prompt=PROMPT, max_tokens=2)
    assert accounting(answer)[0]["mode"] == "resample"
    assert "the router has no frontier" in accounting(answer)[0]["reason"]
    with pytest.raises(api.NotFoundError):
        openai.models.retrieve("gpt-4")
    with pytest.raises(api.NotFoundError, match=f"'gpt-4'; served here: {', '.join(models)}$"):
        openai.completions.create(model="gpt-4", prompt=PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_errors_have_a_request_id(http: httpx.Client, stream: bool) -> None:
    asked = {"model": "onesweep-ar", "prompt": PROMPT, "max_tokens": 4, "stream": stream}
    answer = http.post("/v1/completions", json=asked)
    name = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", name)
    assert f'"request": "{name}"' in answer.text, "the accounting has it, too"
    refused = http.post("/v1/completions", json={**asked, "max_tokens": 600})
    assert re.fullmatch("[0-9a-f]{16}", refused.headers["x-request-id"])
    assert "x-request-id" not in http.post("/v1/completions", json={**asked, "max_tokens": 0}).headers
