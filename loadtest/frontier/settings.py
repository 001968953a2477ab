"""What `onesweep frontier` is told, and everything that can be wrong with it before a lab is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.frontier.worth import Ranking, read_ranking
from loadtest.load.prompts import SENTENCES
from loadtest.quality.arm import parse_arms
from loadtest.quality.prompts import Passage, cut_prompts
from loadtest.quality.text import held_out_documents
from loadtest.wan.lab import lab_problem
from loadtest.wan.profile import Profile, profile_named
from loadtest.wan_bench.settings import DEFAULT_HOSTS
from serving.modes import MODES
from stages.bundle import FRONTIER_NAME, find_bundle
from stages.errors import InputError, OnesweepError
from stages.manifest import read_manifest
from stages.parts import plan_host

COSTS_PROFILE = "lan"
"""Where sweeps and arithmetic are counted: they do not depend on the links."""
PROMPT_BYTES = 64
PASSAGES = 100
"""That exact bits are taken on, and prompts from."""


@dataclass(frozen=True)
class FrontierSettings:
    """What `onesweep frontier` is told."""

    profiles: tuple[str, ...]
    checkpoint: Path
    quality: Path | None = None
    """A record of `onesweep quality`, or a frontier; None: the bundle's frontier."""
    modes: str | None = None
    """Of those that were measured; None: all."""
    max_bytes: int = 256
    requests: int = 5
    """Of each arm on each profile, after one that warms up."""
    seed: int = 0
    prompts: Path | None = None
    """Held-out text to cut prompts from; None: sentences that ship."""
    budgets_ms: tuple[int, ...] = ()
    """For `auto`; none: between the points of each profile's frontier."""
    profiles_file: Path | None = None
    hosts: int | None = None

    @property
    def host_count(self) -> int:
        return self.hosts or min(DEFAULT_HOSTS, plan_host(self.checkpoint, (0,)).parts)


@dataclass(frozen=True)
class Plan:
    """Settings that were checked, and what they stand for."""

    settings: FrontierSettings
    profiles: tuple[Profile, ...]
    costs_profile: Profile
    ranking: Ranking
    prompts: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    """Held-out text for exact bits; none where no text was given."""


def check_settings(settings: FrontierSettings, ranking: Ranking | None = None) -> Plan:
    """:param ranking: where it was measured just now. Raises OnesweepError."""
    for flag, value in (("--bytes", settings.max_bytes), ("--requests", settings.requests)):
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    for budget in settings.budgets_ms:
        if budget < 1:
            raise InputError(f"--budgets must be milliseconds from 1, not {budget}")
    if not 0 <= settings.seed < 1 << 63:
        raise InputError(f"--seed must be 0 to {(1 << 63) - 1}, not {settings.seed}")
    parts = plan_host(settings.checkpoint, (0,)).parts
    if settings.hosts is not None and not 1 <= settings.hosts <= parts:
        raise InputError(f"--hosts must be 1 to {parts}, the checkpoint's blocks, not {settings.hosts}")
    profiles = tuple(profile_named(name, settings.profiles_file) for name in settings.profiles)
    costs_profile = profile_named(COSTS_PROFILE, settings.profiles_file)
    for profile in (*profiles, costs_profile):
        profile.check_hosts(settings.host_count)
    ranking = ranking or _ranking(settings)
    check_weights(settings.checkpoint, ranking)
    if settings.modes is not None:
        ranking = ranking.only(parse_arms(settings.modes, MODES))
    passages = _passages(settings)
    if problem := lab_problem():
        raise OnesweepError(problem)
    prompts = [passage.prompt.decode() for passage in passages] or SENTENCES
    return Plan(settings, profiles, costs_profile, ranking, tuple(prompts[: settings.requests]), passages)


def check_weights(checkpoint: Path, ranking: Ranking) -> None:
    """Raises InputError where the texts that were judged came from other weights."""
    for name, path in vars(find_bundle(checkpoint)).items():
        measured = ranking.weights.get(name)
        if path is not None and measured and (digest := read_manifest(path).digest()) != measured:
            raise InputError(
                f"the quality was measured with other weights ({name}/ {measured[:12]}, {checkpoint} has "
                f"{digest[:12]}): measure this bundle with `onesweep quality --weights {checkpoint} --json FILE`"
            )


def _ranking(settings: FrontierSettings) -> Ranking:
    path = settings.quality or settings.checkpoint / FRONTIER_NAME
    if settings.quality is None and not path.exists():
        raise InputError(
            "what texts are worth is not known: give --quality FILE, as `onesweep quality --json FILE` writes it, or "
            "--judge-on PATH to measure it now on held-out text"
        )
    return read_ranking(path)


def _passages(settings: FrontierSettings) -> tuple[Passage, ...]:
    """Spread over the text: as many as the requests need at least, PASSAGES where it has room for them."""
    if settings.prompts is None:
        return ()
    documents, sizes = held_out_documents(settings.prompts), (PROMPT_BYTES, settings.max_bytes, settings.seed)
    room = sum(len(document.raw) for document in documents) // (PROMPT_BYTES + settings.max_bytes) - len(documents)
    passages = cut_prompts(documents, max(settings.requests, min(PASSAGES, room)), *sizes).asked
    step = len(passages) / settings.requests
    first = [passages[int(i * step)] for i in range(settings.requests)]
    return (*first, *(passage for passage in passages if passage not in first))
