"""One load run: users on a deployment for a while, then every text checked."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from loadtest.load.access import Access
from loadtest.load.accounting import Judged, LoadFigures, figures_of, judge
from loadtest.load.generator import Recording, start_generator
from loadtest.load.plan import LoadPlan
from loadtest.load.prompts import Case
from loadtest.load.sample import OK, Outcome
from loadtest.load.target import Target, TargetSettings
from loadtest.load.texts import Texts
from stages.errors import InputError, Interrupted, ServiceError

MOST = 1_000_000
MOST_SEED = 1 << 63


@dataclass(frozen=True)
class LoadSettings:
    """What `onesweep loadtest` is told, but for where its results go."""

    target: TargetSettings
    mode: str = "sweep"
    users: int = 8
    seconds: float = 30.0
    spawn_rate: float | None = None
    """Users started a second; None = all within one second."""
    max_bytes: int = 128
    first_seed: int = 0
    cases: int = 64
    """Distinct texts that are asked for."""
    warm_up_s: float = 3.0
    timeout_s: float = 60.0

    def plan(self, access: Access, cases: tuple[Case, ...], mode: str, users: int) -> LoadPlan:
        rate = float(users) if self.spawn_rate is None else self.spawn_rate
        return LoadPlan(access, mode, self.max_bytes, cases, users, rate, self.warm_up_s, self.seconds, self.timeout_s)


@dataclass(frozen=True)
class LoadResult:
    """One run."""

    mode: str
    users: int
    figures: LoadFigures
    judged: list[Judged]
    texts: str
    """What the texts were compared with."""
    wrong: str = ""
    """The first wrong text beside the right one."""
    interrupted: bool = False


def check_settings(settings: LoadSettings) -> None:
    """Raises InputError for numbers that no run can have."""
    for flag, number in (
        ("--users", settings.users),
        ("--seconds", settings.seconds),
        ("--spawn-rate", settings.spawn_rate),
        ("--bytes", settings.max_bytes),
        ("--texts", settings.cases),
        ("--timeout-s", settings.timeout_s),
    ):
        if number is not None and not 0 < number < MOST:
            raise InputError(f"{flag} must be above 0 and below {MOST}, not {number:g}")
    if not 0 <= settings.warm_up_s < MOST:
        raise InputError(f"--warm-up-s must be 0 or more and below {MOST}, not {settings.warm_up_s:g}")
    if not 0 <= settings.first_seed < MOST_SEED:
        raise InputError(f"--seed must be from 0 to {MOST_SEED - 1}, not {settings.first_seed}")


def run_load(settings: LoadSettings, target: Target, texts: Texts, mode: str, users: int) -> LoadResult:
    """One run on a deployment that has nothing else to do. Raises OnesweepError."""
    with start_generator(target, settings.plan(target.access, texts.cases, mode, users)) as generator:
        result = result_of(generator.drain(), texts, mode, users)
        return replace(result, interrupted=generator.stopped)


def run_with_page(
    settings: LoadSettings, target: Target, texts: Texts, listener: socket.socket, shown: Callable[[LoadResult], None]
) -> LoadResult:
    """Like `run_load`, with locust's page until Ctrl-C; what is started from the page is accounted for, too.

    :param shown: called with the result when the run itself is over.
    """
    plan = settings.plan(target.access, texts.cases, settings.mode, settings.users)
    with start_generator(target, plan, listener) as generator:
        result = result_of(generator.drain(), texts, settings.mode, settings.users)
        shown(result)
        if result.figures.interrupted:
            return result
        return result_of(generator.drain(), texts, settings.mode, settings.users)


def result_of(recording: Recording, texts: Texts, mode: str, users: int) -> LoadResult:
    """Compare every answer with the text of its case, then count.

    Raises Interrupted when nothing was measured, OnesweepError when there is nothing to compare with.
    """
    window = recording.window
    if window is None or window.seconds <= 0:
        raise Interrupted("stopped before the measurement began: there are no figures")
    expected = _expected(recording, texts, mode)
    judged = judge(recording.samples, window, expected)
    figures = figures_of(judged, window, texts.max_bytes)
    wrong = next((_difference(j, texts, expected) for j in judged if j.outcome is Outcome.WRONG), "")
    return LoadResult(mode, users, figures, judged, texts.source(mode), wrong, window.interrupted)


def _expected(recording: Recording, texts: Texts, mode: str) -> dict[int, bytes]:
    """Raises ServiceError with what is known all the same when the deployment gives no texts any more."""
    try:
        return texts.of(mode, (sample.case for sample in recording.samples if sample.status == OK))
    except ServiceError as error:
        statuses = Counter(sample.status for sample in recording.samples).most_common()
        known = ", ".join(f"{count} {status}" for status, count in statuses)
        raise ServiceError(f"the texts of this run ({known}) cannot be checked: {error}") from None


def _difference(judged: Judged, texts: Texts, expected: dict[int, bytes]) -> str:
    case = texts.cases[judged.sample.case]
    return (
        f"prompt {case.prompt!r}, seed {case.seed}\n"
        f"  under load: {bytes.fromhex(judged.sample.output)!r}\n  alone:      {expected[judged.sample.case]!r}"
    )
