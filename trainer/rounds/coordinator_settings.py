"""How a coordinator runs, whatever it is that is trained."""

from __future__ import annotations

from dataclasses import dataclass

from stages.errors import InputError


@dataclass(frozen=True)
class CoordinatorSettings:
    """What `onesweep coordinate` is told beside the settings of the run."""

    lease_s: float = 30.0
    """How long a worker may be silent before its place can go to another."""
    publish_every: int = 10
    """Rounds between two checkpoints; the last round is always published."""
    own_data: bool = False
    """Whether workers may bring other text than the coordinator's."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.lease_s <= 86400:
            raise InputError(f"--lease must be from 0.5 to 86400 seconds, not {self.lease_s:g}")
        if not 1 <= self.publish_every <= 2**31:
            raise InputError(f"--publish-every must be at least 1 round, not {self.publish_every}")
