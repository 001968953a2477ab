"""Hosts that were found faulty: they get no work for a while, and whom they passed work to forgets it.

It is kept in a file where there is one, so that a router that is restarted knows them, too.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.checkpoint.checkpoint import replace_file
from stages.errors import OnesweepError
from stages.host.prefixes import MOST_FAULTY

log = logging.getLogger(__name__)

MOST_HOURS = 32.0
FINDINGS_NAME = "faulty_hosts.json"


@dataclass(frozen=True)
class Finding:
    """A fault that was found of one host."""

    reason: str
    until: float  # no work before, Unix time
    times: int  # that it was found faulty
    instances: tuple[str, ...]  # of its processes, the latest last


class Quarantine:
    """Findings by the names of hosts: one that registers anew, or whose router does, gets no work either."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """:param path: where they are kept; None: nowhere.
        :param clock: by which `of` says until when, seconds."""
        self._path, self._clock = path, clock
        self._findings = _read(path) if path is not None and path.exists() else {}

    def add(self, name: str, reason: str, instance: str) -> float:
        """Book a finding; returns the hours without work. The first costs one, each further one twice as many.

        A passing fault, or a tie that machines of two kinds break differently, costs an hour; a liar gets no work."""
        before = self._findings.get(name)
        times = before.times if before else 0
        hours = min(2.0**times, MOST_HOURS)
        instances = [each for each in (*(before.instances if before else ()), instance) if each]
        said = f"{reason}; look at its machine and weights; it gets no work for {hours:.0f} h"
        kept = tuple(dict.fromkeys(instances))[-MOST_FAULTY:]
        self._findings[name] = Finding(said, time.time() + hours * 3600, times + 1, kept)
        self._write()
        return hours

    def of(self, name: str) -> tuple[str, float]:
        """The finding about a host, and until when it gets no work, by the clock; an empty text where nothing was."""
        if (found := self._findings.get(name)) is None:
            return "", 0.0
        return found.reason, self._clock() + found.until - time.time()

    @property
    def instances(self) -> list[str]:
        """Processes of all faulty hosts, the latest last: hosts keep nothing that passed them."""
        return [each for found in self._findings.values() for each in found.instances][-MOST_FAULTY:]

    def _write(self) -> None:
        if self._path is None:
            return
        text = json.dumps({name: asdict(found) for name, found in self._findings.items()}, indent=2)
        try:
            replace_file(self._path, lambda path: path.write_text(text, encoding="utf-8"))
        except OnesweepError as error:
            log.warning("what was found of faulty hosts is lost with this process: %s", error)


def _read(path: Path) -> dict[str, Finding]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Finding(str(each["reason"]), float(each["until"]), int(each["times"]), tuple(each["instances"]))
            for name, each in told.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read, and is written anew: %s", path, error)
        return {}
