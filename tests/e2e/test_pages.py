"""The commands of README and of the pages for newcomers run as they stand, from a wheel in a bare environment.

A block of commands is run unless the line before it says `<!-- not run: why -->`. The blocks of a page run in one
folder and one network of their own, in which the addresses of the examples belong to the loopback device.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/deploy.md", "docs/http.md", "docs/pretrained.md", "docs/security.md"]
FENCE = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)
SET_UP = re.compile(r"(git clone|make demo|pip install|\. \.venv/bin/activate)\b")  # the fixture has done it
SERVER = re.compile(r"onesweep (host|stage|router|http|train coordinate)\b|onesweep up\b(?!.*--detach)")
# Processes of their own, too: all end with the shell, so that no server outlives a command that failed.
NETWORK = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--", "bash", "-euc"]
# A reader sees when a server is up; a script waits for its answer.
READY = {
    "router": "for _ in $(seq 300); do onesweep status > status 2>&1 && break; sleep 0.2; done",
    "up": "for _ in $(seq 300); do onesweep status > status 2>&1 && break; sleep 0.2; done",
    "http": "for _ in $(seq 300); do (: < /dev/tcp/127.0.0.1/7780) 2> /dev/null && break; sleep 0.2; done",
}
ADDRESSES = [f"10.8.0.{n}" for n in range(1, 10)]


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    note: str

    @property
    def commands(self) -> list[str]:
        joined = self.body.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(m["language"], m["body"], m["note"] or "") for m in FENCE.finditer(text)]


def script(page: str) -> str:
    """One shell script: servers in the background, each command after what it needs has come up."""
    lines = ["ip link set lo up", *(f"ip address add {address}/32 dev lo" for address in ADDRESSES), "set -x"]
    for block in blocks(page):
        if block.language == "toml" and (name := re.match(r"# ([\w-]+\.toml)", block.body)):
            lines.append(f"cat > {name[1]} <<'END'\n{block.body}END")
        elif block.language == "python":
            lines.append(f"python - <<'END'\n{block.body}END")
        elif block.language == "sh" and not block.note.startswith("not run: "):
            for command in block.commands:
                if server := SERVER.match(command):
                    lines += [f"(\n{command}\n) &", READY.get(server[1] or "up", ":")]
                elif not SET_UP.match(command):
                    lines.append(command)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(900)
def test_the_commands_of_a_page_run_as_they_stand(python: Path, tmp_path: Path, page: str) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a network of its own needs root and unshare")
    shutil.copytree(ROOT / "weights", tmp_path / "weights")
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    process = subprocess.Popen(
        [*NETWORK, script(page)],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=800)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    assert "Traceback" not in said


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why(page: str) -> None:
    for block in blocks(page):
        assert not block.note.startswith("not run") or re.match(r"not run: \S.{8,}", block.note), block
