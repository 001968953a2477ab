"""Checks of the settings of `bench wan` and `bench warm` that need no lab."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from loadtest.lab.lab import lab_problem
from loadtest.lab.profile import Profile, profile_named
from loadtest.latency.settings import WanSettings, WarmSettings
from loadtest.workload.arms import INFILL, SCORED, SPECULATIVE, Length, ModeChoice
from loadtest.workload.prompts import NOVEL, SUFFIX, Prompts
from loadtest.workload.testbed import LOOPBACK, check_host_count, default_hosts
from loadtest.workload.texts import symbols_of, tokenizer_of
from stages.backends import backend_named
from stages.checkpoint.bundle import NGRAM_NAME, Bundle, find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.host.validation import MAX_TEMPERATURE

CONTROL = "lan"  # the profile that is compared with plain loopback: what the lab itself costs


def check_wan(settings: WanSettings) -> list[Profile | None]:
    """Everything that can be refused before a lab is made. Returns the profiles; None = loopback, which is none.

    Raises OnesweepError.
    """
    if settings.temperature is not None and not 0 <= settings.temperature <= MAX_TEMPERATURE:
        raise InputError(f"--temperature must be 0 to {MAX_TEMPERATURE:g}, not {settings.temperature:g}")
    backend_named(settings.backend)
    profiles = [None if name == LOOPBACK else profile_named(name, settings.profiles_file) for name in settings.profiles]
    check_host_count(settings.hosts, settings.checkpoint)
    for profile in filter(None, (*profiles, profile_named(CONTROL))):
        profile.check_hosts(settings.host_count)
    _check_lengths(settings.checkpoint, settings.choices, settings.prompts, settings.lengths)
    if any(profiles) and (problem := lab_problem()):
        raise OnesweepError(problem)
    return profiles


def check_warm(settings: WarmSettings) -> Profile:
    """The profile. Raises OnesweepError for what cannot be measured."""
    profile = profile_named(settings.profile)
    _check_lengths(settings.checkpoint, settings.choices, (NOVEL,), [Length(settings.max_bytes)])
    profile.check_hosts(default_hosts(settings.checkpoint))
    if problem := lab_problem():
        raise OnesweepError(problem)
    return profile


def _check_lengths(
    checkpoint: Path, choices: Sequence[ModeChoice], prompts: Sequence[Prompts], lengths: Sequence[Length]
) -> None:
    """Raises InputError for more symbols than the models of the chosen modes can write after the longest prompt."""
    bundle, rooms = find_bundle(checkpoint), list[int]()
    for choice in choices:
        for kind in _models(choice, checkpoint, bundle):
            directory = getattr(bundle, kind)
            if directory is None:
                raise InputError(f"mode {choice.label} needs {kind}/ in {checkpoint}, which has none")
            beside = SUFFIX if choice.mode == INFILL else ""
            longest = _longest(tuple(text + beside for each in prompts for text in each.texts), directory)
            rooms.append(read_manifest(directory).architecture.positions - longest)
    room = min(rooms)
    for length in lengths:
        if not 1 <= length.count <= room:
            what = f"{length.flag} must be 1 to {room}" if room >= 1 else f"no {length.flag} is small enough"
            raise InputError(f"{what}, what the context leaves after the prompt, not {length.count}")


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
    # without a drafter of its own, a router takes what the bundle has: n-grams where there is no local model
    if choice.drafter in (None, "both") and name != "lookup" and not bundle.local and ngrams:
        name = "ngram"
    if name == "ngram" and not ngrams:
        raise InputError(
            f"mode {choice.label} needs {NGRAM_NAME} in {checkpoint}, which has none: see `onesweep ngram`"
        )
    return ["local"] if name in ("model", "both") else []
