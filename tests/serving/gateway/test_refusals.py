"""A router that refuses, fails or is not there: the HTTP status that clients act on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import openai as api
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from openai import OpenAI

from serving.client.client import SERVICE
from serving.v1 import router_pb2, router_pb2_grpc
from stages.wire.status import RETRY_AFTER, STATUS_MARK
from tests.serving.gateway.conftest import run

ASKED: dict[str, Any] = {"model": "onesweep-ar", "prompt": "a", "max_tokens": 4}
CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.INTERNAL: (502, "server_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error"),
}


class Refusing(router_pb2_grpc.RouterServiceServicer):
    """Refuses with the code that is the prompt; writes a byte before that where the prompt asks for it."""

    def __init__(self) -> None:
        self.authorizations: list[str | None] = []
        self.health = health.HealthServicer()

    def Generate(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self.record(context)
        late, _, name = request.prompt.decode().rpartition(" ")
        if late:
            yield router_pb2.GenerateResponse(text=b"x")
        context.set_trailing_metadata(((STATUS_MARK, "1"), (RETRY_AFTER, "1500")))
        context.abort(grpc.StatusCode[name], "a reason, quoted: context length is 8")

    def Status(self, request: router_pb2.StatusRequest, context: grpc.ServicerContext) -> router_pb2.StatusResponse:
        self.record(context)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")

    def record(self, context: grpc.ServicerContext) -> None:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Refusing, str]]:
    """A router that refuses everything, and the URL of a gateway before it."""
    service, server = Refusing(), grpc.server(ThreadPoolExecutor(4))
    service.health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with run(tmp_path_factory.mktemp("http"), "--router", f"127.0.0.1:{port}") as gateway:
            yield service, gateway.url
    finally:
        server.stop(0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_grpc_codes_become_http_statuses(refusing: tuple[Refusing, str], code: grpc.StatusCode, streamed: bool) -> None:
    asked = {**ASKED, "prompt": code.name, "stream": streamed}
    answer = httpx.post(f"{refusing[1]}/v1/completions", json=asked)
    status, kind = CODES[code]
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == (kind, code.name.lower())
    assert "a reason" in error["message"]
    if status == 429:
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_failure_after_the_first_byte_is_reported_in_the_stream(refusing: tuple[Refusing, str]) -> None:
    with OpenAI(base_url=f"{refusing[1]}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(**{**ASKED, "prompt": "late UNAVAILABLE"}, stream=True)
        assert next(iter(stream)).choices[0].text == "x"
        with pytest.raises(api.APIError, match="a reason"):
            next(iter(stream))


def test_the_token_is_forwarded(refusing: tuple[Refusing, str]) -> None:
    service, url = refusing
    for path, body in (
        ("/v1/completions", {**ASKED, "prompt": "UNAUTHENTICATED"}),
        ("/v1/completions", {**ASKED, "model": "onesweep"}),
        ("/v1/chat/completions", {"model": "onesweep-ar", "messages": [{"role": "user", "content": "INTERNAL"}]}),
        ("/api/race", {"prompt": "UNAUTHENTICATED", "entrants": ["ar"]}),
    ):
        httpx.post(url + path, json=body, headers={"authorization": "Bearer s3cret"})
        assert service.authorizations[-1] == "Bearer s3cret"
    for path in ("/v1/models", "/v1/models/onesweep", "/api/hosts"):
        assert httpx.get(url + path, headers={"authorization": "Bearer s3cret"}).status_code == 401
        assert service.authorizations[-1] == "Bearer s3cret"
    httpx.get(f"{url}/v1/models")
    assert service.authorizations[-1] is None


@pytest.mark.parametrize("token", ["Bearer", "Basic abc", "Bearer a b", "Bearer \xe9", "Bearer " + "x" * 5000])
def test_an_invalid_token_is_not_forwarded(refusing: tuple[Refusing, str], token: str) -> None:
    service, url = refusing
    answer = httpx.get(f"{url}/v1/models", headers={"authorization": token.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert service.authorizations[-1] is None


def test_readiness_of_a_router_needs_no_token(refusing: tuple[Refusing, str]) -> None:
    service, url = refusing
    assert httpx.get(f"{url}/readyz").status_code == 200
    service.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        answer = httpx.get(f"{url}/readyz")
    finally:
        service.health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert (answer.status_code, answer.json()["reason"]) == (503, "the hosts are not ready")


@pytest.mark.parametrize(
    ("changes", "error", "code", "words"),
    [
        ({"model": "onesweep-gpt"}, api.NotFoundError, "model_not_found", "onesweep-sweep"),
        ({"max_tokens": 600}, api.BadRequestError, "context_length_exceeded", "context length is 512"),
        ({"prompt": "a" * 600}, api.BadRequestError, "context_length_exceeded", "context of 512 bytes"),
        ({"temperature": 1000.0}, api.BadRequestError, None, "temperature must be"),
        ({"prompt": ""}, api.BadRequestError, None, "prompt must not be empty\n"),
        ({"logprobs": 21}, api.BadRequestError, None, "logprobs must be at most 20, not 21"),
        ({"best_of": 2}, api.BadRequestError, None, "best_of must be 1, as n, not 2: ask for n choices"),
        ({"max_tokens": 0}, api.BadRequestError, None, "send echo: true"),
        ({"prompt": [1, 256]}, api.BadRequestError, "invalid_argument", "token 256 does not exist: the model has 0"),
        ({"suffix": "x"}, api.BadRequestError, None, "no model here fills in between"),
        ({"extra_body": {"max_token": 1}}, api.BadRequestError, "unknown_field", "(did you mean max_tokens?)"),
        ({"extra_body": {"onesweep": {"chnk": 1}}}, api.BadRequestError, "unknown_field", "(did you mean chunk?)"),
        ({"extra_body": {"onesweep": {"mode": "sweep"}}}, api.BadRequestError, None, "in only one of them"),
    ],
)
def test_a_refusal_explains_what_to_change(
    openai: OpenAI, changes: dict[str, Any], error: type[api.APIStatusError], code: str | None, words: str
) -> None:
    for streamed in (False, True):
        with pytest.raises(error) as caught:
            openai.completions.create(**ASKED | changes, stream=streamed)
        assert words in f"{caught.value.message}\n"
        assert caught.value.code == code
