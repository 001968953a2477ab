"""Processes that faults are done to."""

import resource
import signal
import subprocess
from pathlib import Path

LAST_LINES = 3


class Program:
    """A command that runs as one process at a time: started, ended in one way or another, and started again."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.command, self.log = name, command, log
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def ended(self) -> int | None:
        """The exit code of the last process, below 0 for a signal; None while it runs, or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, unless it runs. In a lab it ends with the thread that calls this."""
        if self.pid is not None:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.starts += 1

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)  # does nothing to one that has ended

    def limit_files(self, size: int | None) -> None:
        """Let it write no file beyond `size` bytes from now on, as a full disk would; None takes that back."""
        if (pid := self.pid) is not None:
            most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))

    def kill(self) -> None:
        """End it at once, as a power cut would; it has ended when this returns."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " ".join(lines[-LAST_LINES:]) or "its log is empty"
