"""Processes that work for one command, and end with it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from stages.errors import OnesweepError, ServiceError

PRELOADED = ["trainer.rounds.engine.network", "trainer.rounds.engine.replica", "torch._dynamo"]
"""The last takes seconds, and every process would import it with its first optimizer."""
END_S = 30.0
"""How long a process may take to end after it said its last word."""

Tell = Callable[[Any], None]


class Crew:
    """Each process runs one function, which tells things; a failure of any ends them all.

    They are forked from a server that has imported torch once, and nothing else has happened in it.
    """

    def __init__(self, size: int) -> None:
        """:param size: processes that will compute at the same time; they share this one's threads."""
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.threads = max(torch.get_num_threads() // size, 1)
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[Connection, str] = {}
        self._ends_by: dict[str, float] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def start(self, name: str, job: Callable[..., object], *arguments: object) -> None:
        """`job(tell, *arguments)` in a process of its own; whatever is told must be small, or a path."""
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_run, args=(theirs, self.threads, job, arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes[name], self._pipes[ours] = process, name

    def dismiss(self, names: Collection[str], within_s: float) -> None:
        """These may end now, and are ended after so many seconds: what they do is not needed any more."""
        for name in names:
            self._ends_by[name] = time.monotonic() + within_s

    def told(self) -> Iterator[tuple[str, Any]]:
        """Who tells what, until all have ended. Raises ServiceError when one fails that was not dismissed."""
        while self._pipes:
            left = [end - time.monotonic() for name, end in self._ends_by.items() if name in self._pipes.values()]
            for pipe in wait(list(self._pipes), max(min(left), 0.0) if left else None):
                assert isinstance(pipe, Connection)
                name = self._pipes[pipe]
                try:
                    word = pipe.recv()
                except EOFError:
                    self._ended(pipe, name)
                    continue
                if isinstance(word, _Failure):
                    if name not in self._ends_by:
                        raise ServiceError(f"{name}: {word.sentence}")
                    continue
                yield name, word
            for name, end in self._ends_by.items():
                if end <= time.monotonic():
                    self._processes[name].terminate()

    def _ended(self, pipe: Connection, name: str) -> None:
        del self._pipes[pipe]
        pipe.close()
        process = self._processes[name]
        process.join(END_S)
        if process.exitcode != 0 and name not in self._ends_by:
            raise ServiceError(f"the process of {name} ended with code {process.exitcode}; what it wrote is above")


class _Failure:
    def __init__(self, sentence: str) -> None:
        self.sentence = sentence


def _run(pipe: Connection, threads: int, job: Callable[..., object], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; who started us ends us
    torch.set_num_threads(threads)
    try:
        job(pipe.send, *arguments)
    except OnesweepError as error:
        pipe.send(_Failure(str(error)))
