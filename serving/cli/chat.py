"""A conversation in the terminal: `onesweep chat` uses a running router, `onesweep run` starts its own."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from serving.cli.generate import add_router_options, add_wait, async_client_of, check_request, cost_lines, wait_ready
from serving.cli.parser import prompt_of
from serving.client.result import Result, unready_words
from serving.modes import PICTURES_SERVED
from serving.router.request import MAX_TIMEOUT_S
from stages.errors import InputError, OnesweepError, one_of, printable
from stages.settings import add_flags, from_flags, setting
from stages.signals import Terminated, ends_cleanly, run_interruptible

if TYPE_CHECKING:
    from serving.client.client import AsyncClient
    from serving.v1 import router_pb2

# A command imports modules that need gRPC only when it runs.

# The first served mode of these is used; exact modes come before quick ones.
PREFERRED = ("auto", "ar-speculative", "ar", "chunked", "sweep")
MAX_TOKENS = 512
PROMPT = "> "
HELP = """\
/mode [M]  mode of the next answers; without M, list the served modes
/stats     cost of the last answer
/reset     forget the conversation
/quit      quit, like Ctrl-D; Ctrl-C stops an answer"""


def tell(note: object = "") -> None:
    """Print a note on standard error, because standard output carries only answers."""
    print(note, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ChatSettings:
    """Settings of every answer; the router chooses those that are None."""

    system: str = setting("", "instructions before the conversation", metavar="TEXT")
    mode: str | None = setting(None, "mode of the answers", shown="the best one served", metavar="M")
    max_tokens: int | None = setting(None, "tokens per answer", shown=f"{MAX_TOKENS}, or half the context", minimum=1)
    temperature: float | None = setting(None, "0 = greedy", shown="the model's, else 0.8", metavar="T")
    seed: int = setting(0, "another seed gives other answers", metavar="S")

    @property
    def request(self) -> dict[str, Any]:
        """The request fields that these settings fix."""
        return {name: value for name, value in vars(self).items() if name != "system"}


def add_chat(chat: argparse.ArgumentParser) -> None:
    add_chat_options(chat)
    add_router_options(chat)
    add_wait(chat)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    about = "answer it and exit; - reads standard input (starts a conversation)"
    parser.add_argument("prompt", nargs="?", type=prompt_of, metavar="PROMPT", help=about)
    add_flags(parser, ChatSettings)


def given_prompt(options: argparse.Namespace) -> str | None:
    """The prompt for a single answer; None for a conversation. Raises InputError."""
    prompt: str | None = options.prompt
    if prompt is not None and not prompt.strip():
        raise InputError("the prompt is empty: give some text")
    return prompt


def run_chat(options: argparse.Namespace) -> int:
    settings, prompt = from_flags(ChatSettings, options), given_prompt(options)
    check_request(**settings.request)
    with ends_cleanly():
        wait_ready(options, settings.mode)
        return talk(partial(async_client_of, options), settings, prompt)


def talk(
    open_client: Callable[[], AsyncClient],
    settings: ChatSettings,
    prompt: str | None,
    failed: Callable[[], object] = lambda: None,
) -> int:
    """Answer one prompt, or hold a conversation; returns the exit code. Raises OnesweepError.

    :param open_client: called inside a running event loop.
    :param failed: called after a failure; raises if no further answer can come.
    """
    chat = Chat.begin(open_client, settings)
    if prompt is not None:
        chat.answer(prompt)
    else:
        Conversation(chat, failed).hold()
    return 0


@dataclass
class Chat:
    """A conversation with a router so far, and the settings of the next answer."""

    open_client: Callable[[], AsyncClient]
    settings: ChatSettings
    mode: str
    modes: Sequence[str]  # served modes
    has_template: bool
    # (role, content), answers included; stays empty without a chat template.
    messages: list[tuple[str, str]] = field(default_factory=list)
    last: Result | None = None

    @classmethod
    def begin(cls, open_client: Callable[[], AsyncClient], settings: ChatSettings) -> Chat:
        """Ask the router what it serves. Raises OnesweepError."""

        async def status() -> router_pb2.StatusResponse:
            async with open_client() as client:
                return await client.status()

        found = run_interruptible(status())
        modes = list(found.modes)
        if found.HasField("pictures"):
            raise InputError(f"no model to chat with: {PICTURES_SERVED}")
        if not modes:
            why = unready_words(found) or "it has no weights"
            raise InputError(f"the router serves no mode that can answer: {why}")
        if settings.max_tokens is None:
            settings = replace(settings, max_tokens=max(1, min(MAX_TOKENS, found.context_tokens // 2)))
        chat = cls(open_client, settings, "", modes, found.chat)
        chat.take_mode(settings.mode or next((mode for mode in PREFERRED if mode in modes), modes[0]))
        chat.reset()
        return chat

    def take_mode(self, mode: str) -> None:
        """Switch the mode. Raises InputError for one that is not served."""
        if mode not in self.modes:
            raise InputError(f"mode {mode!r} is not served here{one_of(mode, self.modes)}")
        self.mode = mode

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [("system", self.settings.system)] if self.settings.system and self.has_template else []

    def answer(self, text: str) -> None:
        """Print the answer to `text` as it arrives, and remember both. Raises KeyboardInterrupt or OnesweepError."""
        written: list[str] = []
        messages = [*self.messages, ("user", text)]
        try:
            self.last = None
            self.last = run_interruptible(self._stream(text, messages, written))
        finally:
            if written:
                print(flush=True)
            answer = "".join(written)
            # of an interrupted answer, the model remembers the part that the reader saw
            if self.has_template and answer:
                self.messages = [*messages, ("assistant", answer)]

    async def _stream(self, text: str, messages: Sequence[tuple[str, str]], written: list[str]) -> Result | None:
        from serving.client.client import TextDecoder

        s = self.settings
        asked: dict[str, Any] = {"messages": messages} if self.has_template else {"prompt": s.system + text}
        # The longest deadline there is: a person who waits too long presses Ctrl-C.
        asked |= s.request | {"mode": self.mode}
        decoder, result = TextDecoder(), None

        def show(piece: str) -> None:
            if piece:
                written.append(piece)
                # a tab is as harmless as a space, so it stays
                print("\t".join(printable(part, newline="\n") for part in piece.split("\t")), end="", flush=True)

        async with (
            self.open_client() as client,
            aclosing(client.events(**{"prompt": b"", **asked}, timeout_s=MAX_TIMEOUT_S)) as events,
        ):
            async for event in events:
                if isinstance(event, Result):
                    result = event
                elif isinstance(event, bytes):
                    show(decoder.feed(event))
        show(decoder.end())
        return result


class Conversation:
    """Reads a person's lines, and answers each or runs it as a command."""

    def __init__(self, chat: Chat, failed: Callable[[], object]) -> None:
        self.chat, self._failed = chat, failed
        self._has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._unanswered = list[str]()  # numbers of unanswered lines and of unknown commands

    def hold(self) -> None:
        """Return when the person leaves. Raises OnesweepError when no further answer can come, and at the end of a
        pipe if a line had no answer."""
        chat = self.chat
        if self._has_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited, and called back
        tell(f"mode {chat.mode}; /help lists the commands, Ctrl-D quits")
        if not chat.has_template:
            tell("this model has no chat template: it continues each text on its own, without the earlier ones")
        warned = False
        for number in itertools.count(1):
            try:
                line = input(PROMPT if self._has_terminal else "").strip()
                warned = False
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._command(line, number)
                elif line:
                    self._answer(line, number)
            except EOFError:
                if self._has_terminal:
                    tell()
                elif self._unanswered:  # a script sees only the exit code
                    raise OnesweepError(f"unanswered lines: {', '.join(self._unanswered)}") from None
                return
            except Terminated:  # before its base class: only Ctrl-C lets the conversation continue
                raise
            except UnicodeDecodeError:
                tell("that line is not UTF-8: check the terminal's encoding")
            except KeyboardInterrupt:
                tell()
                if warned:
                    return
                warned = True
                tell("(Ctrl-C again, Ctrl-D or /quit quits)")

    def _answer(self, line: str, number: int) -> None:
        from serving.client.client import RequestRefused

        try:
            self.chat.answer(line)
        except OnesweepError as error:
            self._unanswered.append(str(number))
            is_refused = isinstance(error, RequestRefused)
            tell(f"{error}{'; /reset forgets the conversation' if is_refused and self.chat.messages else ''}")
            if not is_refused:
                self._failed()

    def _command(self, line: str, number: int) -> None:
        chat = self.chat
        try:
            match line[1:].split():
                case ["help"]:
                    tell(HELP)
                case ["mode"]:
                    tell(f"mode {chat.mode}; served: {', '.join(chat.modes)}")
                case ["mode", mode]:
                    chat.take_mode(mode)
                case ["stats"]:
                    tell("\n".join(cost_lines(chat.last)) if chat.last else "no answer has finished yet")
                case ["reset"]:
                    chat.reset()
                    tell("conversation forgotten")
                case _:
                    raise InputError(f"unknown command {line}; /help lists the commands")
        except InputError as error:
            self._unanswered.append(str(number))
            tell(error)
