"""Looks after the processes: alive, within bounds, and nothing but refusals in their logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import psutil

from loadtest.fuzz.findings import Tally
from loadtest.fuzz.scene import Scene

RSS_MOST_MB = 1500.0
"""Above what any process may hold: the weights, KV caches up to the limit, and a full queue of the largest messages."""
DESCRIPTORS_MOST = 1200
"""A gateway takes 1,000 connections."""
TROUBLE = re.compile(
    rb"Traceback|Unexpected \[|Exception|Warning: |never retrieved|Segmentation|Fatal|assert", re.IGNORECASE
)
"""In a log: something that nobody expected."""
EXCERPT_BYTES = 3000


@dataclass
class Watch:
    """Of one scene. What it finds is booked for the target whose batch came before."""

    scene: Scene
    rss_mb: dict[str, float] = field(default_factory=dict)
    """The most that was seen, by process."""
    descriptors: dict[str, int] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def look(self, tally: Tally) -> None:
        for name, process in self.scene.processes().items():
            if process is None:
                if name not in self._gone:
                    self._gone.add(name)
                    tally.finding(f"{name} ended: {self._tail(name)}")
                continue
            try:
                rss_mb, descriptors = process.memory_info().rss / 1e6, process.num_fds()
            except psutil.NoSuchProcess:
                continue
            self.rss_mb[name] = max(self.rss_mb.get(name, 0.0), rss_mb)
            self.descriptors[name] = max(self.descriptors.get(name, 0), descriptors)
            if rss_mb > RSS_MOST_MB:
                tally.finding(f"{name} holds over {RSS_MOST_MB:g} MB")
            if descriptors > DESCRIPTORS_MOST:
                tally.finding(f"{name} holds over {DESCRIPTORS_MOST} descriptors")
            self._read_log(name, tally)

    def _read_log(self, name: str, tally: Tally) -> None:
        with self.scene.log(name).open("rb") as log:
            log.seek(self._read.get(name, 0))
            fresh = log.read()
            self._read[name] = log.tell()
        if (found := TROUBLE.search(fresh)) is not None:
            begin = max(fresh.rfind(b"\n", 0, found.start()) - 200, 0)
            excerpt = fresh[begin : begin + EXCERPT_BYTES].decode(errors="replace")
            last = re.findall(r"^\S*(?:Error|Exception|Warning)[:\s].*$", excerpt, re.MULTILINE)
            what = re.sub(r"\d+", "0", last[0] if last else excerpt[:200])
            tally.finding(f"{name} logs: {what[:200]}", excerpt.encode())

    def _tail(self, name: str) -> str:
        return self.scene.log(name).read_text(errors="replace")[-500:]
