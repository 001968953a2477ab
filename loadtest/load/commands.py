"""The command `onesweep bench loadtest`."""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loadtest.commands import BenchReport, add_measurement, run_bench, say
from loadtest.load.plan import LoadSettings
from loadtest.workload.caller import Access, add_access_options
from stages.errors import InputError, Interrupted, OnesweepError, one_of
from stages.settings import check_destination, from_flags

if TYPE_CHECKING:
    from loadtest.load.run import LoadResult
    from loadtest.workload.caller import RouterState
    from loadtest.workload.texts import Texts

KNEE_MODES = ("sweep", "chunked", "ar", "ar-speculative")
MOST_KNEE_USERS = 256  # four times the requests that a router takes at once: beyond are refusals


def add_loadtest(loadtest: argparse.ArgumentParser) -> None:
    add_measurement(loadtest, LoadSettings)
    add_access_options(loadtest)


def run_loadtest(options: argparse.Namespace) -> int:
    settings, modes = _settings(options)
    results: list[LoadResult] = []
    code = run_bench(options, lambda: _measure(settings, modes, results))
    _raise_trouble(results)
    return code


def _settings(options: argparse.Namespace) -> tuple[LoadSettings, list[str]]:
    """Settings, and the modes to measure. Raises OnesweepError for what can be refused before anything starts."""
    from loadtest.workload.testbed import TestbedSettings, check_testbed
    from serving.modes import MODES

    climbs = options.find_knee or options.over_knee is not None
    target = from_flags(TestbedSettings, options, access=Access.of(options))
    base = LoadSettings(users=MOST_KNEE_USERS) if climbs else LoadSettings()
    settings = from_flags(LoadSettings, options, base, target=target, find_knee=bool(climbs))
    modes = [mode.strip() for mode in (options.mode or ",".join(KNEE_MODES if climbs else ("sweep",))).split(",")]
    for mode in modes:
        if mode not in MODES:
            raise InputError(f"unknown mode {mode!r}{one_of(mode, MODES)}")
    if len(modes) > 1 and not climbs:
        raise InputError("one mode at a time: --find-knee takes several")
    if climbs and settings.html is not None:
        raise InputError("--html shows one run: leave out --find-knee and --over-knee")
    if settings.html is not None:
        check_destination(settings.html, "--html")
    for module in ("locust", "gevent"):
        if find_spec(module) is None:
            raise InputError(f"the load test needs {module}: pip install 'onesweep[loadtest]'")
    check_testbed(settings.target)
    return settings, modes


def _measure(settings: LoadSettings, modes: list[str], results: list[LoadResult]) -> BenchReport:
    """:param results: where every run is put as soon as it is over. Raises OnesweepError."""
    from loadtest.report.record import settings_record
    from loadtest.workload.prompts import seeded_prompts
    from loadtest.workload.testbed import open_testbed
    from loadtest.workload.texts import Texts

    if settings.target.access is None:
        say(f"starting {settings.target.host_count} hosts and a router ({settings.target.profile}) ...")
    with open_testbed(settings.target) as target:
        facts = target.caller.facts()
        say(f"{target.access.router} takes {facts.request_limit} requests at once ...")
        cases = seeded_prompts(settings.cases, settings.first_seed, settings.max_bytes, facts.context_length)
        texts = Texts(target, cases, settings.max_bytes)
        served = _served(modes, facts)
        shown, record = (_find_knees if settings.find_knee else _one_run)(settings, texts, served, results)
    found = {"router": target.access.router, "hosts": facts.hosts, "request_limit": facts.request_limit}
    return BenchReport(shown, record | found | {"settings": settings_record(settings, target=target.network.profile)})


def _one_run(
    settings: LoadSettings, texts: Texts, modes: list[str], results: list[LoadResult]
) -> tuple[str, dict[str, Any]]:
    """Returns the words for a terminal, and the record."""
    from loadtest.load.run import RUNS, run_load, run_notes, run_record
    from loadtest.report.table import table

    s, mode = settings, modes[0]
    say(f"{s.users} users of mode {mode}: {s.seconds:g} s after {s.warm_up_s:g} s of warm-up, {s.max_bytes} bytes each")
    result = run_load(s, texts, mode, s.users)
    results.append(result)
    row = run_record(result)
    return "\n".join([table(RUNS, [row]), *run_notes(result)]), {"loadtest": "run", **row}


def _find_knees(
    settings: LoadSettings, texts: Texts, modes: list[str], results: list[LoadResult]
) -> tuple[str, dict[str, Any]]:
    """The knee of each mode, and with `--over-knee` as many times its users."""
    from loadtest.load.run import RUNS, climb, knee_note, over_note, run_line, run_load, run_record
    from loadtest.report.table import table

    def measure(mode: str, users: int) -> LoadResult:
        results.append(run_load(settings, texts, mode, users))
        say(run_line(results[-1]))
        return results[-1]

    notes, knees = list[str](), list[dict[str, object]]()
    for mode in modes:
        found = climb(mode, settings.users, measure)
        notes.append(knee_note(found))
        knees.append({"mode": mode, "users": found.knee, "ended": found.ended})
        if found.results[-1].interrupted:
            break
        if settings.over_knee is not None and found.knee_result is not None:
            over = measure(mode, math.ceil(settings.over_knee * found.knee_result.users))
            knees[-1] |= {"over": over.users, "goodput": over.goodput(found.knee_result)}
            notes.append(over_note(found.knee_result, over))
    rows = [run_record(result) for result in results]
    return "\n".join(["", table(RUNS, rows), "", *notes]), {"loadtest": "knee", "rows": rows, "knees": knees}


def _served(modes: list[str], facts: RouterState) -> list[str]:
    """The modes that the router serves; a sentence for each of the others. Raises InputError when none is left."""
    served = [mode for mode in modes if mode in facts.modes]
    if not served:
        raise InputError(f"this deployment cannot serve {', '.join(modes)}; it has {', '.join(facts.modes)}")
    for mode in modes:
        if mode not in served:
            print(f"left out {mode}: the router serves {', '.join(facts.modes)}")
    return served


def _raise_trouble(results: list[LoadResult]) -> None:
    """Raises Interrupted for a run that was stopped, OnesweepError for requests that a sound deployment answers."""
    counts = [count for result in results for count in (result.figures.counts, result.figures.outside)]
    if sum(count.trouble for count in counts):
        failed, lost, wrong = (sum(getattr(c, name) for c in counts) for name in ("failed", "lost", "wrong"))
        raise OnesweepError(f"of all requests, warm-up included, {failed} failed, {lost} were lost, {wrong} were wrong")
    if any(result.interrupted for result in results):
        raise Interrupted("stopped early: the figures are those of the requests until then")
