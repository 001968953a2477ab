"""The commands of README and of the pages for newcomers run unchanged, from a wheel in a bare environment.

A block of commands is run unless the line before it is `<!-- not run: why -->`. The blocks of a page run in one
folder and one network of their own, in which the addresses of the examples belong to the loopback device.
"""

import contextlib
import os
import pty
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/deploy.md", "docs/http.md", "docs/pretrained.md", "docs/security.md", "docs/train.md"]
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
SHOWN_S = 0.5  # shorter commands are not worth a line
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
    lines = [
        "exec < /dev/null",
        "ip link set lo up",
        *(f"ip address add {address}/32 dev lo" for address in ADDRESSES),
        "set -x",
    ]
    for block in blocks(page):
        if block.language == "toml" and (name := re.match(r"# ([\w-]+\.toml)", block.body)):
            lines.append(f"cat > {name[1]} <<'END'\n{block.body}END")
        elif block.language == "python":
            lines.append(f"python - <<'END'\n{block.body}END")
        elif block.language == "sh" and not block.note.startswith("not run: "):
            for command in block.commands:
                if server := SERVER.match(command):
                    lines += [f"(\n{command}\n) &", "set +x", READY.get(server[1] or "up", ":"), "set -x"]
                elif not SET_UP.match(command):
                    lines.append(command)
    return "\n".join(lines)


def seen(
    command: list[str], folder: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and output on a terminal; prints of each command the seconds, and the longest ones without a sign."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**environment, "TERM": "xterm"})
    so_far, shown, last = "", [("", time.monotonic(), (0.0, ""))], time.monotonic()
    try:
        with contextlib.suppress(OSError):  # Linux reports so that the other end is closed
            while raw := os.read(terminal, 1 << 16):
                now, text = time.monotonic(), raw.decode(errors="replace")
                name, begin, gap = shown[-1]
                shown[-1], last, so_far = (name, begin, max(gap, (now - last, so_far[-60:]))), now, so_far + text
                shown += [(name, now, (0.0, "")) for name in re.findall(r"^\++ (.*?)\r?$", text, re.MULTILINE)]
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.close(terminal)
    ends = [begin for _, begin, _ in shown[1:]] + [last]
    with capsys.disabled():
        print("\nseconds, longest silence, command")
        for (name, begin, gap), end in zip(shown, ends, strict=True):
            if end - begin >= SHOWN_S:
                print(f"{end - begin:7.1f} {gap[0]:7.1f} {name[:100]}\n{'':15} after {gap[1]!r}")
    return code, so_far


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(900)
def test_the_commands_of_a_page_run(
    python: Path, tmp_path: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a network of its own needs root and unshare")
    shutil.copytree(ROOT / "weights", tmp_path / "weights")
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    code, printed = seen([*NETWORK, script(page)], tmp_path, environment, capsys)
    assert code == 0, printed[-4000:]
    assert "Traceback" not in printed


@pytest.mark.timeout(1800)
def test_a_fresh_clone_runs_the_demo_on_debian(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the system's Python, whose own packages pip may not touch (PEP 668)."""
    if not any(Path("/usr/lib").glob("python3.*/EXTERNALLY-MANAGED")):
        pytest.skip("no python of a distribution that manages its packages itself")
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    environment = {**pip, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    commands = f"set -x\ngit clone -q {ROOT} onesweep\ncd onesweep\nmake demo"
    code, printed = seen(["bash", "-euc", commands], tmp_path, environment, capsys)
    assert code == 0, printed[-4000:]
    assert "`ar-speculative` writes the text of `ar`: checked" in printed


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_gives_a_reason(page: str) -> None:
    for block in blocks(page):
        assert not block.note.startswith("not run") or re.match(r"not run: \S.{8,}", block.note), block
