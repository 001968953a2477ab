"""A watcher of a run: keeps the last view, and looks again when its coordinator was away."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from pathlib import Path

from loadtest.training.view import View

AGAIN_S = 0.5
"""Between two tries to reach a coordinator."""


class Watch:
    """Runs `onesweep rounds --json` beside the coordinator until it is closed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.last: View | None = None
        self._command, self._log = command, log
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may just be starting another
            if self._process is not None:
                self._process.kill()
            self._thread.join(AGAIN_S)

    def _look(self) -> None:
        while not self._closed.is_set():
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if self._closed.is_set():
                        break
                    with contextlib.suppress(ValueError):  # a line that its end cut off
                        self.last = View.parse(line, time.monotonic())
                process.kill()
            self._closed.wait(AGAIN_S)
