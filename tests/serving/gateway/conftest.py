"""A gateway as a real process in front of real hosts."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from serving.cli.deployment import Deployment
from serving.cli.ports import free_port_block
from serving.cli.servers import MODULE
from tests.conftest import PATIENCE_S, until
from tests.serving.conftest import describe

expect.set_options(timeout=20_000)


@dataclass(frozen=True)
class Gateway:
    """A running gateway, and its log."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def run(
    directory: Path, *options: str, scheme: str = "http", verify: Any = True, files: int | None = None
) -> Iterator[Gateway]:
    """:param files: that it may open."""
    port, log = free_port_block(1), directory / "http.log"
    command = [sys.executable, *MODULE, "http", "--listen", f"127.0.0.1:{port}", *options]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    gateway = Gateway(f"{scheme}://127.0.0.1:{port}", process, log)

    def live() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{gateway.url}/healthz", timeout=2, verify=verify).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(live)
        yield gateway
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
        assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def gateway(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """In front of `deployment`. Not to be harmed."""
    with run(tmp_path_factory.mktemp("http"), "--router", deployment.topology.router) as gateway:
        yield gateway


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def openai(gateway: Gateway) -> Iterator[OpenAI]:
    """The official client; it does not try again, so that every refusal is seen."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def completed(deployment: Deployment) -> Callable[[], int]:
    """Hops that the hosts have computed so far."""
    return lambda: sum(describe(host.address).counters.completed for host in deployment.topology.hosts)


@pytest.fixture(scope="module")  # it keeps an event loop, in which no other test can run one
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, wait_for: str, **context: Any) -> Iterator[Page]:
    """A page that has `wait_for`; an error in its console or a fetch from elsewhere fails the test."""
    opened, site = browser.new_context(reduced_motion="reduce", **context), "/".join(url.split("/")[:3])
    page, wrong = opened.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if is_wrong(message) else None)
    page.on("request", lambda asked: None if asked.url.startswith(f"{site}/") else wrong.append(asked.url))
    page.goto(url)
    page.wait_for_selector(wait_for)
    yield page
    opened.close()
    assert not wrong


def is_wrong(message: ConsoleMessage) -> bool:
    # the state of the hosts is asked for every two seconds, and a page that is left breaks that off
    # the browser reports every refusal, too
    spared = message.location["url"].endswith(("/api/hosts", "/v1/chat/completions"))
    return message.type in ("error", "warning") and not ("Failed to load resource" in message.text and spared)


@pytest.fixture(scope="module")
def page_at(browser: Browser) -> Callable[..., AbstractContextManager[Page]]:
    """`with page_at(url, wait_for, **context) as page`"""
    return partial(open_page, browser)
