"""A race of pictures: one class in every mode of drawing, over the API and on the page."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from tests.conftest import PATIENCE_S
from tests.serving.gateway.conftest import run
from tests.serving.gateway.test_race import told
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

pytestmark = pytest.mark.slow

MODES = ("chain", "steps", "local")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of three hosts that draw."""
    bundle = tiny_picture_bundle(tmp_path_factory.mktemp("pictures"))
    with temporary_deployment(local_topology(3, 3, bundle, free_port_block(4) + 1), bundle) as running:
        yield running.topology.router


@pytest.fixture(scope="module")
def artist(router: str) -> Iterator[Client]:
    with Client(router) as client:
        yield client


@pytest.fixture(scope="module")
def site(router: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run(tmp_path_factory.mktemp("http"), "--router", router) as gateway:
        yield gateway.url


def pixels_of(picture: dict[str, Any]) -> Any:
    shape = [picture[name] for name in ("channels", "height", "width")]
    return np.frombuffer(base64.b64decode(picture["pixels"]), np.uint8).reshape(shape)


@pytest.mark.parametrize("together", [False, True])
def test_a_race_draws_what_each_mode_draws_alone(site: str, artist: Client, together: bool) -> None:
    asked = {"prompt": "one", "entrants": MODES, "seed": 7, "levels": 4, "together": together}
    events = told(httpx.post(f"{site}/api/race/pictures", json=asked, timeout=PATIENCE_S))
    for mode in MODES:
        own = artist.draw("one", mode=mode, seed=7, levels=4)
        mine = [event for event in events if event["lane"] == mode]
        assert mine[0]["started"]
        assert np.array_equal(pixels_of(mine[-1]["picture"]), own.pixels[0]), mode
        assert mine[-1]["result"]["sweeps"] == own.sweeps
        previews = [event["preview"] for event in mine if "preview" in event]
        # they take links of their own, and may come too late
        assert {each["block"] for each in previews} <= ({0, 1} if mode == "chain" else set())
        assert all(pixels_of(each).shape == (TINY.channels, TINY.height, TINY.width) for each in previews)


@pytest.fixture
def page(page_at: Any, site: str) -> Iterator[Page]:
    with page_at(f"{site}/", ".chip") as page:
        yield page


def test_the_page_draws_with_the_keyboard_alone_and_shows_trips(page: Page, artist: Client) -> None:
    expect(page.get_by_label("Prompt")).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the class")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Class")).to_be_focused()
    page.keyboard.type("two")
    page.get_by_text("Settings").click()
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#note")).to_contain_text("slowed each other down")
    lanes = {mode: page.locator(".lane").filter(has=page.get_by_role("heading", name=mode)) for mode in MODES}
    for mode, trips in zip(MODES, (1, 13, 0), strict=True):
        expect(lanes[mode].locator("dd").first).to_have_text(str(trips))
        expect(lanes[mode].get_by_role("img", name=f"two, {mode}, the picture")).to_be_visible()
        expect(lanes[mode].locator(".badge")).to_have_count(0)
    expect(page.get_by_role("status")).to_contain_text("is done")
    wanted = artist.draw("two", mode="local", seed=7).pixels[0, 0]
    drawn = (
        lanes["local"]
        .locator("canvas")
        .evaluate("(shown) => [...shown.getContext('2d').getImageData(0, 0, shown.width, shown.height).data]")
    )
    assert np.array_equal(np.array(drawn).reshape(8, 8, 4)[:, :, 0], wanted)
