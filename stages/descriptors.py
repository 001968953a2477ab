"""File descriptors of the process: as many as the machine allows, and few words where they run out."""

import logging
import resource
import time
from collections.abc import Callable

import psutil

# Left to what is no client's connection: links to the router, files, name servers.
RESERVED = 16
SAID_EVERY_S = 60.0
# What libraries say of each connection that they have no room for, or cannot read.
_REPEATED = ("socket.accept() out of system resource", "Exceeded concurrency limit", "Invalid HTTP request received")


class _Seldom(logging.Filter):
    """Lets each of those sentences pass once in SAID_EVERY_S, without its traceback."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock, self.said_at = clock, dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        sentence = next((each for each in _REPEATED if str(record.msg).startswith(each)), None)
        if sentence is None:
            return True
        if (now := self.clock()) - self.said_at.get(sentence, -SAID_EVERY_S) < SAID_EVERY_S:
            return False
        self.said_at[sentence] = now
        record.msg, record.args, record.exc_info = f"{sentence} (said once a minute)", (), None
        return True


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as the machine allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(_Seldom())


def descriptor_limit() -> int:
    """Most files and connections that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_descriptors() -> int:
    """Connections that the limit leaves to clients, beside what is open now and RESERVED."""
    return descriptor_limit() - psutil.Process().num_fds() - RESERVED
