"""The pages, in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from onesweep.serving.cli.deployment import Deployment
from onesweep.serving.client.client import Client

expect.set_options(timeout=20_000)
NARROW = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, gateway: Any) -> Iterator[Page]:
    """On the race page; whatever it says in the console, or fetches from elsewhere, fails the test."""
    context = browser.new_context(reduced_motion="reduce")
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
    page.on("request", lambda asked: None if asked.url.startswith(gateway.url) else wrong.append(asked.url))
    page.goto(f"{gateway.url}/")
    page.wait_for_selector(".chip")
    yield page
    context.close()
    assert not wrong


def is_wrong(said: ConsoleMessage) -> bool:
    # the state of the hosts is asked for every two seconds, and a page that is left breaks that off
    broken_off = "Failed to load resource" in said.text and said.location["url"].endswith("/api/hosts")
    return said.type in ("error", "warning") and not broken_off


def tick(page: Page, *entrants: str) -> None:
    for box in page.locator("[name=entrant]").all():
        box.set_checked(box.get_attribute("value") in entrants)


def lane(page: Page, label: str) -> Any:
    return page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=label, exact=False)).first


def test_a_race_shows_text_and_costs(page: Page, client: Client) -> None:
    prompt = "It was late when "
    own = {mode: client.generate(prompt, mode=mode, max_bytes=16, seed=5) for mode in ("sweep", "ar")}
    tick(page, "sweep", "ar")
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Bytes").fill("16")
    page.get_by_label("Seed").fill("5")
    page.get_by_role("button", name="Race").click()
    expect(page.locator("#note")).to_be_visible()
    for mode, result in own.items():
        assert lane(page, mode).locator(".fresh").text_content() == result.text
        assert lane(page, mode).locator("dd").first.text_content() == str(result.sweeps)
    assert {page.locator(".state").nth(i).text_content() for i in (0, 1)} == {"1st", "2nd"}
    expect(page.get_by_role("status")).to_contain_text("is done")


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Prompt")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator("[name=entrant]").first.is_checked() is False
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".lane").first).to_be_visible()
    expect(page.get_by_role("button", name="Race")).to_be_visible()


def test_what_is_written_never_becomes_markup(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    tick(page, "local", "infill:ar")
    page.get_by_label("Prompt").fill(evil)
    page.get_by_label("Suffix").fill(evil)
    page.get_by_label("Bytes").fill("4")
    page.get_by_role("button", name="Race").click()
    expect(page.locator("#note")).to_be_visible()
    assert (page.locator(".given").first.text_content(), page.title()) == (evil, "onesweep: race")
    assert page.locator("#lanes img, #lanes script").count() == 0


def test_stop_frees_the_hosts(
    page: Page, deployment: Deployment, sessions: Callable[[Deployment], int], until: Any
) -> None:
    tick(page, "ar", "ar-speculative")
    page.get_by_label("Bytes").fill("450")
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".costs dd").first).not_to_have_text("–")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Race")).to_be_visible()
    assert "stopped" in page.locator(".state").all_text_contents()
    until(lambda: sessions(deployment) == 0)


def test_a_refusal_is_a_sentence_on_the_page(page: Page) -> None:
    tick(page, "sweep")
    page.get_by_label("Bytes").fill("4096")
    page.get_by_role("button", name="Race").click()
    expect(lane(page, "sweep")).to_contain_text("context is 512")
    tick(page)
    page.get_by_role("button", name="Race").click()
    expect(page.get_by_role("alert")).to_have_text("Tick at least one mode.")


def test_hosts_show_their_state(page: Page, deployment: Deployment) -> None:
    page.get_by_role("link", name="Hosts").click()
    cards = page.locator(".host")
    expect(cards).to_have_count(3)
    for index, host in enumerate(deployment.topology.hosts):
        expect(cards.nth(index)).to_contain_text(host.name)
        expect(cards.nth(index)).to_contain_text(host.address)
    expect(page.get_by_role("img", name="Router, then")).to_be_visible()


def test_hosts_with_overlapping_spans_are_joined_by_their_blocks(page: Page) -> None:
    blocks = {"a": [0, 1], "b": [0], "c": [1, 2], "d": [2]}
    hosts = [{"name": name, "blocks": held, "ready": True, "links": []} for name, held in blocks.items()]
    edges, way = page.evaluate(
        """async (hosts) => {
            const { RingMap } = await import("/static/map.js");
            const map = new RingMap(document.createElement("div"));
            map.hosts = hosts;
            return [map.edges().map(({ from, to, loop }) => [from ?? "-", to ?? "-", Boolean(loop)]), map.usualWay()];
        }""",
        hosts,
    )
    assert {f"{start}{end}" for start, end, loop in edges if not loop} == {"-a", "-b", "ad", "bc", "c-", "d-"}
    assert {f"{start}{end}" for start, end, loop in edges if loop} == {"ca", "cb", "da", "db"}
    assert way == [None, "a", "d", None]


@pytest.mark.parametrize("path", ["/", "/hosts"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_every_field_has_a_name(browser: Browser, gateway: Any, path: str, scheme: Any) -> None:
    context = browser.new_context(viewport=NARROW, color_scheme=scheme)
    page = context.new_page()
    page.goto(gateway.url + path)
    page.wait_for_selector(".chip, .host")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    unnamed = "[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"
    assert page.evaluate(unnamed) == 0
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "light dark"
    context.close()
