"""What a run of `chaos` or `soak` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from loadtest.chaos.cases import SETTINGS
from loadtest.chaos.faults import FAULTS, Garbage
from loadtest.load.target import LOOPBACK
from stages.errors import InputError, ServiceError
from stages.parts import plan_host

FAULTS_A_MINUTE = 2.4
MOST_MINUTES = 7 * 24 * 60.0
MOST_AT_ONCE = 1000
MOST_SEED = 1 << 32


@dataclass(frozen=True)
class ChaosSettings:
    """A deployment, a load, and what happens to them."""

    checkpoint: Path
    profile: str
    minutes: float
    at_once: int
    seed: int
    patience_s: float
    """How long a client tries to get a text."""
    kinds: tuple[str, ...]
    """Faults, by name; none for `soak`."""
    count: int | None = None
    """Faults; None: 2.4 a minute, and each kind once at least."""
    modes: tuple[str, ...] = tuple(SETTINGS)
    profiles: Path | None = None
    """File with more profiles than those that ship."""
    audit: float = 0.0
    """Share of sweeps that the router has computed again."""

    @property
    def seconds(self) -> float:
        return self.minutes * 60

    @property
    def unable(self) -> list[str]:
        """Kinds that cannot be done here."""
        return [name for name in self.kinds if self.absence(name)]

    def absence(self, name: str) -> str:
        """Why a kind cannot be done here; empty when it can."""
        if self.audit and name == Garbage.name:
            return "a host that an audit caught gets no more work: --audit leaves it out"
        return FAULTS[name].absent(self.profile, self.checkpoint)

    @property
    def able(self) -> list[str]:
        """The others."""
        return [name for name in self.kinds if name not in self.unable]

    @property
    def fault_count(self) -> int:
        if self.count is not None or not self.able:
            return self.count or 0
        return max(len(self.able), round(self.minutes * FAULTS_A_MINUTE))


def check_settings(settings: ChaosSettings) -> None:
    """Everything that can be refused before anything is started. Raises OnesweepError."""
    for flag, number, most in (
        ("--minutes", settings.minutes, MOST_MINUTES),
        ("--patience-s", settings.patience_s, 3600.0),
        ("--requests-at-once", settings.at_once, MOST_AT_ONCE),
        ("--count", settings.count, 10_000),
    ):
        if number is not None and not (math.isfinite(number) and 0 < number <= most):
            raise InputError(f"{flag} must be above 0 and at most {most:g}, not {number:g}")
    if not 0 <= settings.audit <= 1:
        raise InputError(f"--audit must be from 0 to 1, not {settings.audit}")
    if not 0 <= settings.seed < MOST_SEED:
        raise InputError(f"--seed must be from 0 to {MOST_SEED - 1}, not {settings.seed}")
    plan_host(settings.checkpoint, (0,))
    _check_names("--faults", settings.kinds, tuple(FAULTS))
    _check_names("--modes", settings.modes, tuple(SETTINGS))
    if settings.kinds and not settings.able:
        raise InputError("; ".join(settings.absence(name) for name in settings.unable))
    if settings.count is not None and settings.count < len(settings.able):
        raise InputError(f"--count {settings.count} is less than the {len(settings.able)} kinds of --faults")
    if settings.profile != LOOPBACK:
        _check_lab(settings)


def _check_names(flag: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"{flag} has no {name!r}; choose from {', '.join(known)}")
    if len(set(given)) < len(given):
        raise InputError(f"{flag} names something twice: {', '.join(given)}")


def _check_lab(settings: ChaosSettings) -> None:
    from loadtest.wan.lab import lab_problem
    from loadtest.wan.profile import profile_named

    profile_named(settings.profile, settings.profiles)
    if problem := lab_problem():
        raise ServiceError(f"{problem}; --profile {LOOPBACK} needs no lab, and has no links to cut")
