"""The files of deploy/, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
VALUES = {"%i": "paris", "%d": "/run/credentials", "%S": "/var/lib", "$(POD_NAME)": "stage-a-0"}
"""Values that systemd and Kubernetes put into commands."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def of_systemd() -> Iterator[tuple[str, list[str]]]:
    environments = {"onesweep-stage@": "stage-paris"}
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        name = environments.get(path.stem, path.stem.removeprefix("onesweep-"))
        unit, lines = path.read_text(), (DEPLOY / "systemd" / f"{name}.env").read_text().splitlines()
        settings = dict(setting.split("=", 1) for setting in re.findall(r'^Environment="(.*)"$', unit, re.MULTILINE))
        settings |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)", unit, re.MULTILINE)
        for key, value in settings.items():
            command = command.replace(f"${{{key}}}", value).replace(f"${key}", value.strip('"'))
        assert "$" not in command, f"{path.name} uses what {name}.env does not set: {command}"
        yield path.name, shlex.split(command.replace("\\\n", " "))[1:]


def of_compose() -> Iterator[tuple[str, list[str]]]:
    (compose,) = documents(DEPLOY / "compose.yml")
    for name, service in compose["services"].items():
        yield f"compose.yml, {name}", service["command"]


def of_kubernetes() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                yield f"{path.name}, {document['metadata']['name']}", container["args"]


def of_docs() -> Iterator[tuple[str, list[str]]]:
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for command in re.findall(r"(?:^|&& )(?:sudo )?(?:\S+/)?onesweep (.*)", block.replace("\\\n", " "), re.M):
                words = shlex.split(command.partition(" && ")[0], comments=True)
                words = list(takewhile(lambda word: word != ">", words))  # the shell takes the rest
                if not any(word.startswith(("[", "...")) for word in words):
                    yield f"{page.name}, onesweep {command}", words


def filled(words: list[str]) -> list[str]:
    for placeholder, value in VALUES.items():
        words = [word.replace(placeholder, value) for word in words]
    return words


@pytest.fixture(scope="session")
def commands() -> list[tuple[str, list[str]]]:
    """Every `onesweep` command in deploy/, docs/ and the README: where it stands, and its words."""
    sources = (of_systemd, of_compose, of_kubernetes, of_docs)
    return [(where, filled(words)) for source in sources for where, words in source()]


@pytest.fixture(scope="session")
def deploy() -> Path:
    return DEPLOY
