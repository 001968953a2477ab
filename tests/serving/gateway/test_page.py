"""The pages, in a real browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from onesweep.serving.cli.deployment import Deployment
from onesweep.serving.client.client import Client
from tests.conftest import until
from tests.serving.conftest import sessions

NARROW = {"width": 375, "height": 740}


@pytest.fixture
def page(page_at: Any, gateway: Any) -> Iterator[Page]:
    """On the race page."""
    with page_at(f"{gateway.url}/", ".chip") as page:
        yield page


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
    tick(page, "local", "resample:ar")
    page.get_by_label("Prompt").fill(evil)
    page.get_by_label("Bytes").fill("4")
    page.get_by_role("button", name="Race").click()
    expect(page.locator("#note")).to_be_visible()
    assert (page.locator(".given").first.text_content(), page.title()) == (evil, "onesweep: race")
    assert page.locator("#lanes img, #lanes script").count() == 0


def test_stop_frees_the_hosts(page: Page, deployment: Deployment) -> None:
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


def raced(page: Page, *entrants: str, count: int = 12, **fields: str) -> None:
    """A whole race."""
    tick(page, *entrants)
    page.get_by_label("Bytes").fill(str(count))
    for label, value in fields.items():
        page.locator(f"#{label}").fill(value)
    page.get_by_role("button", name="Race").click()
    expect(page.locator("#note")).to_be_visible()


def test_texts_are_rated_beside_the_rank_and_twins_are_named(page: Page) -> None:
    raced(page, "sweep", "resample:ar", "ar", "ar-speculative", "local")
    badges = {label: lane(page, label).locator(".badges") for label in ("sweep", "resample:ar", "local")}
    expect(badges["sweep"]).to_contain_text("noise chain: letter soup at this size")
    expect(badges["resample:ar"]).to_contain_text("leans to likely text")
    expect(badges["local"]).to_contain_text("text of a smaller model")
    for one, other in (("ar", "ar-speculative"), ("ar-speculative", "ar")):
        own = page.locator(".lane").filter(has=page.get_by_role("heading", name=one, exact=True)).locator(".badges")
        expect(own).to_contain_text("text of the model, exact")
        expect(own).to_contain_text(f"identical to {other}, equal by promise")
    assert sorted(page.locator(".state").all_text_contents()) == ["1st", "2nd", "3rd", "4th", "5th"]
    expect(page.locator(".broken")).to_have_count(0)


def test_texts_that_break_a_promise_or_agree_by_chance_are_named(page: Page) -> None:
    said = page.evaluate(
        """async () => {
            const { Lane } = await import("/static/lane.js");
            const lane = new Lane("ar", 0, "", "", { trip() {}, end() {} });
            const others = [{ label: "x", same: false, promised: true }, { label: "y", same: true, promised: false }];
            lane.showTwins(others);
            return [lane.twins.textContent, lane.twins.className];
        }"""
    )
    assert said == ["not the text of x, as promised: please report it; identical to y", "badge broken"]


def test_judges_bits_stand_beside_the_rank(page: Page) -> None:
    said = page.evaluate(
        """async () => {
            const { Lane } = await import("/static/lane.js");
            const bits = { ar: 2.142, "resample:scorer": 2.048 };
            const lane = (label) => new Lane(label, 0, "", "", { trip() {}, end() {} }, bits);
            const [ar, resample, sweep, auto] = ["ar", "resample:scorer", "sweep", "auto"].map(lane);
            auto.showWorth("resample", "scorer");
            return [ar, resample, sweep, auto].map((each) => each.judged.textContent);
        }"""
    )
    assert said == ["2.14 judge bits", "2.05 judge bits", "", "2.05 judge bits"]


def test_the_slider_adds_delay_to_every_hop(page: Page, client: Client, deployment: Deployment) -> None:
    prompt, delay_ms = "It was late when ", 30
    slider = page.get_by_label("Delay added to every hop")
    slider.focus()
    for _ in range(delay_ms // 5):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#link-said")).to_have_text(f"{delay_ms} ms, across an ocean")
    assert slider.get_attribute("aria-valuetext") == f"{delay_ms} ms, across an ocean"
    page.get_by_label("Prompt").fill(prompt)
    with page.expect_request("**/api/race") as asked:
        raced(page, "sweep", seed="5")
    assert asked.value.post_data_json["link_ms"] == delay_ms
    assert (
        lane(page, "sweep").locator(".fresh").text_content()
        == client.generate(prompt, mode="sweep", seed=5, max_bytes=12).text
    )
    expect(page.locator("#note")).to_contain_text(f"Every hop took {delay_ms} ms more")


def test_every_mode_has_a_tooltip_that_the_keyboard_opens_and_closes(page: Page) -> None:
    page.set_viewport_size(NARROW)
    for box in page.locator("[name=entrant]").all():
        tip = page.locator(f"#{box.get_attribute('aria-describedby')}")
        expect(tip).to_be_hidden()
        box.focus()
        expect(tip).to_be_visible()
        assert len(tip.text_content() or "") > 40
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()
    page.locator(".chip").first.hover()
    expect(page.locator("[role=tooltip]").first).to_be_visible()


REACHED = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
    .filter((each) => each.checkVisibility() && !each.dataset.reached).map((each) => each.id || each.textContent)"""
MARK = "document.activeElement === document.body ? false : (document.activeElement.dataset.reached = '1')"


@pytest.mark.parametrize("path", ["/", "/chat", "/hosts"])
def test_every_control_is_reached_by_the_keyboard(page_at: Any, gateway: Any, path: str) -> None:
    with page_at(gateway.url + path, "#version:not(:empty)") as page:
        page.evaluate("document.querySelector('details').open = true")
        page.keyboard.press("Tab")
        for _ in range(100):
            if not page.evaluate(MARK):
                break
            page.keyboard.press("Tab")
        assert page.evaluate(REACHED) == []


# Contrast as in WCAG 2.2, of what is drawn: a canvas reads every notation of a colour.
FAINT = """() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const drawn = (colours) => {
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = (each) => {
        const grounds = [];
        for (let at = each; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
        return ["white", ...grounds];
    };
    const texts = [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility() &&
        !each.closest(".unseen, .skip, noscript") &&
        [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()));
    return texts.map((each) => {
        const style = getComputedStyle(each), grounds = behind(each);
        const ink = each instanceof SVGElement ? style.fill : style.color;
        const [low, high] = [light(drawn(grounds)), light(drawn([...grounds, ink]))].sort((a, b) => a - b);
        return [each.tagName + "." + (each.className.baseVal ?? each.className), (high + 0.05) / (low + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("path", ["/", "/chat", "/hosts"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes_and_every_field_has_a_name(
    page_at: Any, gateway: Any, path: str, scheme: str
) -> None:
    with page_at(gateway.url + path, "#version:not(:empty)", viewport=NARROW, color_scheme=scheme) as page:
        if path == "/":
            raced(page, "sweep", "resample:ar", "ar", "ar-speculative", count=4)
            page.get_by_label("Bytes").focus()
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        unnamed = "[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"
        assert page.evaluate(unnamed) == 0
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == "light dark"
        assert page.evaluate(FAINT) == []


def test_the_version_is_shown(page: Page, client: Client) -> None:
    expect(page.locator("#version")).to_have_text(client.status().version)
