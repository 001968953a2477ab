"""Processes and disks that faults are done to, and commands of onesweep that are run to their end."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from serving.cli.deployment import MODULE
from stages.errors import InputError, OnesweepError, ServiceError

STOP_S = 30.0
LAST_LINES = 3

NEEDED = ("unshare", "nsenter", "mount")
ROOM = "50%"  # of the machine's memory, as a tmpfs has by default: a limit takes none
HOLD = f'mount -t tmpfs -o size={ROOM},mode=755 onesweep "$1" && echo mounted && exec cat'
FIRST_FILE = "first-page"  # a file that is always there, for a size of nothing would mean no limit
FULL_S, AGAIN_S = 10.0, 0.01  # how long a writer may be quicker than the disk is filled, and between two tries


def answer_of(arguments: Sequence[str], within_s: float) -> dict[str, Any]:
    """The answer of a command with `--json`. Raises InputError or OnesweepError with its last words."""
    command = [sys.executable, *MODULE, *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        name = " ".join(takewhile(lambda word: not word.startswith("-"), arguments))
        raise OnesweepError(f"`onesweep {name}` has not ended after {within_s:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("onesweep: ")
        raise (InputError if done.returncode == InputError.exit_code else OnesweepError)(words)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


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

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

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

    def stop(self, within_s: float = STOP_S) -> None:
        """Ask it to end, and kill it when it does not."""
        self.thaw()
        self.signal(signal.SIGTERM)
        try:
            self.wait(within_s)
        except ServiceError:
            self.kill()

    def wait(self, within_s: float) -> int | None:
        """Its exit code, when it has ended. Raises ServiceError when it does not."""
        if self._process is None:
            return None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise ServiceError(f"{self.name} has not ended after {within_s:.0f} s") from None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " ".join(lines[-LAST_LINES:]) or "its log is empty"


class Disk:
    """A file system for one directory that can be full when it is wanted: a tmpfs that no other process sees."""

    def __init__(self, mounted: Path, holder: int) -> None:
        """:param mounted: as processes of its namespace call it; :param holder: id of a process in there."""
        self.path = Path(f"/proc/{holder}/root{mounted}")
        self._mounted, self._namespace = mounted, f"/proc/{holder}/ns/mnt"

    @property
    def room_bytes(self) -> int:
        room = os.statvfs(self.path)
        return room.f_bfree * room.f_frsize

    def fill(self) -> None:
        """Let nothing be written from now on, until something is removed. Raises ServiceError."""
        # the file system becomes as large as its files: quicker than writing, and it takes no memory
        deadline = time.monotonic() + FULL_S
        while self.room_bytes:
            room = os.statvfs(self.path)
            said = self._resize(str((room.f_blocks - room.f_bfree) * room.f_frsize))
            if said and time.monotonic() > deadline:
                raise ServiceError(f"the disk at {self._mounted} cannot be filled: {said}")
            if said:  # it has just grown
                time.sleep(AGAIN_S)

    def free(self) -> None:
        """Give back the room that `fill` took. Raises ServiceError."""
        if said := self._resize(ROOM):
            raise ServiceError(f"the disk at {self._mounted} cannot be given room: {said}")

    def _resize(self, size: str) -> str:
        """The words of mount; empty where it was done."""
        remount = ["mount", "-o", f"remount,size={size}", str(self._mounted)]
        command = ["nsenter", f"--mount={self._namespace}", "--", *remount]
        done = subprocess.run(command, capture_output=True, text=True)
        return " ".join(done.stderr.split()) or f"mount ended with {done.returncode}" if done.returncode else ""


@contextlib.contextmanager
def open_disk(directory: Path) -> Iterator[Disk | None]:
    """A disk at an empty directory, which is made; None where this process may not mount one."""
    directory.mkdir()
    if any(shutil.which(program) is None for program in NEEDED):
        yield None
        return
    # it is mounted in a namespace that only this process holds: however this one ends, nothing stays mounted
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", HOLD, "sh", str(directory)],
        stdin=subprocess.PIPE,  # closed when this process ends: then so does `cat`
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with holder:
        assert holder.stdout is not None
        mounted = bool(holder.stdout.readline())
        disk = Disk(directory, holder.pid)
        try:
            if usable := mounted and disk.path.is_dir():
                (disk.path / FIRST_FILE).write_bytes(b"1")
            yield disk if usable else None
        finally:
            holder.kill()
