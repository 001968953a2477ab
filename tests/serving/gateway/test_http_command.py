"""`onesweep http` and `up --http`: their addresses, and wrong options."""

import contextlib
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from serving.cli.deployment import running_deployments
from serving.cli.ports import free_port_block
from serving.gateway.app import OwnCertificate
from stages.errors import InputError
from tests.conftest import Run
from tests.serving.gateway.conftest import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--tls-cert"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--router", "nowhere"], "HOST:PORT"),
        (["--tls-cert", "cert.pem"], "go together"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "No such file"),
        (["--router", "10.8.0.5:7700"], "give --tls-ca, or accept it with --insecure"),
        (["--tls-ca", "/nowhere"], "cannot read /nowhere"),
        (["--allow-host", "a:80"], "without port"),
        (["--set", "log_format=xml"], "unknown log_format"),
        (["--metrics", "0.0.0.0:0"], "could be read by anyone from other machines"),
        (["--set", "timeout_s=0"], "above 0"),
        (["--set", "timeout_s=nan"], "above 0"),
    ],
)
def test_a_wrong_option_is_explained(onesweep: Run, options: list[str], words: str) -> None:
    code, _, error = onesweep("http", "--listen", "127.0.0.1:0", *options)
    assert (code, error.count("\n")) == (2, 1)
    assert words in error


def test_a_missing_framework_is_named_with_its_extra(onesweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.settings.find_spec", lambda name: None)
    for command in (("http",), ("up", "--http")):
        code, _, error = onesweep(*command)
        assert (code, error.count("\n")) == (2, 1)
        assert "onesweep[http]" in error


def make_certificate(cert: Path, key: Path) -> tuple[Path, Path]:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl on this machine")
    return cert, key


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")


def shown(context: ssl.SSLContext) -> bytes:
    """The certificate that a server with this context shows."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    mine, theirs = client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)
    for side in (mine, theirs) * 4:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    raw = mine.getpeercert(binary_form=True)
    assert raw is not None
    return raw


def test_a_renewed_certificate_is_used_once_its_key_matches(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    own = OwnCertificate(cert, key)
    first = shown(own.context)
    assert shown(own.context) == first
    new_cert, new_key = make_certificate(tmp_path / "new.pem", tmp_path / "new.key")
    new_cert.replace(cert)
    assert shown(own.context) == first, "its key is not there yet"
    new_key.replace(key)
    second = shown(own.context)
    assert second == ssl.PEM_cert_to_DER_cert(cert.read_text()) != first
    assert shown(own.context) == second


def test_a_key_that_others_can_read_is_refused(certificate: tuple[Path, Path]) -> None:
    certificate[1].chmod(0o644)
    with pytest.raises(InputError, match="is a secret, but others can read or change it"):
        OwnCertificate(*certificate)


def test_the_gateway_serves_https_without_a_router(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    options = ("--router", "127.0.0.1:1", "--tls-cert", str(cert), "--tls-key", str(key))
    with run(tmp_path, *options, scheme="https", verify=trust) as gateway:
        assert httpx.get(f"{gateway.url}/healthz", verify=trust).json() == {"status": "live"}
        # nothing answers behind it: it lives, and gives advice
        ready = httpx.get(f"{gateway.url}/readyz", verify=trust)
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        asked = {"model": "onesweep-ar", "prompt": "a"}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=asked, verify=trust)
        assert answer.status_code == 503
        assert "start one there" in answer.json()["error"]["message"]
        trust.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"{gateway.url}/healthz", verify=trust).status_code == 200
        trust.set_ciphers("ECDHE+AES:!AESGCM:!AESCCM")
        with pytest.raises(httpx.ConnectError, match="SSL"):
            httpx.get(f"{gateway.url}/healthz", verify=trust)


@pytest.mark.usefixtures("state")
def test_up_starts_a_gateway_and_down_stops_it(onesweep: Run, bundles: Path) -> None:
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
    assert not running_deployments()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/healthz")
