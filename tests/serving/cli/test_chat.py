"""A conversation in the terminal: a person types, answers come as they are written, Ctrl-C ends one of them."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client
from tests.conftest import PATIENCE_S, Run
from tests.serving.cli.terminal import Terminal
from tests.serving.pretrained import ARCHITECTURE, write_model

pytestmark = pytest.mark.slow

CHAT = [sys.executable, "-P", "-m", "serving.cli", "chat"]


@pytest.fixture(scope="module")
def router(local_ring: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serves a model with a chat template, whose texts have no end of their own."""
    directory = tmp_path_factory.mktemp("chat") / "ar"
    write_model(directory, architecture=replace(ARCHITECTURE, positions=8192))
    with local_ring(directory, 3) as client:
        yield client.address


@pytest.fixture
def talk() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: object) -> Terminal:
        opened.append(Terminal("chat", *arguments))
        opened[-1].expect("> ")
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def answer_of(router: str, *messages: tuple[str, str], count: int = 6, **settings: Any) -> str:
    with Client(router) as client:
        return client.generate(b"", mode="ar", messages=messages, max_tokens=count, temperature=0, **settings).text


def test_a_conversation_and_its_commands(router: str, talk: Callable[..., Terminal]) -> None:
    chat = talk("--router", router, "--max-tokens", 6, "--temperature", 0, "--system", "Be brief.")
    assert "mode auto; /help lists the commands" in chat.seen
    chat.type("/help\n")
    chat.expect("/quit      quit")
    chat.type("/stats\n")
    chat.expect("no answer has finished yet")
    chat.type("the sea\n")
    chat.expect("the sea\n")
    chat.expect("> ")
    chat.type("/stats\n")
    cost = chat.expect(" ms of compute")
    assert "[ar-speculative, seed 0, " in cost
    assert " draft tokens accepted, " in cost
    assert " bytes on the wire, " in cost
    chat.type("/mode\n")
    chat.expect("served: ar, ar-speculative")
    chat.type("/mode are\n")
    chat.expect("mode 'are' is not served here (did you mean ar")
    chat.type("/mode ar\n/what now\n")
    chat.expect("unknown command /what now; /help lists")
    chat.type("/reset\n")
    chat.expect("conversation forgotten")
    chat.type("/quit\n")
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


def in_the_answer(talk: Callable[..., Terminal], router: str) -> Terminal:
    chat = talk("--router", router, "--max-tokens", 8000, "--mode", "ar")
    chat.type("the sea\n")
    chat.expect("the sea\n")
    while len(chat.seen) < 200:
        assert chat._read()
    return chat


def test_ctrl_c_ends_the_answer_and_a_second_ctrl_c_the_program(router: str, talk: Callable[..., Terminal]) -> None:
    chat = in_the_answer(talk, router)
    chat.type("\x03")
    chat.expect("(Ctrl-C again, Ctrl-D or /quit quits)")
    chat.expect("> ")
    chat.type("/mode\n")
    chat.expect("served:")
    chat.expect("> ")
    chat.type("\x03")
    chat.expect("(Ctrl-C again")
    chat.expect("> ")  # it listens again
    chat.type("\x03")
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


def test_a_prompt_argument_prints_only_its_answer(router: str, onesweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--router", router, "--max-tokens", 6, "--temperature", 0]
    expected = "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in answer_of(router, ("user", "the sea"))
    )
    assert onesweep("chat", "the sea", *options) == (0, expected + "\n", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the sea")))
    assert onesweep("chat", "-", *options) == (0, expected + "\n", "")


def test_a_model_without_a_chat_template_continues_each_text(local_ring: Any, bundles: Path) -> None:
    with local_ring(bundles / "own", 1) as client:
        options = ["--router", client.address, "--max-tokens", "8", "--temperature", "0", "--mode", "ar"]
        lines = f"The sea\n{'long' * 500}\n/nope\n"
        shown = subprocess.run([*CHAT, *options], input=lines, capture_output=True, text=True, timeout=PATIENCE_S)
        text = client.generate("The sea", mode="ar", max_tokens=8, temperature=0).text
    assert shown.returncode == 1, shown.stderr
    assert "onesweep: unanswered lines: 2, 3\n" in shown.stderr
    assert "this model has no chat template: it continues each text on its own" in shown.stderr
    assert shown.stdout == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) + "\n"
