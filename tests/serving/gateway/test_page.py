"""The pages, in a real browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from serving.client.client import Client


@pytest.fixture
def page(page_at: Any, gateway: Any) -> Iterator[Page]:
    """On the race page."""
    with page_at(f"{gateway.url}/", ".chip") as page:
        yield page


def tick(page: Page, *entrants: str) -> None:
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
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
        swatch = page.locator(".chip").filter(has=page.locator(f"[value={mode}]")).locator(".swatch")
        assert swatch.get_attribute("class").split()[-1] in lane(page, mode).get_attribute("class").split()
    assert {page.locator(".state").nth(i).text_content() for i in (0, 1)} == {"1st", "2nd"}
    expect(page.get_by_role("status")).to_contain_text("is done")


def test_texts_never_become_markup(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    tick(page, "local", "resample:ar")
    page.get_by_label("Prompt").fill(evil)
    page.get_by_label("Bytes").fill("4")
    page.get_by_role("button", name="Race").click()
    expect(page.locator("#note")).to_be_visible()
    assert (page.locator(".given").first.text_content(), page.title()) == (evil, "onesweep: race")
    assert page.locator("#lanes img, #lanes script").count() == 0


REACHED = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
    .filter((each) => each.checkVisibility() && !each.dataset.reached).map((each) => each.id || each.textContent)"""
MARK = "document.activeElement === document.body ? false : (document.activeElement.dataset.reached = '1')"


def test_the_race_button_is_visible_on_a_phone(page_at: Any, gateway: Any) -> None:
    with page_at(f"{gateway.url}/", ".chip", viewport={"width": 375, "height": 667}) as page:
        assert page.locator(".chip:visible").count() == 3
        assert page.locator("[name=entrant]:checked").count() == 3
        expect(page.get_by_role("button", name="Race")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("path", ["/", "/chat", "/hosts"])
def test_every_control_is_reached_by_the_keyboard(page_at: Any, gateway: Any, path: str) -> None:
    with page_at(gateway.url + path, "#version:not(:empty)") as page:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        page.keyboard.press("Tab")
        for _ in range(100):
            if not page.evaluate(MARK):
                break
            page.keyboard.press("Tab")
        assert page.evaluate(REACHED) == []
