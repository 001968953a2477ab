"""`onesweep http` and `up --http`: where they listen, and what they refuse."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.deployment import find_deployment, free_port_block
from serving.http.settings import HttpSettings, open_socket
from stages.errors import InputError, ServiceError

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--tls-cert"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--router", "nowhere"], "HOST:PORT"),
        (["--tls-cert", "cert.pem"], "go together"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "No such file"),
        (["--allow-host", "a:80"], "without port"),
        (["--timeout-s", "0"], "above 0"),
        (["--timeout-s", "nan"], "above 0"),
    ],
)
def test_wrong_options_are_refused(onesweep: Run, options: list[str], words: str) -> None:
    code, _, error = onesweep("http", "--listen", "127.0.0.1:0", *options)
    assert (code, error.count("\n")) == (2, 1)
    assert words in error


def test_without_its_framework_it_says_what_to_install(onesweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.http.commands.find_spec", lambda name: None)
    for command in (("http",), ("up", "--http")):
        code, _, error = onesweep(*command)
        assert (code, error.count("\n")) == (2, 1)
        assert "onesweep[http]" in error


def test_loopback_insecure_and_tls_may_listen() -> None:
    assert HttpSettings("127.0.0.1:1").url == "http://127.0.0.1:1"
    assert HttpSettings("0.0.0.0:1", insecure=True).insecure
    assert HttpSettings("0.0.0.0:1", tls_cert=Path("a"), tls_key=Path("b")).url.startswith("https://")
    with pytest.raises(InputError):
        HttpSettings("10.8.0.1:1")


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServiceError, match="in use"):
        open_socket(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl on this machine")
    return cert, key


def test_it_serves_https_and_outlives_its_router(
    certificate: tuple[Path, Path], tmp_path: Path, running: Callable[..., Any]
) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    options = ("--router", "127.0.0.1:1", "--tls-cert", str(cert), "--tls-key", str(key))
    with running(tmp_path, *options, scheme="https", verify=trust) as gateway:
        assert httpx.get(f"{gateway.url}/healthz", verify=trust).json() == {"status": "live"}
        # nothing answers behind it: it lives, and says what to do
        ready = httpx.get(f"{gateway.url}/readyz", verify=trust)
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        asked = {"model": "onesweep-ar", "prompt": "a"}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=asked, verify=trust)
        assert answer.status_code == 503
        assert "onesweep up" in answer.json()["error"]["message"]


def test_the_schema_describes_our_fields(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/api/race", "/readyz"} <= schema["paths"].keys()
    ours = schema["components"]["schemas"]["Extension"]["properties"]
    assert all(field["description"] for field in ours.values())
    for path in ("/docs", "/redoc"):
        assert http.get(path).status_code == 404, "their pages load scripts from elsewhere"


def test_up_starts_it_and_down_ends_it(
    onesweep: Run, bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state"))
    port = free_port_block(3)
    address = f"127.0.0.1:{port + 2}"
    up = ("up", "--detach", "--hosts", 1, "--checkpoint", bundles / "own", "--port", port, "--http")
    code, _, error = onesweep(*up, "0.0.0.0:0")
    assert (code, "not loopback" in error) == (1, True)
    code, _, error = onesweep(*up, "nowhere")
    assert (code, "HOST:PORT" in error) == (2, True)
    try:
        code, out, error = onesweep(*up, address)
        assert (code, f"http://{address}" in out) == (0, True), error
        assert httpx.get(f"http://{address}/readyz").status_code == 200
    finally:
        onesweep("down")
    assert find_deployment(tmp_path / "state") is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/healthz")
