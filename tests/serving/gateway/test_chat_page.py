"""The chat page, in a real browser and in front of a model with a chat template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.conftest import PATIENCE_S
from tests.serving.gateway.conftest import run
from tests.serving.pretrained import write_model


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[str]:
    """Address of a gateway in front of a small model that has a chat template."""
    directory: Path = tmp_path_factory.mktemp("chat")
    write_model(directory / "model")
    with local_ring(directory / "model", 3) as client, run(directory, "--router", client.address) as gateway:
        yield gateway.url


@pytest.fixture
def page(page_at: Any, site: str) -> Iterator[Page]:
    with page_at(f"{site}/chat", "#form:not([hidden])") as page:
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("8")
        yield page


def answered(site: str, *texts: str) -> str:
    """The answer of the API to a conversation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    asked = {"model": "onesweep", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{site}/v1/chat/completions", json=asked, timeout=PATIENCE_S).json()
    return answer["choices"][0]["message"]["content"]


KEPT = "JSON.parse(localStorage.getItem('onesweep-chats'))[0].messages.map((each) => each.content)"


def test_a_conversation_continues_with_its_history(page: Page, site: str) -> None:
    def comment_first(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=f": waiting\n\n{answer.text()}")

    page.route("**/v1/chat/completions", comment_first)
    first = answered(site, "the sea")
    page.get_by_label("Message").fill("the sea")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .quiet")).to_contain_text("8 tokens by")
    assert page.evaluate(KEPT) == ["the sea", first]
    expect(page.get_by_role("status")).to_have_text(first)
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("the ship")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.assistant .quiet").nth(1)).to_contain_text("8 tokens by")
    second = answered(site, "the sea", first, "the ship\nand")
    assert page.evaluate(KEPT)[1::2] == [first, second]
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.assistant .costs-line").nth(1)).to_contain_text("8 tokens by")
    assert page.evaluate(KEPT)[1::2] == [first, second], "at temperature 0"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    page.get_by_label("Chats").select_option("the sea")
    expect(page.locator(".turn")).to_have_count(4)
    page.get_by_role("button", name="Delete chat").click()
    expect(page.get_by_label("Chats")).to_be_hidden()


WRITTEN = """# Head
One *thin* and **bold `*x*`** [site](https://example.org/a) <img src=x onerror=alert(1)>
line [bad](javascript:alert(1))

- one
- two `a<b`
3. three

```python
print("**")
- no item
```
end ```
unclosed"""
SHOWN = """<p><strong>Head</strong></p><p>One <em>thin</em> and <strong>bold <code>*x*</code></strong> \
<a href="https://example.org/a" rel="noreferrer" target="_blank">site</a> &lt;img src=x onerror=alert(1)&gt;
line [bad](javascript:alert(1))</p><ul><li>one</li><li>two <code>a&lt;b</code></li></ul><ol><li>three</li></ol>\
<pre><code>print("**")
- no item</code></pre><p>end ```
unclosed</p>"""


def test_markdown_becomes_elements(page: Page) -> None:
    made = page.evaluate(
        """async (text) => { const { markdown } = await import("/static/markdown.js");
        const whole = document.createElement("div"); whole.append(...markdown(text)); return whole.innerHTML; }""",
        WRITTEN,
    )
    assert made == SHOWN


def test_the_start_page_of_a_chat_model_is_the_chat(page: Page, site: str) -> None:
    page.goto(f"{site}/")
    page.wait_for_url(f"{site}/chat")
    page.get_by_role("link", name="Race").click()
    page.wait_for_selector(".chip")
    assert page.url == f"{site}/race"


def test_messages_never_become_markup(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    page.get_by_label("Message").fill(evil)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .quiet")).to_contain_text("8 tokens by")
    assert (page.locator(".turn.user p").text_content(), page.title()) == (evil, "onesweep: chat")
