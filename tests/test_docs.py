"""Quotes and links of the documentation are valid."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import reference
from house import parsed

from serving.cli.commands import Command, walk

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
VARIABLE = re.compile(r"\.\.\.|\[[^]]*\]|\([^)]*\)|'[^']*'|\S*\d\S*|\w+_\w+|\bchain\b")
"""Placeholders in a quoted message: dots, lists, quoted values, and words with a digit."""
SHORTEST = 6


@cache
def messages() -> tuple[str, ...]:
    """Every text in the code, with a NUL for each placeholder."""
    found = set()
    for package in ("stages", "serving"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(parsed(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%[.*]*[rsd]", "\0", node.value))
    return tuple(found)


def quoted() -> Iterator[str]:
    """The sentences at the start of the entries in troubleshooting.md."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for heading in re.findall(r"\*\*(`.+?`)\.?\*\*", page, re.DOTALL):
        yield from (" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", heading))


def is_in_code(quote: str) -> bool:
    """True if the code has all of it that is not variable; messages stand in messages, so not all in one."""
    runs = [run.strip(" :;,()") for run in VARIABLE.split(quote)]
    long = [run for run in runs if len(run) >= SHORTEST]
    return bool(long) and all(any(run in message for message in messages()) for run in long)


def test_quoted_messages_are_in_the_code() -> None:
    quotes = list(quoted())
    assert len(quotes) > 20
    unknown = [quote for quote in quotes if not is_in_code(quote)]
    assert not unknown, "troubleshooting.md quotes messages that the code lacks:\n" + "\n".join(unknown)


def test_a_quoted_message_that_the_code_lacks_is_found() -> None:
    assert is_in_code("host host-2 is not ready: ... did not answer within 5.0 s")
    assert not is_in_code("the moon at 10.8.0.1:7701 is not reachable")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
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


# The reference


def test_the_reference_is_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "docs/reference.md is stale: make reference"


def test_the_reference_is_short() -> None:
    assert len(reference.page().split()) <= 6040


def test_every_command_is_in_the_reference() -> None:
    page = reference.page()
    missing = [called for called, node in walk() if isinstance(node, Command) and f"`{' '.join(called)}" not in page]
    assert not missing
