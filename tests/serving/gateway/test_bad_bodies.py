"""Invalid requests are refused in OpenAI's format, never with a 500."""

import gzip
import json
import re
import socket
from typing import Any

import httpx
import pytest

from serving.gateway.access import _StrictRequest
from serving.gateway.fields import MAX_CHOICES
from serving.gateway.middleware import MAX_BODY_BYTES, MAX_HEAD_BYTES
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
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": 1' + b"0" * 10_000 + b"}",
    ],
)
def test_invalid_json_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    error = check_refusal(http.post(path, content=body, headers=JSON), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert ("nested too deep: at most 200" in error["message"]) == (len(body) > 20_000)
    assert ("half of a surrogate pair at line 1" in error["message"]) == (b"ud800" in body)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", [], "prompt"),
        ("prompt", ["a", ""], "prompt.1"),
        ("prompt", [[1], []], "prompt.1"),
        ("stop", ["a", "é" * 200], "stop"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 512, "max_tokens"),
        ("n", MAX_CHOICES + 1, "n"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", [""], "stop.0"),
        ("onesweep", {"min_p": -0.1}, "onesweep.min_p"),
        ("logit_bias", {"5": -101}, "logit_bias.5"),
        ("logit_bias", {str(token): 1 for token in range(301)}, "logit_bias"),
        ("onesweep", {"repetition_penalty": 0}, "onesweep.repetition_penalty"),
        ("onesweep", {"speed": 3}, "onesweep.speed"),
        ("7", 3, "7"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("temperature", -1, "temperature"),  # the router's word
        ("prompt", "x" * 600, "prompt"),
        ("onesweep", {"steps": 4}, "onesweep.steps"),
        ("onesweep", {"budget_ms": 4}, "onesweep.budget_ms"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, field: str, value: object, param: str) -> None:
    body = {"model": "onesweep-local", "prompt": "a", "max_tokens": 2, field: value}
    assert check_refusal(http.post("/v1/completions", json=body), 400)["param"] == param


def test_a_field_is_named_by_its_name_in_the_endpoint(http: httpx.Client) -> None:
    for path, own in (("responses", "input"), ("chat/completions", "messages")):
        body = {"model": "onesweep-local", own: [{"role": "user", "content": "x" * 600}]}
        assert check_refusal(http.post(f"/v1/{path}", json=body), 400)["param"] == own
    nothing_to_choose = {"entrants": ["resample"], "temperature": 0}
    for race in ({"prompt": ""}, {"entrants": ["AR"]}, {"entrants": ["ar:chunk=8"]}, nothing_to_choose):
        asked = {"prompt": "x", "entrants": ["ar"], **race}
        assert check_refusal(http.post("/api/race", json=asked), 400)["param"] == next(iter(race))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x"]}],
        "x",
    ],
)
def test_wrong_messages_are_named(http: httpx.Client, messages: object) -> None:
    body = {"model": "onesweep-local", "messages": messages}
    assert check_refusal(http.post("/v1/chat/completions", json=body), 400)["param"].startswith("messages")


def test_a_schema_with_an_internal_keyword_is_refused(http: httpx.Client) -> None:
    named, model = {"name": "x", "schema": {"type": "object", OF_CALLS: True}}, {"model": "onesweep-ar"}
    asked = {**model, "messages": [{"role": "user", "content": "x"}]}
    asked |= {"response_format": {"type": "json_schema", "json_schema": named}}
    error = check_refusal(http.post("/v1/chat/completions", json=asked), 400)
    assert error["param"] == "response_format.json_schema.schema"
    asked = {**model, "input": "x", "text": {"format": {"type": "json_schema", **named}}}
    error = check_refusal(http.post("/v1/responses", json=asked), 400)
    assert error["param"] == "text.format.schema"


@pytest.mark.parametrize("path", PATHS)
def test_a_huge_body_is_a_413(http: httpx.Client, path: str) -> None:
    huge = b" " * (MAX_BODY_BYTES + 1)
    check_refusal(http.post(path, content=huge, headers=JSON), 413)
    check_refusal(http.post(path, content=iter([huge[: 1 << 20]] * 3), headers=JSON), 413)


ASKED: dict[str, Any] = {"model": "onesweep-local", "prompt": "a", "max_tokens": 2.0, "seed": 1.0}  # whole numbers


def test_a_gzip_body_is_read_within_the_limit(http: httpx.Client) -> None:
    def post(body: bytes, packing: str = "gzip") -> httpx.Response:
        return http.post("/v1/completions", content=body, headers={**JSON, "content-encoding": packing})

    packed = gzip.compress(json.dumps(ASKED).encode())
    assert post(packed).json()["usage"]["completion_tokens"] == 2
    for body, status in (
        (gzip.compress(b" " * (MAX_BODY_BYTES + 1)), 413),
        (packed[:-1], 400),
        (packed + packed, 400),
        (b"{}", 400),
    ):
        check_refusal(post(body), status)
    assert "'br'" in check_refusal(post(packed, "br"), 415)["message"]


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/models", "/static/race.js", "/readyz"])
def test_head_and_a_trailing_slash_answer_like_get(http: httpx.Client, path: str) -> None:
    there = http.get(path)
    assert there.status_code == 200
    for same in (http.head(path), http.get(f"{path}/"), http.head(f"{path}/")):
        assert (same.status_code, same.headers["content-type"]) == (200, there.headers["content-type"])
    assert http.head(path).content == b""
    check_refusal(http.get(f"{path}x/y/"), 404)


def answer_to(http: httpx.Client, sent: str) -> str:
    """The answer to a request as it is sent, of a server that closes the connection then."""
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=20) as connected:
        connected.sendall(sent.encode())
        return b"".join(iter(lambda: connected.recv(4096), b"")).decode()


def test_a_request_line_may_have_an_absolute_url(http: httpx.Client) -> None:
    lines = "Host: evil.example\r\nConnection: close\r\n\r\n"
    own, others = f"http://127.0.0.1:{http.base_url.port}", ("http://evil.example", "http://a@localhost")
    for address, status in ((own, 200), *((other, 403) for other in others)):
        assert answer_to(http, f"GET {address}/healthz HTTP/1.1\r\n{lines}").startswith(f"HTTP/1.1 {status}")


def test_a_too_large_or_ambiguous_request_head_is_refused(http: httpx.Client) -> None:
    get, long = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ", "a" * MAX_HEAD_BYTES
    post = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for sent in (
        f"{get}{long}\r\n\r\n",
        get.ljust(MAX_HEAD_BYTES + 1, "a"),
        get.replace("healthz", long) + "\r\n\r\n",
        "nonsense\r\n\r\n",
        f"{post}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n",
    ):
        assert re.match(r"HTTP/1.1 400 (?s:.+)x-frame-options: (?s:.+)\r\n\r\n{\"error\": {", answer_to(http, sent))


def test_unknown_paths_and_methods_are_refused(http: httpx.Client) -> None:
    assert "begin with /v1" in check_refusal(http.post("/chat/completions", json={}), 404)["message"]
    check_refusal(http.get("/static/%2e%2e%2fapp.py"), 404)
    check_refusal(http.get("/static/nothing.js"), 404)
    assert check_refusal(http.get("/v1/completions"), 405)["message"] == "this path takes POST"
    for path, allowed in (("/v1/models", "GET, HEAD"), ("/v1/completions", "POST")):
        assert http.put(path, json={}).headers["allow"] == allowed
    assert http.head("/v1/completions").status_code == 405
    check_refusal(http.post("/v1/completions", content=b"{}"), 415)


async def test_the_strings_of_a_body_are_not_kept() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'["a prompt"]'}

    first, second = [await _StrictRequest({"type": "http"}, receive).json() for _ in range(2)]
    assert first[0] is not second[0]
