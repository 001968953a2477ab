"""What a run of `chaos training` is told."""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.load.target import LOOPBACK
from loadtest.training.faults import FAULTS
from stages.architecture import Architecture
from stages.errors import InputError, ServiceError

FAULTS_A_MINUTE = 1.2
ROUNDS_A_MINUTE = 10
"""Of the run that ships: about what two cores make, faults and all."""
MOST_MINUTES = 7 * 24 * 60.0
MOST_SEED = 1 << 32
MOST_WORKERS = 60
SHIPPED = Path(__file__).with_name("run.toml")
REPLICAS, SEQUENCES, CODEC = 2, 8, "int8"
"""What a run has where its file does not say."""


@dataclass(frozen=True)
class RunFile:
    """What this side must know of the run's settings."""

    text: str
    parts: int
    replicas: int
    sequences: int
    codec: str

    @classmethod
    def read(cls, path: Path, rounds: int | None = None) -> RunFile:
        """:param rounds: put into its section [rounds], which must be its last. Raises InputError."""
        try:
            text = path.read_text(encoding="utf-8")
            if rounds is not None:
                text = f"{text.rstrip()}\nrounds = {rounds}\n"
            table = tomllib.loads(text)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path} is not TOML: {error}") from None
        sections = {name: table.get(name, {}) for name in ("architecture", "rounds")}
        if not all(isinstance(section, dict) for section in sections.values()):
            raise InputError(f"{path}: [architecture] and [rounds] must be sections")
        if (model := sections["rounds"].get("model", "chain")) != "chain":
            raise InputError(f"{path}: faults are for the training of a chain, not of {model!r}")
        if (fragments := sections["rounds"].get("fragments", 1)) != 1:
            raise InputError(f"{path}: faults are for parts that travel whole, not in {fragments!r} fragments")
        return cls(
            text,
            _whole(sections["architecture"], "parts", Architecture().parts, path),
            _whole(sections["rounds"], "replicas", REPLICAS, path),
            _whole(table, "sequences", SEQUENCES, path),
            str(sections["rounds"].get("codec", CODEC)),
        )


@dataclass(frozen=True)
class TrainingChaosSettings:
    """A run, and what happens to it."""

    minutes: float = 20.0
    """Of the run that ships; how many faults there are, too."""
    seed: int = 0
    """Of the schedule."""
    profile: str = LOOPBACK
    kinds: tuple[str, ...] = tuple(FAULTS)
    count: int | None = None
    """Faults; None: 1.2 a minute, and each kind once at least."""
    config: Path | None = None
    """None: the run that ships, of so many minutes."""
    data: Path | None = None
    profiles: Path | None = None
    reference: Path | None = None
    """Scores of the run without faults: read from there if they are of this run, else made, and written there."""
    lease_s: float = 6.0
    patience_s: float = 300.0
    """How much longer than planned the run may take, without progress."""

    def run_file(self) -> RunFile:
        """Raises InputError."""
        if self.config is not None:
            return RunFile.read(self.config)
        return RunFile.read(SHIPPED, max(round(self.minutes * ROUNDS_A_MINUTE), 2))

    def absence(self, name: str, codec: str) -> str:
        """Why a kind cannot be done here; empty when it can."""
        return FAULTS[name].absent(self.profile, codec)

    def able(self, codec: str) -> tuple[str, ...]:
        return tuple(name for name in self.kinds if not self.absence(name, codec))

    def fault_count(self, codec: str) -> int:
        able = len(self.able(codec))
        return self.count if self.count is not None else max(able, round(self.minutes * FAULTS_A_MINUTE))

    def reference_key(self, text: str) -> str:
        """Names the run without faults: its settings, text and links."""
        return hashlib.sha256(f"{text}\n{self.data}\n{self.profile}".encode()).hexdigest()


def check_settings(settings: TrainingChaosSettings) -> RunFile:
    """Everything that can be refused before anything is started. Raises OnesweepError."""
    for flag, number, most in (("--minutes", settings.minutes, MOST_MINUTES), ("--count", settings.count, 10_000)):
        if number is not None and not (math.isfinite(number) and 0 < number <= most):
            raise InputError(f"{flag} must be above 0 and at most {most:g}, not {number:g}")
    if not 0 <= settings.seed < MOST_SEED:
        raise InputError(f"--seed must be from 0 to {MOST_SEED - 1}, not {settings.seed}")
    for name in settings.kinds:
        if name not in FAULTS:
            raise InputError(f"--faults has no {name!r}; choose from {', '.join(FAULTS)}")
    if len(set(settings.kinds)) < len(settings.kinds):
        raise InputError(f"--faults names something twice: {', '.join(settings.kinds)}")
    run = settings.run_file()
    if not 1 <= run.parts * run.replicas <= MOST_WORKERS:
        raise InputError(f"{run.parts} parts of {run.replicas} workers; at most {MOST_WORKERS} find room here")
    able = settings.able(run.codec)
    if not able:
        raise InputError("; ".join(settings.absence(name, run.codec) for name in settings.kinds))
    if settings.count is not None and settings.count < len(able):
        raise InputError(f"--count {settings.count} is less than the {len(able)} kinds of --faults")
    if settings.data is not None and not settings.data.exists():
        raise InputError(f"no text at {settings.data}: give a file or a folder of UTF-8 text")
    if settings.profile != LOOPBACK:
        _check_lab(settings, run)
    return run


def _check_lab(settings: TrainingChaosSettings, run: RunFile) -> None:
    from loadtest.wan.lab import lab_problem
    from loadtest.wan.profile import profile_named

    profile_named(settings.profile, settings.profiles).check_hosts(run.parts * run.replicas)
    if problem := lab_problem():
        raise ServiceError(f"{problem}; --profile {LOOPBACK} needs no lab, and has no links to cut")


def _whole(table: dict[str, Any], name: str, default: int, path: Path) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {name} must be a whole number above 0, not {value!r}")
    return value
