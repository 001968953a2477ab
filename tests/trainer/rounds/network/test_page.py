"""The page of a run: what it answers, to whom, and how it looks in a real browser."""

import re
import ssl
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.errors import InputError
from stages.wire.tls import LOOPBACK_ONLY, Security, Tls
from stages.wire.tokens import Key, Keyring, new_token, token_hash, write_tokens
from tests.conftest import until
from trainer.rounds.server import check_page
from trainer.rounds.settings import PROTOCOL
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]
EVIL = "<img src=x onerror=\"document.title='taken'\">"
WAIT_S = 30.0
HERE = "127.0.0.1:0"
NARROW = {"width": 360, "height": 740}


@pytest.fixture
def net(network: Start) -> Any:
    """With a page, and rounds that end as soon as one worker has handed in. Nobody is gone while a browser starts."""
    return network(coordinator={"page": HERE, "lease_s": 600.0}, deadline="fixed", deadline_s=0.05, late="keep")


@pytest.fixture
def http(net: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=net.url, timeout=WAIT_S) as client:
        yield client


def hand_in(net: Any, place: Any, worker: str, **losses: float) -> None:
    link, payload = net.link(), net.payload(net.spec.parts[place.part])
    submission = net.submission(place, payload, worker, losses=losses)
    assert link.submit(submission, payload).outcome == rounds_pb2.OUTCOME_ACCEPTED


def test_it_shows_what_watch_tells(net: Any, http: httpx.Client) -> None:
    hand_in(net, net.join("ann", part=1, device="cpu"), "ann", denoise_nats=2.5)
    until(lambda: http.get("/status.json").json()["parts"][1]["closed"], WAIT_S)
    shown = http.get("/status.json").json()
    assert (shown["run"], shown["state"], shown["problem"]) == (net.spec.run, "RUN_STATE_RUNNING", "")
    assert [(w["worker"], w["part"], w["device"], w["accepted"]) for w in shown["workers"]] == [("ann", 1, "cpu", 1)]
    assert shown["parts"][1]["closed"] == [
        {"first": 0, "last": 0, "updates": 1, "late": 0, "losses": {"denoise_nats": 2.5}}
    ]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 200),
        ("GET", "/status.json", {}, 200),
        ("GET", "/nothing", {}, 404),
        ("POST", "/status.json", {}, 405),
        ("DELETE", "/", {}, 405),
        ("GET", "/", {"host": "evil.example"}, 403),
        ("GET", "/status.json", {"origin": "http://evil.example"}, 403),
    ],
)
def test_every_answer_is_locked_down(
    http: httpx.Client, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = http.request(method, path, headers=headers)
    assert answer.status_code == status, answer.text
    policy = answer.headers["content-security-policy"]
    assert re.search(r"default-src 'none'; script-src 'sha256-\S{44}'; style-src 'sha256-\S{44}';", policy)
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    if status >= 400:
        assert len(answer.json()["error"]) > 20


@pytest.mark.parametrize(
    ("listen", "security", "tokens", "said"),
    [
        ("127.0.0.1:80", LOOPBACK_ONLY, False, None),
        ("0.0.0.0:80", Security(None, insecure=True), False, None),
        ("0.0.0.0:80", Security(Tls(Path("ca"))), True, None),
        ("0.0.0.0:80", Security(Tls(Path("ca"))), False, "give --tokens"),
        ("0.0.0.0:80", LOOPBACK_ONLY, True, "not encrypted"),
        ("nowhere", LOOPBACK_ONLY, False, "--page 'nowhere' must be HOST:PORT"),
    ],
)
def test_where_it_may_be(listen: str, security: Security, tokens: bool, said: str | None, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [])
    keyring = Keyring(tmp_path / "tokens" if tokens else None)
    if said is None:
        check_page(listen, security, keyring)
    else:
        with pytest.raises(InputError, match=said):
            check_page(listen, security, keyring)


@pytest.mark.slow
def test_a_browser_shows_who_is_late_and_strangers_words_stay_words(net: Any, chromium: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    ann, bob = net.join("ann", part=0, device=EVIL), net.join("bob", part=0)
    beat = rounds_pb2.BeatRequest(worker="bob", lease=bob.lease, doing=rounds_pb2.DOING_TRAINING, steps=1)
    net.stub.Beat(beat, timeout=WAIT_S)
    hand_in(net, ann, "ann", denoise_nats=2.5, next_byte_nats=3.0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context, wrong = browser.new_context(viewport=NARROW, color_scheme="dark"), []  # type: ignore[arg-type]
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if asked.url.startswith(net.url) else wrong.append(asked.url))
        page.goto(net.url)
        expect.set_options(timeout=WAIT_S * 1000)
        late = page.get_by_role("row").filter(has_text="bob")
        expect(late).to_contain_text("late: round 1 is open")
        expect(page.get_by_role("row").filter(has_text="ann")).to_contain_text(EVIL)
        expect(page.get_by_role("status")).to_contain_text("bob is late")
        expect(page.get_by_role("img", name="denoise from 2.500 to 2.500 nats")).to_be_visible()
        assert page.title() == "(1 late) onesweep: rounds"
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
        page.keyboard.press("Tab")
        expect(page.locator("summary")).to_be_focused()
        assert not wrong
        net.end()  # the page says so, and does not break
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        browser.close()


# The page of a run over HTTPS, where other machines can reach it: to a client that checks, and to a browser.


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
def tls_net(network: Start, tls: Tls, tokens: dict[str, str], tmp_path: Path) -> Any:
    """A coordinator that every machine can reach, with one worker."""
    started = network(coordinator={"page": "0.0.0.0:0", "security": Security(tls), "tokens": tmp_path / "tokens"})
    link = started.link(security=Security(Tls(tls.authority)), token=tokens["work"])
    ours = {"version": version("onesweep"), "protocol": PROTOCOL, "data": started.corpus.digest()}
    link.join(rounds_pb2.JoinRequest(worker="work.1", **ours))
    return started


def test_who_checks_the_certificate_and_shows_a_token_sees_the_run(
    tls_net: Any, tls: Tls, tokens: dict[str, str]
) -> None:
    assert tls_net.url.startswith("https://127.0.0.1:")
    with httpx.Client(
        base_url=tls_net.url, verify=ssl.create_default_context(cafile=str(tls.authority)), timeout=WAIT_S
    ) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert "content-security-policy" in page.headers
        assert tls_net.spec.run not in page.text, "the page itself tells nothing"
        for token, status in (("", 401), ("x", 401), (tokens["work"], 403), (tokens["status"], 200)):
            answer = http.get("/status.json", headers={"authorization": f"Bearer {token}"} if token else {})
            assert answer.status_code == status
        assert [worker["worker"] for worker in answer.json()["workers"]] == ["work.1"]
        other = http.get("/status.json", headers={"origin": "https://evil.example"})
        assert other.status_code == 403
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(tls_net.url, timeout=WAIT_S)
    with pytest.raises(httpx.TransportError):
        httpx.get(tls_net.url.replace("https", "http"), timeout=WAIT_S)
