"""A file system for one directory that can be full when it is wanted: a tmpfs that nobody else sees.

It is mounted in a mount namespace of its own, which a process holds that ends with this one: however this one ends,
nothing stays mounted. From outside its files lie under that process's root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from stages.errors import ServiceError

NEEDED = ("unshare", "nsenter", "mount")
ROOM = "50%"
"""Of the machine's memory, as a tmpfs has by default: a limit takes none."""
HOLD = f'mount -t tmpfs -o size={ROOM},mode=755 onesweep "$1" && echo mounted && exec cat'
FIRST = "first-page"
"""A file that is always there, for a size of nothing would mean no limit."""
FULL_S, AGAIN_S = 10.0, 0.01
"""How long whoever writes may be quicker than the disk is filled, and between two tries."""


class Disk:
    """A mounted one. `fill` takes all room that is left, by making the file system as large as its files."""

    def __init__(self, mounted: Path, holder: int) -> None:
        """:param mounted: as those in the namespace call it; :param holder: id of a process in there."""
        self.path = Path(f"/proc/{holder}/root{mounted}")
        self._mounted, self._namespace = mounted, f"/proc/{holder}/ns/mnt"

    @property
    def room_bytes(self) -> int:
        room = os.statvfs(self.path)
        return room.f_bfree * room.f_frsize

    def fill(self) -> None:
        """Nothing can be written from now on, until something is removed. Raises ServiceError."""
        deadline = time.monotonic() + FULL_S
        while self.room_bytes:
            room = os.statvfs(self.path)
            said = self._resize(str((room.f_blocks - room.f_bfree) * room.f_frsize))
            if said and time.monotonic() > deadline:
                raise ServiceError(f"the disk at {self._mounted} cannot be filled: {said}")
            if said:  # it has just grown
                time.sleep(AGAIN_S)

    def free(self) -> None:
        """Give back what was taken. Raises ServiceError."""
        if said := self._resize(ROOM):
            raise ServiceError(f"the disk at {self._mounted} cannot be given room: {said}")

    def _resize(self, size: str) -> str:
        """What mount has to say, empty where it was done."""
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
                (disk.path / FIRST).write_bytes(b"1")
            yield disk if usable else None
        finally:
            holder.kill()
