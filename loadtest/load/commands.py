"""The command `onesweep bench loadtest`."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product

from loadtest.commands import BenchReport, add_measurement, check_names, run_bench, say, settings_record
from loadtest.load.plan import LoadSettings
from loadtest.workload.caller import Access, RouterState, add_access_options
from loadtest.workload.prompts import seeded_prompts
from loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from serving.modes import MODES
from stages.errors import InputError
from stages.settings import check, from_flags


def add_loadtest(loadtest: argparse.ArgumentParser) -> None:
    add_measurement(loadtest, LoadSettings)
    add_access_options(loadtest)


def run_loadtest(options: argparse.Namespace) -> int:
    settings = _settings(options)
    return run_bench(options, lambda: _measure(settings))


def _settings(options: argparse.Namespace) -> LoadSettings:
    """Raises OnesweepError for what can be refused before anything starts."""
    target = from_flags(TestbedSettings, options, access=Access.of(options))
    settings = from_flags(LoadSettings, options, target=target)
    check(settings, InputError, "--")
    check_names("--mode", settings.modes, MODES)
    for module in ("locust", "gevent"):
        if find_spec(module) is None:
            raise InputError(f"the load test needs {module}: pip install 'onesweep[loadtest]'")
    check_testbed(settings.target)
    return settings


def _measure(settings: LoadSettings) -> BenchReport:
    """Raises OnesweepError."""
    from loadtest.load.run import RUNS, LoadResult, find_knee, knee_note, run_line, run_load, run_notes, run_record
    from loadtest.report.table import table
    from loadtest.workload.texts import Texts

    s, results = settings, list[LoadResult]()
    if s.target.access is None:
        say(f"starting {s.target.host_count} hosts and a router ({s.target.profile}) ...")
    with open_testbed(s.target) as target:
        facts = target.caller.facts()
        say(f"{target.access.router} takes {facts.request_limit} requests at once ...")
        cases = seeded_prompts(s.cases, s.first_seed, s.max_bytes, facts.context_length)
        texts, modes = Texts(target, cases, s.max_bytes), _served(s.modes, facts)
        for mode, users in product(modes, sorted({*s.users})):
            say(f"{mode}, users: {users}; {s.seconds:g} s after {s.warm_up_s:g} s of warm-up ...")
            results.append(run_load(s, texts, mode, users))
            say(run_line(results[-1]))
    of_modes = [[result for result in results if result.mode == mode] for mode in modes] if len(s.users) > 1 else []
    knees = [find_knee(each) for each in of_modes]
    notes = [knee_note(*knee) for knee in knees] if len(results) > 1 else run_notes(results[0])
    rows = [run_record(result) for result in results]
    found = {"router": target.access.router, "hosts": facts.hosts, "request_limit": facts.request_limit, "rows": rows}
    found["knees"] = [{"mode": result.mode, "users": result.users} for result, _ in knees]
    record = found | {"settings": settings_record(s, target=target.network.profile)}
    counts = [count for result in results for count in (result.figures.counts, result.figures.outside)]
    failed, lost, wrong = (sum(getattr(count, name) for count in counts) for name in ("failed", "lost", "wrong"))
    if trouble := failed + lost + wrong:  # a sound deployment answers all
        notes.append(f"of all requests, warm-up included, {failed} failed, {lost} were lost, {wrong} were wrong")
    return BenchReport("\n".join([table(RUNS, rows), *notes]), record, holds=not trouble)


def _served(modes: Sequence[str], facts: RouterState) -> list[str]:
    """The modes that the router serves; a sentence for each of the others. Raises InputError when none is left."""
    served = [mode for mode in modes if mode in facts.modes]
    if not served:
        raise InputError(f"this deployment cannot serve {', '.join(modes)}; it has {', '.join(facts.modes)}")
    for mode in modes:
        if mode not in served:
            print(f"left out {mode}: the router serves {', '.join(facts.modes)}")
    return served
