"""A command on a terminal of its own, as a person has it."""

import os
import pty
import re
import select
import subprocess
import sys
import time

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
LIMIT_S = 60.0


class Terminal:
    """A process whose standard streams are a terminal that it controls."""

    def __init__(self, *arguments: object) -> None:
        # not by pty.fork: of a process with other threads it may crash before its exec
        command = ["setsid", "--ctty", sys.executable, "-P", "-m", "serving.cli", *map(str, arguments)]
        self._handle, own = pty.openpty()
        self.process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, env={**os.environ, "TERM": "xterm"})
        os.close(own)
        self.seen = ""
        self._end = 0  # of the text that was awaited

    def expect(self, text: str) -> str:
        """Wait until `text` is shown; returns all since what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen[self._end :]:
            assert time.monotonic() < deadline, self.seen
            assert self._read(), f"it ended: {self.seen}"
        begin, self._end = self._end, self.seen.index(text, self._end) + len(text)
        return self.seen[begin : self._end]

    def type(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        while self._read():
            pass
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._handle)

    def _read(self) -> bool:
        """Take in what comes; False once it has ended."""
        select.select([self._handle], [], [], LIMIT_S)
        try:
            raw = os.read(self._handle, 65536)
        except OSError:  # Linux reports so that the other end is closed
            return False
        self.seen += CODES.sub("", raw.decode(errors="replace"))
        return bool(raw)
