"""The command `onesweep bench loadtest`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.commands import add_measurement, say
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.stages.errors import InputError, Interrupted, OnesweepError, one_of
from onesweep.stages.settings import from_flags

if TYPE_CHECKING:
    import socket

    from onesweep.loadtest.load.plan import LoadSettings
    from onesweep.loadtest.load.run import Climb, LoadResult, LoadRun
    from onesweep.loadtest.workload.caller import RouterState
    from onesweep.loadtest.workload.texts import Texts

KNEE_MODES = ("sweep", "chunked", "ar", "ar-speculative")
DEFAULT_USERS = 8
MOST_KNEE_USERS = 256  # four times the requests that a router takes at once: beyond are refusals
WEB_PORT = 8089  # locust's own


def add_loadtest(load: argparse.ArgumentParser) -> None:
    from onesweep.loadtest.load.plan import LoadSettings

    add_measurement(load, LoadSettings, access=True, html=True)
    load.add_argument("--find-knee", action="store_true", help="1, 2, 4, 8 ... users until latency gives way")
    load.add_argument("--web", action="store_true", help="locust's page on 127.0.0.1, until Ctrl-C")
    load.add_argument("--web-port", type=int, default=WEB_PORT, metavar="PORT", help=f"its port ({WEB_PORT})")


def run_loadtest(options: argparse.Namespace) -> int:
    from onesweep.loadtest.load.generator import open_listener
    from onesweep.loadtest.load.run import LoadRun
    from onesweep.loadtest.workload.prompts import seeded_prompts
    from onesweep.loadtest.workload.testbed import check_testbed, open_testbed
    from onesweep.loadtest.workload.texts import Texts
    from onesweep.stages.signals import ends_cleanly

    modes = _modes(options)
    settings = _settings(options, modes[0])
    check_report_options(options)
    check_testbed(settings.target)
    with ends_cleanly(), contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(options.web_port)) if options.web else None
        if settings.target.access is None:
            say(f"starting {settings.target.host_count} hosts and a router ({settings.target.profile}) ...")
        target = stack.enter_context(open_testbed(settings.target))
        facts = target.facts()
        scene = LoadRun(settings, target, facts)
        cases = seeded_prompts(settings.cases, settings.first_seed, settings.max_bytes, facts.context_length)
        texts = Texts(target, cases, settings.max_bytes)
        served = _served(modes, facts)
        if options.find_knee:
            return _find_knee(options, scene, texts, served)
        return _run(options, scene, texts, listener)


def _run(options: argparse.Namespace, scene: LoadRun, texts: Texts, listener: socket.socket | None) -> int:
    from onesweep.loadtest.load.report import RUNS, load_page, load_record, run_notes
    from onesweep.loadtest.load.run import run_load, run_with_page

    settings, target = scene.settings, scene.target

    def show(result: LoadResult) -> None:
        say(RUNS.aligned([result]) + "\n" + "\n".join(run_notes(result)))

    say(
        f"{settings.users} users of mode {settings.mode} on {target.router}, which takes {scene.facts.request_limit} "
        f"requests at once: {settings.seconds:g} s after {settings.warm_up_s:g} s of warm-up, "
        f"{settings.max_bytes} bytes a text ..."
    )
    if listener is not None:
        say(f"locust's page: http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C ends it)")
        result = run_with_page(settings, target, texts, listener, show)
        print(f"with what the page started: {run_notes(result)[0]}")
    else:
        result = run_load(settings, target, texts, settings.mode, settings.users)
        show(result)
    _write(options, load_record(scene, result), lambda: load_page(scene, result))
    _raise_trouble([result])
    return 0


def _find_knee(options: argparse.Namespace, scene: LoadRun, texts: Texts, modes: list[str]) -> int:
    from onesweep.loadtest.load.report import RUNS, knee_notes, knee_page, knee_record, run_line
    from onesweep.loadtest.load.run import climb, run_load

    climbs: list[Climb] = []

    def measure(mode: str, users: int) -> LoadResult:
        result = run_load(scene.settings, scene.target, texts, mode, users)
        say(run_line(result))
        return result

    for mode in modes:
        climbs.append(climb(mode, scene.settings.users, measure))
        if climbs[-1].interrupted:
            break
    results = [result for one in climbs for result in one.results]
    say("\n" + RUNS.aligned(results) + "\n\n" + "\n".join(knee_notes(climbs)))
    _write(options, knee_record(scene, climbs), lambda: knee_page(scene, climbs))
    _raise_trouble(results)
    return 0


def _modes(options: argparse.Namespace) -> list[str]:
    from onesweep.serving.modes import MODES

    modes = list(KNEE_MODES) if options.find_knee else ["sweep"]
    if options.mode is not None:
        modes = [mode.strip() for mode in options.mode.split(",")]
    for mode in modes:
        if options.mode is not None and mode not in MODES:
            raise InputError(f"unknown mode {mode!r}{one_of(mode, MODES)}")
    if len(modes) > 1 and not options.find_knee:
        raise InputError("one mode at a time: --find-knee takes several")
    return modes


def _settings(options: argparse.Namespace, mode: str) -> LoadSettings:
    from onesweep.loadtest.load.generator import check_locust
    from onesweep.loadtest.load.plan import LoadSettings, check_settings
    from onesweep.loadtest.workload.caller import Access
    from onesweep.loadtest.workload.testbed import TestbedSettings

    users = options.users if options.users is not None else MOST_KNEE_USERS if options.find_knee else DEFAULT_USERS
    target = from_flags(TestbedSettings, options, access=Access.of(options))
    settings = from_flags(LoadSettings, options, target=target, mode=mode, users=users)
    check_settings(settings)
    if options.web and options.find_knee:
        raise InputError("--web shows one run: leave out --find-knee")
    check_locust()
    return settings


def _served(modes: list[str], facts: RouterState) -> list[str]:
    """The modes that the router serves; a sentence for each of the others. Raises InputError when none is left."""
    served = [mode for mode in modes if mode in facts.modes]
    if not served:
        raise InputError(f"this deployment cannot serve {', '.join(modes)}; it has {', '.join(facts.modes)}")
    for mode in modes:
        if mode not in served:
            print(f"left out {mode}: the router serves {', '.join(facts.modes)}")
    return served


def _write(options: argparse.Namespace, record: dict[str, Any], page: Callable[[], str]) -> None:
    write_report(options, record, page)
    if options.html:
        print(f"report: {options.html}")


def _raise_trouble(results: list[LoadResult]) -> None:
    """Raises Interrupted for a run that was stopped, OnesweepError for requests that a sound deployment answers."""
    counts = [count for result in results for count in (result.figures.counts, result.figures.outside)]
    if sum(count.trouble for count in counts):
        failed, lost, wrong = (sum(getattr(c, name) for c in counts) for name in ("failed", "lost", "wrong"))
        raise OnesweepError(f"of all requests, warm-up included, {failed} failed, {lost} were lost, {wrong} were wrong")
    if any(result.interrupted for result in results):
        raise Interrupted("stopped early: the figures are those of the requests until then")
