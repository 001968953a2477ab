"""The clients' process as the parent sees it: started beside the router, read as it tells, ended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from loadtest.chaos.answer import Answer, Health, from_line
from loadtest.chaos.crowd import SETTLE_S, Order
from stages.errors import ServiceError

COMMAND = [sys.executable, "-P", "-m", "loadtest.chaos.crowd"]
GRACE_S = SETTLE_S + 10.0
"""How long the process may take beyond its requests' patience."""

Beside = Callable[[list[str]], list[str]]
"""Turns a command into one that runs where the router does."""


class Clients:
    """A running process of clients."""

    def __init__(self, order: Order, beside: Beside) -> None:
        self.order = order
        self.answers: list[Answer] = []
        self.health: list[Health] = []
        self._process = subprocess.Popen(
            beside(COMMAND), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end says more
            self._process.stdin.write(order.to_json() + "\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def sound_since(self, moment_s: float) -> bool:
        """Whether the router's last word, from after that moment, is that every host and link can be used."""
        return bool(self.health) and self.health[-1].at_s > moment_s and not self.health[-1].problems

    def check_alive(self) -> None:
        """Raises ServiceError when the process has ended."""
        if self._process.poll() is not None:
            raise ServiceError(f"the clients' process ended with exit code {self._process.returncode}")

    def stop(self) -> None:
        """Begin no more requests."""
        stdin, self._process.stdin = self._process.stdin, None
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def wait(self) -> None:
        """Until what is under way has ended. Raises ServiceError when the process failed."""
        try:
            code = self._process.wait(self.order.turns * self.order.patience_s + GRACE_S)
        except subprocess.TimeoutExpired:
            raise ServiceError("the clients did not end: their requests are past every deadline") from None
        self._reader.join(GRACE_S)
        if code:
            raise ServiceError(f"the clients' process ended with exit code {code}; its words are above")

    def close(self) -> None:
        self.stop()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(GRACE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            message = from_line(line)
            if isinstance(message, Answer):
                self.answers.append(message)
            else:
                self.health.append(message)


@contextlib.contextmanager
def open_clients(order: Order, beside: Beside) -> Iterator[Clients]:
    """Clients for the length of a `with` block."""
    clients = Clients(order, beside)
    try:
        yield clients
    finally:
        clients.close()
