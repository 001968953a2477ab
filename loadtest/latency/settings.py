"""Settings of `onesweep bench wan`, and all checks that need no lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loadtest.lab.lab import lab_problem
from loadtest.lab.profile import Profile, profile_named
from loadtest.workload.arms import INFILL, SCORED, SPECULATIVE, Arm, Length, ModeChoice
from loadtest.workload.prompts import NOVEL, SUFFIX, Prompts
from loadtest.workload.testbed import LOOPBACK, default_hosts
from loadtest.workload.texts import symbols_of, tokenizer_of
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.checkpoint.bundle import NGRAM_NAME, Bundle, find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.host.parts import plan_host
from stages.host.validation import MAX_TEMPERATURE

CONTROL = "lan"  # the profile that is held against plain loopback: what the lab itself costs
MAX_AT_ONCE = 64  # requests in flight that a router takes by default
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class WanSettings:
    """Settings of `onesweep bench wan`."""

    profiles: tuple[str, ...]
    choices: tuple[ModeChoice, ...]
    lengths: tuple[Length, ...]
    checkpoint: Path
    requests: int = 10  # turns of each arm, after one that warms up; `at_once` requests each
    seed: int = 0  # of the first request of every arm; the next ones count on
    profiles_file: Path | None = None
    hosts: int | None = None  # none: three, or one for each block where there are fewer
    idle_s: float = 0.0  # above 0: each arm also after this many idle seconds
    prompts: tuple[Prompts, ...] = (NOVEL,)
    temperature: float | None = None  # none: the router's default
    at_once: int = 1  # requests of an arm that are made together
    control: bool = True  # whether the lab is held against plain loopback at the end
    backend: str = DEFAULT_BACKEND  # what the hosts compute with

    @property
    def host_options(self) -> tuple[str, ...]:
        return ("--backend", self.backend)

    def arms(self) -> list[Arm]:
        idles = [0.0] + ([self.idle_s] if self.idle_s else [])
        return [
            Arm(choice, length, idle, prompts, self.temperature)
            for prompts in self.prompts
            for idle in idles
            for choice in self.choices
            for length in self.lengths
        ]


def check_settings(settings: WanSettings) -> list[Profile | None]:
    """Everything that can be refused before a lab is made. Returns the profiles; None = loopback, which is none.

    Raises OnesweepError.
    """
    if settings.requests < 1:
        raise InputError(f"--requests must be at least 1, not {settings.requests}")
    if not 1 <= settings.at_once <= MAX_AT_ONCE:
        raise InputError(f"--at-once must be 1 to {MAX_AT_ONCE}, not {settings.at_once}")
    if settings.temperature is not None and not 0 <= settings.temperature <= MAX_TEMPERATURE:
        raise InputError(f"--temperature must be 0 to {MAX_TEMPERATURE:g}, not {settings.temperature:g}")
    if not 0 <= settings.seed <= MAX_SEED:
        raise InputError(f"--seed must be 0 to {MAX_SEED}, not {settings.seed}")
    if not 0 <= settings.idle_s <= 3600:
        raise InputError(f"--idle-s must be 0 to 3600 seconds, not {settings.idle_s:g}")
    backend_named(settings.backend)
    profiles = [None if name == LOOPBACK else profile_named(name, settings.profiles_file) for name in settings.profiles]
    parts = plan_host(settings.checkpoint, (0,)).parts
    if settings.hosts is not None and not 1 <= settings.hosts <= parts:
        raise InputError(f"--hosts must be 1 to {parts}, the checkpoint's blocks, not {settings.hosts}")
    for profile in filter(None, (*profiles, profile_named(CONTROL))):
        profile.check_hosts(host_count(settings))
    room = room_for_output(settings.checkpoint, settings.choices, settings.prompts)
    for length in settings.lengths:
        if not 1 <= length.count <= room:
            what = f"--{length.unit} must be 1 to {room}" if room >= 1 else f"no --{length.unit} is small enough"
            raise InputError(f"{what}, what the context leaves after the prompt, not {length.count}")
    if any(profiles) and (problem := lab_problem()):
        raise OnesweepError(problem)
    return profiles


def host_count(settings: WanSettings) -> int:
    return settings.hosts or default_hosts(settings.checkpoint)


def room_for_output(checkpoint: Path, choices: Sequence[ModeChoice], prompts: Sequence[Prompts]) -> int:
    """Symbols that the models of the chosen modes can write after the longest prompt.

    Raises InputError where there is no such model.
    """
    bundle, rooms = find_bundle(checkpoint), list[int]()
    for choice in choices:
        for kind in _models(choice, checkpoint, bundle):
            directory = getattr(bundle, kind)
            if directory is None:
                raise InputError(f"mode {choice.label} needs {kind}/ in {checkpoint}, which has none")
            beside = SUFFIX if choice.mode == INFILL else ""
            longest = _longest(tuple(text + beside for each in prompts for text in each.texts), directory)
            rooms.append(read_manifest(directory).architecture.positions - longest)
    return min(rooms)


@cache
def _longest(texts: tuple[str, ...], directory: Path) -> int:
    """Symbols of the longest text, for the model in `directory`."""
    tokenizer = tokenizer_of(directory)
    return max(len(symbols_of(tokenizer, text.encode())) for text in texts)


def _models(choice: ModeChoice, checkpoint: Path, bundle: Bundle) -> list[str]:
    """The models of a bundle that a mode uses. Raises InputError where it wants n-grams and there are none."""
    if choice.mode in SCORED:
        scorer = choice.scorer or ("chain" if bundle.scorer else "ar")
        return ["scorer" if scorer == "chain" else "ar", *_drafter(choice, checkpoint, bundle)]
    if choice.mode == SPECULATIVE:
        return ["ar", *_drafter(choice, checkpoint, bundle)]
    return ["local" if choice.mode == "local" else "ar" if choice.mode == "ar" else "chain"]


def _drafter(choice: ModeChoice, checkpoint: Path, bundle: Bundle) -> list[str]:
    """`local`, where the router drafts with it."""
    ngrams = (checkpoint / NGRAM_NAME).exists()
    name = choice.drafter or ("lookup" if choice.mode == SPECULATIVE and not bundle.local else "model")
    if choice.drafter in (None, "both") and name != "lookup" and not bundle.local and ngrams:
        name = "ngram"
    if name == "ngram" and not ngrams:
        raise InputError(
            f"mode {choice.label} needs {NGRAM_NAME} in {checkpoint}, which has none: see `onesweep ngram`"
        )
    return ["local"] if name in ("model", "both") else []
