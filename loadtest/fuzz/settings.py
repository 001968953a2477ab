"""What `onesweep fuzz` is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.errors import InputError

WIRE = ("stage", "router", "answers", "answered", "http", "training")
"""Targets that are reached over sockets."""
INSIDE = ("admission", "host", "files")
"""Targets in this process."""
TARGETS = (*WIRE, *INSIDE)
MOST_INPUTS = 10_000_000
MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class FuzzSettings:
    """Checked when made. Raises InputError."""

    inputs: int = 2000
    """Over all targets; each gets its share."""
    seconds: float = 600.0
    """The run ends then, whatever was sent."""
    seed: int = 0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if not 1 <= self.inputs <= MOST_INPUTS:
            raise InputError(f"--inputs must be 1 to {MOST_INPUTS}, not {self.inputs}")
        if not 0 < self.seconds <= MOST_SECONDS:
            raise InputError(f"--seconds must be above 0 and at most {MOST_SECONDS:g}, not {self.seconds:g}")
        if not 0 <= self.seed < 1 << 32:
            raise InputError(f"--seed must be from 0 to {(1 << 32) - 1}, not {self.seed}")
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"there is no target {target!r}; choose from {', '.join(TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise InputError(f"--targets {','.join(self.targets)} names one twice")


def parse_targets(text: str | None) -> Sequence[str]:
    """Names of "stage,http"; all of them where nothing is given."""
    return TARGETS if text is None else text.split(",")
