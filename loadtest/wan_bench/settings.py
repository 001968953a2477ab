"""What `onesweep bench wan` is told, and everything that can be wrong with it before a lab is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.wan.lab import lab_problem
from loadtest.wan.profile import Profile, profile_named
from loadtest.wan_bench.arms import SCORED, SPECULATIVE, Arm, ModeChoice
from loadtest.wan_bench.turns import PROMPT
from stages.bundle import Bundle, find_bundle
from stages.errors import InputError, OnesweepError
from stages.manifest import read_manifest
from stages.parts import plan_host

DEFAULT_HOSTS = 3
CONTROL = "lan"
"""The profile that is held against plain loopback: what the lab itself costs."""
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class WanSettings:
    """What `onesweep bench wan` is told."""

    profiles: tuple[str, ...]
    choices: tuple[ModeChoice, ...]
    sizes: tuple[int, ...]
    checkpoint: Path
    requests: int = 10
    """Requests of each arm, after one that warms up."""
    seed: int = 0
    """Of the first request of every arm; the next ones count on."""
    profiles_file: Path | None = None
    hosts: int | None = None
    """None: three, or one for each block where there are fewer."""
    idle_s: float = 0.0
    """Above 0: each arm also after this many idle seconds."""
    ablate: bool = False

    def arms(self) -> list[Arm]:
        idles = [0.0] + ([self.idle_s] if self.idle_s else [])
        return [Arm(choice, size, idle) for idle in idles for choice in self.choices for size in self.sizes]


def check_settings(settings: WanSettings) -> list[Profile]:
    """Everything that can be refused before a lab is made. Returns the profiles. Raises OnesweepError."""
    if settings.requests < 1:
        raise InputError(f"--requests must be at least 1, not {settings.requests}")
    if not 0 <= settings.seed <= MAX_SEED:
        raise InputError(f"--seed must be 0 to {MAX_SEED}, not {settings.seed}")
    if not 0 <= settings.idle_s <= 3600:
        raise InputError(f"--idle-s must be 0 to 3600 seconds, not {settings.idle_s:g}")
    profiles = [profile_named(name, settings.profiles_file) for name in settings.profiles]
    parts = plan_host(settings.checkpoint, (0,)).parts
    if settings.hosts is not None and not 1 <= settings.hosts <= parts:
        raise InputError(f"--hosts must be 1 to {parts}, the checkpoint's blocks, not {settings.hosts}")
    for profile in (*profiles, profile_named(CONTROL)):
        profile.check_hosts(host_count(settings))
    room = context_bytes(settings.checkpoint, settings.choices) - len(PROMPT.encode())
    for size in settings.sizes:
        if not 1 <= size <= room:
            raise InputError(f"--bytes must be 1 to {room}, what the context leaves after the prompt, not {size}")
    problem = lab_problem()
    if problem:
        raise OnesweepError(problem)
    return profiles


def host_count(settings: WanSettings) -> int:
    return settings.hosts or min(DEFAULT_HOSTS, plan_host(settings.checkpoint, (0,)).parts)


def context_bytes(checkpoint: Path, choices: Sequence[ModeChoice]) -> int:
    """The smallest context of the models that the chosen modes use. Raises InputError where there is no such model."""
    bundle = find_bundle(checkpoint)
    smallest = []
    for choice in choices:
        for kind in _models(choice, bundle):
            directory = getattr(bundle, kind)
            if directory is None:
                raise InputError(f"mode {choice.label} needs {kind}/ in {checkpoint}, which has none")
            smallest.append(read_manifest(directory).architecture.positions)
    return min(smallest)


def _models(choice: ModeChoice, bundle: Bundle) -> list[str]:
    """The models of a bundle that a mode uses."""
    if choice.mode in SCORED:
        scorer = choice.scorer or ("chain" if bundle.scorer else "ar")
        return ["scorer" if scorer == "chain" else "ar", "local"]
    if choice.mode == SPECULATIVE:
        drafts = bundle.local is not None if choice.drafter is None else choice.drafter != "lookup"
        return ["ar", *(["local"] if drafts else [])]
    return ["local" if choice.mode == "local" else "ar" if choice.mode == "ar" else "chain"]
