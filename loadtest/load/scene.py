"""Where and how figures came about: what a report says beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loadtest.load.run import LoadSettings
from loadtest.load.target import RouterFacts, Target
from loadtest.machine import Machine


@dataclass(frozen=True)
class Scene:
    """Everything that runs of one command have in common."""

    settings: LoadSettings
    target: Target
    facts: RouterFacts
    machine: Machine
    command: str

    def record(self) -> dict[str, Any]:
        s = self.settings
        return {
            "profile": self.target.profile,
            "router": self.target.router,
            "hosts": self.facts.hosts,
            "request_limit": self.facts.request_limit,
            "max_bytes": s.max_bytes,
            "asked_seconds": s.seconds,
            "warm_up_s": s.warm_up_s,
            "timeout_s": s.timeout_s,
            "distinct_texts": s.cases,
            "first_seed": s.first_seed,
            "command": self.command,
            "machine": asdict(self.machine),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The same for people."""
        s, profile = self.settings, self.target.profile
        return [
            ("command", self.command),
            ("deployment", f"{self.facts.hosts} hosts, profile {profile}, router {self.target.router}"),
            ("requests that the router takes at once", str(self.facts.request_limit)),
            ("bytes a text", str(s.max_bytes)),
            ("window", f"{s.seconds:g} s after {s.warm_up_s:g} s of warm-up"),
            ("deadline of a request", f"{s.timeout_s:g} s"),
            ("distinct texts", f"{s.cases}, seeds from {s.first_seed}"),
            ("machine", self.machine.sentence),
        ]
