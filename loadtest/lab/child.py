"""A process that its parent speaks with: JSON messages, one a line, on its standard input and output."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import IO, Any


class Child:
    """The parent's end."""

    def __init__(
        self, command: list[str], first: object, words: IO[Any] | None = None, directory: str | None = None
    ) -> None:
        """:param first: message for it. :param words: file of what it says on its standard error; None for our own."""
        # a session of its own: Ctrl-C is for the parent, which then ends it
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
            cwd=directory,
        )
        self.send(first)

    def send(self, message: object) -> None:
        """Nothing where it has ended: what it says, or does not say, tells more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Its messages, until it closes its output."""
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, "")

    def stop(self) -> None:
        """Close its input: it ends when it is done."""
        stdin, self.process.stdin = self.process.stdin, None
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def end(self, within_s: float) -> None:
        """Stop it, and kill it where it is not done in so much time."""
        self.stop()
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=within_s)
        self.process.kill()  # does nothing to one that has ended
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
