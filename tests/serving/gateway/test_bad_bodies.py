"""What is no request of ours is refused in OpenAI's words, never with a 500."""

from typing import Any

import httpx
import pytest

from serving.gateway.fields import MAX_CHOICES
from serving.gateway.middleware import MAX_BODY_BYTES
from stages.host.schema_check import OF_CALLS

JSON = {"content-type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/api/race")


def check_refusal(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": 1' + b"0" * 10_000 + b"}",
    ],
)
def test_no_json_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    error = check_refusal(http.post(path, content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", 3, "model"),
        ("prompt", ["a", "b"], "prompt"),
        ("max_tokens", "8", "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("n", MAX_CHOICES + 1, "n"),
        ("seed", 1.5, "seed"),
        ("stop", ["a", "b", "c", "d", "e"], "stop"),
        ("stop", [""], "stop.0"),
        ("temperature", True, "temperature"),
        ("top_p", 0, "top_p"),
        ("onesweep", {"min_p": -0.1}, "onesweep.min_p"),
        ("onesweep", {"top_k": 2.5}, "onesweep.top_k"),
        ("best_of", 4, "best_of"),
        ("logit_bias", {"5": -101}, "logit_bias.5"),
        ("logit_bias", {"sea": 1}, "logit_bias.sea.[key]"),
        ("logit_bias", {str(token): 1 for token in range(301)}, "logit_bias"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("frequency_penalty", "1", "frequency_penalty"),
        ("onesweep", {"repetition_penalty": 0}, "onesweep.repetition_penalty"),
        ("tools", [], "tools"),
        ("onesweep", {"speed": 3}, "onesweep.speed"),
        ("onesweep", {"chunk": "x"}, "onesweep.chunk"),
        ("stream_options", {"include_usage": True}, "stream_options"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, field: str, value: object, param: str) -> None:
    body = {"model": "onesweep-local", "prompt": "a", "max_tokens": 2, field: value}
    assert check_refusal(http.post("/v1/completions", json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x"]}],
        "x",
    ],
)
def test_wrong_messages_are_named(http: httpx.Client, messages: object) -> None:
    error = check_refusal(
        http.post("/v1/chat/completions", json={"model": "onesweep-local", "messages": messages}), 400
    )
    assert error["param"].startswith("messages")


def test_a_schema_has_no_keyword_of_ours(http: httpx.Client) -> None:
    named, model = {"name": "x", "schema": {"type": "object", OF_CALLS: True}}, {"model": "onesweep-ar"}
    asked = {**model, "messages": [{"role": "user", "content": "x"}]}
    asked |= {"response_format": {"type": "json_schema", "json_schema": named}}
    error = check_refusal(http.post("/v1/chat/completions", json=asked), 400)
    assert error["param"] == "response_format.json_schema.json_schema.schema"
    asked = {**model, "input": "x", "text": {"format": {"type": "json_schema", **named}}}
    error = check_refusal(http.post("/v1/responses", json=asked), 400)
    assert error["param"] == "text.format.json_schema.schema"


@pytest.mark.parametrize("path", PATHS)
def test_a_huge_body_is_a_413(http: httpx.Client, path: str) -> None:
    huge = b" " * (MAX_BODY_BYTES + 1)
    check_refusal(http.post(path, content=huge, headers=JSON), 413)
    check_refusal(http.post(path, content=iter([huge[: 1 << 20]] * 3), headers=JSON), 413)


def test_other_paths_and_methods_are_refused_alike(http: httpx.Client) -> None:
    check_refusal(http.get("/v1/embeddings"), 404)
    check_refusal(http.get("/static/%2e%2e%2fapp.py"), 404)
    check_refusal(http.get("/static/nothing.js"), 404)
    check_refusal(http.get("/v1/completions"), 405)
    check_refusal(http.post("/v1/completions", content=b"{}"), 415)


def test_a_whole_number_may_have_a_decimal_point(http: httpx.Client) -> None:
    asked = {"model": "onesweep-local", "prompt": "a", "max_tokens": 2.0, "seed": 1.0}
    assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 2
