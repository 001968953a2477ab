"""Takes the screenshots of the docs with chromium: `python .ci/screenshots.py [FOLDER]` (default: docs).

It starts a ring of three hosts with the shipped weights and a gateway on this machine, races in the page, and takes the
race in a light and a dark scheme and on a phone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.cli.servers import MODULE
from serving.router.topology import SHIPPED, local_topology

HOSTS = 3
ENTRANTS = ("sweep", "resample:scorer", "ar", "ar-speculative")
BYTES = 96
RACE_TIMEOUT_MS = 180_000
GATEWAY_TIMEOUT_S = 60.0
WIDE: ViewportSize = {"width": 1200, "height": 900}
PHONE: ViewportSize = {"width": 375, "height": 812}
SHOTS = (("race.png", "light", WIDE), ("race-dark.png", "dark", WIDE), ("race-phone.png", "light", PHONE))


@contextmanager
def gateway(router: str) -> Iterator[str]:
    """The address of a gateway in front of a router. Raises RuntimeError for one that does not start."""
    url = f"http://127.0.0.1:{free_port_block(1)}"
    listen = url.removeprefix("http://")
    process = subprocess.Popen([sys.executable, *MODULE, "http", "--listen", listen, "--router", router])
    try:
        deadline = time.monotonic() + GATEWAY_TIMEOUT_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the gateway did not start: its log is above")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def unfold(page: Page, is_open: bool) -> None:
    """Open or close the page's folds, which hide settings and further modes."""
    page.evaluate("(open) => document.querySelectorAll('details').forEach((fold) => fold.open = open)", is_open)


def race(page: Page) -> None:
    """One race, from the form to the last text."""
    page.wait_for_selector(".chip")
    unfold(page, True)
    for box in page.locator("[name=entrant]").all():
        box.set_checked(box.get_attribute("value") in ENTRANTS)
    page.get_by_label("Bytes").fill(str(BYTES))
    page.get_by_label("One after another").check()
    unfold(page, False)
    page.get_by_role("button", name="Race").click()
    page.locator("#note").wait_for(timeout=RACE_TIMEOUT_MS)


def shoot(browser: Browser, url: str, folder: Path) -> None:
    """One race, and a picture of it for each scheme and size."""
    page = browser.new_context(viewport=WIDE, reduced_motion="reduce").new_page()
    page.goto(url)
    race(page)
    page.get_by_role("button", name="Race").blur()
    for name, scheme, viewport in SHOTS:
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
        page.mouse.move(0, 0)
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        page.screenshot(path=folder / name, full_page=True)
        # a third of the size; of the methods this one keeps the small dots' colours
        with Image.open(folder / name) as picture:
            picture.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE).save(folder / name, optimize=True)
        print(folder / name)


def main(arguments: list[str]) -> int:
    folder, chromium = Path(arguments[0] if arguments else "docs"), shutil.which("chromium")
    if chromium is None:
        print("screenshots need chromium, which is not installed here (Debian: apt install chromium)", file=sys.stderr)
        return 1
    topology = local_topology(HOSTS, HOSTS, SHIPPED, free_port_block(HOSTS + 1) + 1)
    with temporary_deployment(topology, SHIPPED), gateway(topology.router) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shoot(browser, url, folder)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
