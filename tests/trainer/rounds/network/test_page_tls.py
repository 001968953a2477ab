"""The page of a run over HTTPS, where other machines can reach it: to a client that checks, and to a browser."""

from __future__ import annotations

import base64
import hashlib
import ssl
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from stages.security import Security, Tls
from stages.tokens import Key, new_token, token_hash, write_tokens
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]
WAIT_S = 30.0


@pytest.fixture
def tls(new_pki: Callable[[str], Any]) -> Tls:
    return new_pki("pki").issue("router", "hub")


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """By scope."""
    found = {scope: new_token() for scope in ("status", "work")}
    write_tokens(tmp_path / "tokens", [Key(scope, token_hash(token), (scope,)) for scope, token in found.items()])
    return found


@pytest.fixture
def net(network: Start, tls: Tls, tokens: dict[str, str], tmp_path: Path) -> Any:
    """A coordinator that every machine can reach, with one worker."""
    started = network(coordinator={"page": "0.0.0.0:0", "security": Security(tls), "tokens": tmp_path / "tokens"})
    link = started.link(security=Security(Tls(tls.authority)), token=tokens["work"])
    digest = started.corpus.digest()
    link.join(rounds_pb2.JoinRequest(worker="work.1", version=version("onesweep"), data_kind="bytes", data=digest))
    link.close()
    return started


def test_who_checks_the_certificate_and_shows_a_token_sees_the_run(net: Any, tls: Tls, tokens: dict[str, str]) -> None:
    assert net.url.startswith("https://127.0.0.1:")
    with httpx.Client(
        base_url=net.url, verify=ssl.create_default_context(cafile=str(tls.authority)), timeout=WAIT_S
    ) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert "content-security-policy" in page.headers
        assert net.plan.run not in page.text, "the page itself tells nothing"
        for token, status in (("", 401), ("x", 401), (tokens["work"], 403), (tokens["status"], 200)):
            answer = http.get("/status.json", headers={"authorization": f"Bearer {token}"} if token else {})
            assert answer.status_code == status
        assert [worker["worker"] for worker in answer.json()["workers"]] == ["work.1"]
        other = http.get("/status.json", headers={"origin": "https://evil.example"})
        assert other.status_code == 403
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(net.url, timeout=WAIT_S)
    with pytest.raises(httpx.TransportError):
        httpx.get(net.url.replace("https", "http"), timeout=WAIT_S)


def test_a_browser_that_is_given_a_token_shows_the_run(
    net: Any, tls: Tls, tokens: dict[str, str], chromium: str
) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        known = f"--ignore-certificate-errors-spki-list={key_digest(tls)}"  # this one, as if its authority were known
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", known])
        page, wrong = browser.new_page(), list[str]()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(net.url) else wrong.append(asked.url))
        expect.set_options(timeout=WAIT_S * 1000)
        page.goto(net.url)
        expect(page.get_by_role("alert")).to_contain_text("to those with a token")
        assert page.get_by_role("row").filter(has_text="work.1").count() == 0
        given = page.get_by_label("Of scope status")
        given.fill(tokens["work"])
        given.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("may work only")
        given.fill(tokens["status"])
        given.press("Enter")
        expect(page.get_by_role("row").filter(has_text="work.1")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        page.reload()
        expect(page.get_by_role("row").filter(has_text="work.1")).to_be_visible()  # kept in this tab
        assert page.evaluate("isSecureContext")
        assert not wrong
        browser.close()


def key_digest(tls: Tls) -> str:
    """What Chromium calls a certificate's key."""
    assert tls.certificate is not None
    key = x509.load_pem_x509_certificate(tls.certificate.read_bytes()).public_key()
    return base64.b64encode(
        hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    ).decode()
