"""What the documentation quotes and links to is there."""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.cli.__main__ import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
VARIABLE = re.compile(r"\.\.\.|\[[^]]*\]|\([^)]*\)|'[^']*'|\S*\d\S*|\w+_\w+|\bchain\b")
"""What stands in a quoted message for something else: dots, lists, quoted values, and words with a digit."""
SHORTEST = 6
SERVING = {
    *("stage", "host", "router", "http", "up", "demo", "generate", "compare", "deploy", "status", "doctor", "inspect"),
    *("certs", "token"),
    *("coordinate", "work", "rounds"),
}
"""Commands whose options reference.md lists."""


@cache
def messages() -> tuple[str, ...]:
    """Every text in the code; what is put into it is a NUL."""
    found = set()
    for package in ("stages", "serving"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%[.*]*[rsd]", "\0", node.value))
    return tuple(found)


def quoted() -> Iterator[str]:
    """The sentences that troubleshooting.md begins its entries with."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for heading in re.findall(r"\*\*(`.+?`)\.?\*\*", page, re.DOTALL):
        yield from (" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", heading))


def is_said(quote: str) -> bool:
    """Whether the code has all of it that is not variable; messages stand in messages, so not all in one."""
    runs = [run.strip(" :;,()") for run in VARIABLE.split(quote)]
    long = [run for run in runs if len(run) >= SHORTEST]
    return bool(long) and all(any(run in message for message in messages()) for run in long)


def test_quoted_messages_are_those_of_the_code() -> None:
    quotes = list(quoted())
    assert len(quotes) > 20
    unknown = [quote for quote in quotes if not is_said(quote)]
    assert not unknown, "troubleshooting.md quotes what nobody says:\n" + "\n".join(unknown)


def test_a_message_that_nobody_says_is_caught() -> None:
    assert is_said("host host-2 is not ready: ... did not answer within 5.0 s")
    assert not is_said("the moon at 10.8.0.1:7701 is not reachable")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    def anchors(target: Path) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.name} links to nowhere: {broken}"


# Options


@cache
def options() -> dict[str, dict[str, Any]]:
    """Of every option, the commands that have it, with its default there."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)

    def walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    walk(inner, (*words, name))
            elif words and action.option_strings and not isinstance(action, argparse._HelpAction):
                found[action.option_strings[-1]][" ".join(words)] = action.default

    walk(build_parser(), ())
    return found


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Option, commands and default of each row of the table of options."""
    section = (ROOT / "docs" / "reference.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `--"):
            option, commands, default = (cell.strip() for cell in line.split("|")[1:4])
            yield option.strip("`").split()[0], re.findall(r"`([^`]+)`", commands), default.strip("`")


def test_the_reference_lists_the_options_of_all_that_serves() -> None:
    listed = {(option, command) for option, commands, _ in rows() for command in commands}
    there = {
        (option, command)
        for option, commands in options().items()
        for command in commands
        if command.split()[0] in SERVING
    }
    assert sorted(there - listed) == [], "reference.md does not list them"
    assert sorted(listed - there) == [], "reference.md lists what there is not"


def test_the_reference_knows_their_defaults() -> None:
    for option, commands, shown in rows():
        for command in commands:
            default = options()[option][command]
            if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
                expected = f"{default:g}" if isinstance(default, float) else str(default)
                assert shown in (expected, "a sentence"), f"{option} of {command}"


def test_every_other_option_is_named_somewhere() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    unnamed = [
        f"{option} of {', '.join(commands)}"
        for option, commands in options().items()
        if not re.search(rf"{option}\b(?!-)", pages)
    ]
    assert not unnamed, "no page names them:\n" + "\n".join(unnamed)
