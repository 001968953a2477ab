"""The commands `bench chaos`, `chaos-training`, `soak` and `flood`."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from onesweep.loadtest.commands import add_measurement, say
from onesweep.loadtest.faults.settings import (
    ChaosSettings,
    FloodFlags,
    TrainingChaosSettings,
)
from onesweep.loadtest.report.record import check_report_options, origin, write_report
from onesweep.stages.errors import InputError, Interrupted, OnesweepError, one_of
from onesweep.stages.settings import from_flags
from onesweep.stages.signals import ends_cleanly

if TYPE_CHECKING:
    from onesweep.loadtest.faults.flood import FloodSettings
    from onesweep.loadtest.faults.report import FaultReport

SOAK = ("minutes", "profile", "profiles", "seed", "checkpoint", "requests_at_once", "patience_s", "modes")
SOAK_MINUTES = 30.0


add_chaos = partial(add_measurement, settings=ChaosSettings, html=True, svg=True)
add_soak = partial(add_chaos, only=SOAK)
add_chaos_training = partial(add_measurement, settings=TrainingChaosSettings)
add_flood = partial(add_measurement, settings=FloodFlags, access=True)


def run_chaos(options: argparse.Namespace) -> int:
    return _run_chaos(options, from_flags(ChaosSettings, options))


def run_soak(options: argparse.Namespace) -> int:
    base = ChaosSettings(minutes=SOAK_MINUTES)
    return _run_chaos(options, from_flags(ChaosSettings, options, base, faults=(), count=None, audit=0.0))


def _run_chaos(options: argparse.Namespace, settings: ChaosSettings) -> int:
    from onesweep.loadtest.faults.serving_report import serving_report
    from onesweep.loadtest.faults.serving_run import check_chaos
    from onesweep.loadtest.faults.serving_run import run_chaos as chaos

    check_chaos(settings)
    check_report_options(options)
    with ends_cleanly():
        result = chaos(settings, say)
    return _finish(serving_report(result), options, "something was lost, wrong, left behind or growing: see above")


def run_chaos_training(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.training_figures import measure_training
    from onesweep.loadtest.faults.training_report import tables, training_record, verdict
    from onesweep.loadtest.faults.training_run import check_training_chaos, run_training_chaos

    settings = from_flags(TrainingChaosSettings, options)
    if settings.faults == ("none",):
        settings = replace(settings, faults=())
    check_training_chaos(settings)
    check_report_options(options)
    head = origin()  # the machine as it is before
    with ends_cleanly():
        if not settings.faults and settings.faults is not None:
            figures = measure_training(settings, say)
            say(figures.table())
            write_report(options, head | figures.record())
            return 0
        result = run_training_chaos(settings, say)
    say("\n\n".join([*tables(result), *(f"- {words}" for words in verdict(result))]))
    write_report(options, head | training_record(result))
    if result.trouble:
        raise OnesweepError("something was lost or counted twice, had no end, or is worse than it may be: see above")
    return 0


def _finish(report: FaultReport, options: argparse.Namespace, trouble: str) -> int:
    say(report.terminal())
    report.write(options)
    if report.trouble:
        raise OnesweepError(trouble)
    return 0


def run_flood(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.flood import flood_notes, flood_record, two_keys
    from onesweep.loadtest.faults.flood import run_flood as flood
    from onesweep.loadtest.load.generator import check_locust
    from onesweep.loadtest.load.plan import check_settings
    from onesweep.loadtest.load.report import RUNS, run_line
    from onesweep.loadtest.workload.prompts import seeded_prompts
    from onesweep.loadtest.workload.testbed import check_testbed, open_testbed
    from onesweep.loadtest.workload.texts import Texts
    from onesweep.serving.modes import MODES

    flags = from_flags(FloodFlags, options)
    settings = _flood_settings(flags, options)
    load = settings.load
    check_settings(load)
    if load.mode not in MODES:
        raise InputError(f"unknown mode {load.mode!r}{one_of(load.mode, MODES)}")
    check_testbed(load.target)
    check_locust()
    check_report_options(options)
    head = origin()  # the machine as it is before
    with ends_cleanly(), contextlib.ExitStack() as stack:
        if flags.keys:
            settings = stack.enter_context(two_keys(settings))
        target = stack.enter_context(open_testbed(settings.load.target))
        cases = seeded_prompts(load.cases, load.first_seed, load.max_bytes, target.facts().context_length)
        texts = Texts(target, cases, load.max_bytes)
        result = flood(settings, target, texts, lambda done: say(run_line(done)))
    say("\n" + RUNS.aligned(result.results) + "\n\n" + "\n".join(flood_notes(result)))
    write_report(options, head | flood_record(result))
    if result.trouble:
        raise OnesweepError(f"{result.trouble} requests failed, were lost or wrong")
    if any(each.interrupted for each in result.results):
        raise Interrupted("stopped early: the figures are those of the requests until then")
    if result.missed:
        raise OnesweepError("; ".join(result.missed))
    return 0


def _flood_settings(flags: FloodFlags, options: argparse.Namespace) -> FloodSettings:
    from onesweep.loadtest.faults.flood import FloodSettings
    from onesweep.loadtest.load.plan import LoadSettings
    from onesweep.loadtest.workload.caller import Access
    from onesweep.loadtest.workload.testbed import LOOPBACK, TestbedSettings

    profile, access = flags.profile or LOOPBACK, Access.of(options)
    if flags.keys and (options.router is not None or profile != LOOPBACK):
        raise InputError("--keys is for hosts on loopback that are started here: leave out --router and --profile")
    limit = ("--max-requests", str(flags.max_requests)) if flags.max_requests is not None else ()
    if limit and options.router is not None:
        raise InputError("--router names a deployment that is there, as it is: leave out --max-requests")
    target = TestbedSettings(profile, access, flags.checkpoint, router_options=limit)
    users = flags.knee or 1
    load = LoadSettings(target, flags.mode, users, flags.seconds, max_bytes=flags.max_bytes, timeout_s=flags.timeout_s)
    return FloodSettings(load, flags.at, flags.knee, flags.polite, batch=flags.batch)
