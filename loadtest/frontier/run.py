"""The run: costs on links that add next to nothing, then every arm, and `auto` beside them, on each network."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.frontier.costs import frontier_of, option_of, write_frontier
from loadtest.frontier.exact import exact_bits, model_of
from loadtest.frontier.measuring import Answer, Ask, take_turns
from loadtest.frontier.points import AutoPoint, Point, auto_point_of, point_of, usual_budgets_ms, with_pareto
from loadtest.frontier.settings import COSTS_PROFILE, Plan
from loadtest.frontier.worth import AUTO, Worth, record_fields
from loadtest.machine import commit, this_machine
from loadtest.wan.lab import temporary_lab
from loadtest.wan.profile import Profile, node_names
from loadtest.wan_bench.deployment import deployed
from loadtest.wan_bench.floor import Course
from loadtest.wan_bench.station import Station, open_station
from serving.frontier import Option
from stages.errors import OnesweepError

Tell = Callable[[str], None]
Meter = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], object]]]


@dataclass
class FrontierFigures:
    """What was measured."""

    options: list[Option] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    auto: list[AutoPoint] = field(default_factory=list)
    exact: dict[str, float] = field(default_factory=dict)
    """Bits a byte of held-out text under each model of the bundle."""
    problems: list[str] = field(default_factory=list)
    """Sentences on what could not be measured."""


def measure_frontier(plan: Plan, write: Path | None, command: str, tell: Tell, meter: Meter) -> FrontierFigures:
    """:param write: where the file for `auto` goes, as soon as the costs are known; None: nowhere.

    A profile that cannot be measured is a problem that is told of; the others go on. Raises OnesweepError where no arm
    can be served.
    """
    figures = FrontierFigures()
    if plan.passages:
        tell(f"exact bits a byte of {len(plan.passages)} passages ...")
        figures.exact = exact_bits(plan.settings.checkpoint, plan.passages)
    worths = plan.ranking.worths
    with tempfile.TemporaryDirectory() as folder:
        path = write or Path(folder) / "frontier.json"
        tell(f"{COSTS_PROFILE}: what {len(worths)} settings cost ...")
        with _station(plan, plan.costs_profile) as station:
            answers = _arms(plan, station, worths, meter)
        for worth in worths:
            good = [answer for answer in answers[worth] if not answer.error]
            if good:
                figures.options.append(option_of(worth, good, plan.settings.max_bytes))
            else:
                figures.problems.append(f"{worth.arm.label} was left out: {answers[worth][0].error}")
        if not figures.options:
            raise OnesweepError(f"no setting could be served: {figures.problems[0]}")
        origin = {"command": command, "commit": commit(), "machine": asdict(this_machine())}
        write_frontier(path, frontier_of(plan.ranking, figures.options), origin)
        if write:
            tell(f"{write}: {len(figures.options)} settings for mode auto")
        for profile in plan.profiles:
            try:
                _measure_profile(plan, profile, path, figures, tell, meter)
            except OnesweepError as error:
                figures.problems.append(f"{profile.name}: {error}")
    return figures


def frontier_record(plan: Plan, figures: FrontierFigures, command: str) -> dict[str, Any]:
    """Settings, figures and what they were measured on, for a JSON file."""
    s = plan.settings
    return {
        "bench": "frontier",
        "command": command,
        "commit": commit(),
        "machine": asdict(this_machine()),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(s).items()} | {"hosts": s.host_count},
        **record_fields(plan.ranking),
        "exact_bits": figures.exact,
        "points": [asdict(point) for point in figures.points],
        "auto": [asdict(point) | {"as_good": point.as_good} for point in figures.auto],
        "problems": figures.problems,
    }


def _measure_profile(
    plan: Plan, profile: Profile, frontier: Path, figures: FrontierFigures, tell: Tell, meter: Meter
) -> None:
    known = {option.label for option in figures.options}
    worths = [worth for worth in plan.ranking.worths if worth.arm.label in known]
    tell(f"{profile.name}: {len(worths)} settings x {plan.settings.requests} requests ...")
    with _station(plan, profile, ("--frontier", str(frontier))) as station:
        answers = _arms(plan, station, worths, meter)
        exact = {worth: figures.exact.get(model_of(worth.arm) or "") for worth in worths}
        points = with_pareto([point_of(profile.name, worth, answers[worth], exact[worth]) for worth in worths])
        figures.points += points
        budgets = plan.settings.budgets_ms or usual_budgets_ms(points)
        asks = {ms: Ask(f"auto, {ms} ms", (("mode", AUTO), ("budget_ms", ms))) for ms in budgets}
        taken = _turns(plan, station, list(asks.values()), meter)
        figures.auto += [auto_point_of(profile.name, ms, taken[ask], points) for ms, ask in asks.items()]


def _arms(plan: Plan, station: Station, worths: Sequence[Worth], meter: Meter) -> dict[Worth, list[Answer]]:
    asks = {worth: Ask(worth.arm.label, tuple(worth.arm.request().items())) for worth in worths}
    answers = _turns(plan, station, list(asks.values()), meter)
    return {worth: answers[ask] for worth, ask in asks.items()}


def _turns(plan: Plan, station: Station, asks: Sequence[Ask], meter: Meter) -> dict[Ask, list[Answer]]:
    s = plan.settings
    with meter(station.profile, len(asks) * s.requests) as progress:
        return take_turns(station, asks, plan.prompts, s.max_bytes, s.requests, s.seed, lambda: progress(1))


@contextlib.contextmanager
def _station(plan: Plan, profile: Profile, router_options: Sequence[str] = ()) -> Iterator[Station]:
    hosts = plan.settings.host_count
    course = Course(node_names(hosts)[1:], profile.link)
    with (
        temporary_lab(profile, hosts) as lab,
        deployed(lab, plan.settings.checkpoint, router_options=router_options) as deployment,
        open_station(profile.name, deployment, course, lab.command) as station,
    ):
        yield station
