"""The run: costs on links that add next to nothing, then every arm, and `auto` beside them, on each network."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from onesweep.loadtest.frontier.commands import FrontierSettings
from onesweep.loadtest.frontier.points import (
    AutoPoint,
    Point,
    auto_point_of,
    frontier_of,
    option_of,
    point_of,
    usual_budgets_ms,
    with_pareto,
    write_frontier,
)
from onesweep.loadtest.frontier.worth import AUTO, Ranking, Worth, exact_bits, model_of, ranking_of, read_ranking
from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.lab.profile import Profile, profile_named
from onesweep.loadtest.latency.interleave import Sample, Seat, collect
from onesweep.loadtest.quality.commands import QualitySettings
from onesweep.loadtest.quality.generation import parse_arms
from onesweep.loadtest.quality.prompts import Passage, cut_prompts, held_out_documents
from onesweep.loadtest.quality.run import run_quality
from onesweep.loadtest.report.record import origin, settings_record
from onesweep.loadtest.report.table import open_meter
from onesweep.loadtest.workload.prompts import SENTENCES
from onesweep.loadtest.workload.testbed import Testbed, check_host_count, started_testbed
from onesweep.serving.modes import MODES
from onesweep.serving.modes.frontier import Option
from onesweep.stages.checkpoint.bundle import FRONTIER_NAME, find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError, OnesweepError

COSTS_PROFILE = "lan"  # sweeps and arithmetic do not depend on the links, so they are counted on the fastest
PROMPT_BYTES = 64  # as `onesweep bench quality` cuts them, so that texts are alike
PASSAGES = 100  # for exact bits and prompts


@dataclass(frozen=True)
class FrontierPlan:
    """Settings that were checked, and what they stand for."""

    settings: FrontierSettings
    profiles: tuple[Profile, ...]
    costs_profile: Profile
    ranking: Ranking
    prompts: tuple[str, ...]
    passages: tuple[Passage, ...] = ()  # held-out text for exact bits; none where no text was given


def checked_plan(settings: FrontierSettings) -> FrontierPlan:
    """Raises OnesweepError."""
    for budget in settings.budgets_ms:
        if budget < 1:
            raise InputError(f"--budgets must be milliseconds from 1, not {budget}")
    check_host_count(settings.hosts, settings.checkpoint)
    profiles = tuple(profile_named(name, settings.profiles_file) for name in settings.profiles)
    costs_profile = profile_named(COSTS_PROFILE, settings.profiles_file)
    for profile in (*profiles, costs_profile):
        profile.check_hosts(settings.host_count)
    ranking = _ranking(settings)
    check_weights(settings.checkpoint, ranking)
    if settings.modes is not None and settings.judge_on is None:
        ranking = ranking.only(parse_arms(settings.modes, tuple(MODES)))
    passages = _passages(settings)
    if problem := lab_problem():
        raise OnesweepError(problem)
    prompts = [passage.prompt.decode() for passage in passages] or SENTENCES
    return FrontierPlan(settings, profiles, costs_profile, ranking, tuple(prompts[: settings.requests]), passages)


def check_weights(checkpoint: Path, ranking: Ranking) -> None:
    """Raises InputError where the texts that were judged came from other weights."""
    for name, path in vars(find_bundle(checkpoint)).items():
        measured = ranking.weights.get(name)
        if path is not None and measured and (digest := read_manifest(path).digest()) != measured:
            raise InputError(
                f"the quality was measured with other weights ({name}/ {measured[:12]}, {checkpoint} has "
                f"{digest[:12]}): measure this bundle with `onesweep bench quality --weights {checkpoint} --json FILE`"
            )


def _ranking(settings: FrontierSettings) -> Ranking:
    s = settings
    if s.judge_on is not None:
        judged = QualitySettings(s.judge_on, s.modes, s.count, s.max_bytes, seed=s.seed, weights=s.checkpoint)
        return ranking_of(run_quality(judged).record)
    path = settings.quality or settings.checkpoint / FRONTIER_NAME
    if settings.quality is None and not path.exists():
        raise InputError(
            "what texts are worth is not known: give --quality FILE, as `onesweep bench quality --json FILE` writes "
            "it, or --judge-on PATH to measure it now on held-out text"
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


K = TypeVar("K")
Tell = Callable[[str], None]


@dataclass
class FrontierFigures:
    """Results of a run."""

    options: list[Option] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    auto: list[AutoPoint] = field(default_factory=list)
    exact: dict[str, float] = field(default_factory=dict)  # bits a byte of held-out text under each model of the bundle
    problems: list[str] = field(default_factory=list)  # sentences on what could not be measured


def measure_frontier(plan: FrontierPlan, tell: Tell) -> FrontierFigures:
    """The file for `auto` is written as soon as the costs are known.

    A profile that cannot be measured becomes one of `problems`; the others are measured all the same. Raises
    OnesweepError where no arm can be served.
    """
    write = plan.settings.write
    figures = FrontierFigures()
    if plan.passages:
        tell(f"exact bits a byte of {len(plan.passages)} passages ...")
        figures.exact = exact_bits(plan.settings.checkpoint, plan.passages)
    worths = plan.ranking.worths
    with tempfile.TemporaryDirectory() as folder:
        path = write or Path(folder) / "frontier.json"
        tell(f"{COSTS_PROFILE}: what {len(worths)} settings cost ...")
        with _testbed(plan, plan.costs_profile) as testbed:
            answers = _arms(plan, testbed, worths)
        for worth in worths:
            good = [answer for answer in answers[worth] if not answer.error]
            if good:
                figures.options.append(option_of(worth, good))
            else:
                figures.problems.append(f"{worth.arm.label} was left out: {answers[worth][0].error}")
        if not figures.options:
            raise OnesweepError(f"no setting could be served: {figures.problems[0]}")
        write_frontier(path, frontier_of(plan.ranking, figures.options), origin())
        if write:
            tell(f"{write}: {len(figures.options)} settings for mode auto")
        for profile in plan.profiles:
            try:
                _measure_profile(plan, profile, path, figures, tell)
            except OnesweepError as error:
                figures.problems.append(f"{profile.name}: {error}")
    return figures


def frontier_record(plan: FrontierPlan, figures: FrontierFigures) -> dict[str, Any]:
    """Settings, figures and what they were measured on, for a JSON file."""
    s, ranking = plan.settings, plan.ranking
    return {
        "bench": "frontier",
        **origin(),
        "settings": settings_record(s, hosts=s.host_count),
        "judge": ranking.judge,
        "basis": ranking.basis,
        "human_bits": ranking.human_bits,
        "weights": dict(ranking.weights),
        "left_out": list(ranking.left_out),
        "exact_bits": figures.exact,
        "points": [asdict(point) for point in figures.points],
        "auto": [asdict(point) | {"as_good": point.as_good} for point in figures.auto],
        "problems": figures.problems,
    }


def _measure_profile(
    plan: FrontierPlan, profile: Profile, frontier: Path, figures: FrontierFigures, tell: Tell
) -> None:
    known = {option.label for option in figures.options}
    worths = [worth for worth in plan.ranking.worths if worth.arm.label in known]
    tell(f"{profile.name}: {len(worths)} settings x {plan.settings.requests} requests ...")
    with _testbed(plan, profile, ("--frontier", str(frontier))) as testbed:
        answers = _arms(plan, testbed, worths)
        exact = {worth: figures.exact.get(model_of(worth.arm) or "") for worth in worths}
        points = with_pareto([point_of(profile.name, worth, answers[worth], exact[worth]) for worth in worths])
        figures.points += points
        budgets = plan.settings.budgets_ms or usual_budgets_ms(points)
        requests = {ms: _FixedRequest(plan, (("mode", AUTO), ("budget_ms", ms))) for ms in budgets}
        taken = _turns(plan, testbed, requests)
        figures.auto += [auto_point_of(profile.name, ms, taken[ms], points) for ms in budgets]


@dataclass(frozen=True)
class _FixedRequest:
    """Requests of one setting, which differ in prompt and seed only."""

    plan: FrontierPlan
    settings: tuple[tuple[str, Any], ...]
    idle_s: float = 0.0

    def call(self, number: int, seed: int) -> dict[str, Any]:
        prompt = self.plan.prompts[number % len(self.plan.prompts)]
        return {"prompt": prompt, "max_bytes": self.plan.settings.max_bytes, "seed": seed, **dict(self.settings)}


def _arms(plan: FrontierPlan, testbed: Testbed, worths: Sequence[Worth]) -> dict[Worth, list[Sample]]:
    requests = {worth: _FixedRequest(plan, tuple(worth.arm.request().items())) for worth in worths}
    return _turns(plan, testbed, requests)


def _turns(plan: FrontierPlan, testbed: Testbed, requests: Mapping[K, _FixedRequest]) -> dict[K, list[Sample]]:
    seats = {key: Seat(testbed, request) for key, request in requests.items()}
    with open_meter(testbed.profile, len(seats) * plan.settings.requests) as progress:
        samples = collect(list(seats.values()), plan.settings.requests, plan.settings.seed, lambda: progress(1))
    return {key: samples[seat] for key, seat in seats.items()}


def _testbed(
    plan: FrontierPlan, profile: Profile, router_options: Sequence[str] = ()
) -> AbstractContextManager[Testbed]:
    s = plan.settings
    return started_testbed(profile, s.host_count, s.checkpoint, router_options=router_options)
