"""Many times more users than a deployment carries: what it still answers, and how quickly it says no."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from loadtest.load.generator import Recording, start_generator
from loadtest.load.interruption import on_signal
from loadtest.load.knee import climb
from loadtest.load.plan import LoadPlan, Window
from loadtest.load.run import LoadResult, LoadSettings, result_of, run_load
from loadtest.load.target import Target
from loadtest.load.texts import Texts
from stages.errors import InputError, ServiceError

AIM_GOODPUT = 0.9
"""Of the knee's right answers a second."""
AIM_REFUSAL_MS = 50.0
LEAST_COMMON = 0.5
"""Of a window: the crowds' windows must have so much in common."""
MOST_KNEE_USERS = 64
MOST_TIMES = 1000.0


@dataclass(frozen=True)
class Crowd:
    """Users that come together."""

    users: int
    token: str = ""
    """Who they are; empty: whoever the first crowd is."""


@dataclass(frozen=True)
class FloodSettings:
    """A load run's settings, whose `users` are those of the knee once it is known."""

    load: LoadSettings
    at: float
    """The flood's users, in those of the knee."""
    knee: int | None
    """None: it is looked for."""
    polite: int
    """Users of a second crowd beside the flood; 0: none."""
    polite_token: str = ""
    """Who they are, where the router asks."""


@dataclass(frozen=True)
class FloodResult:
    """What the knee brings, and what is left of it under the flood."""

    settings: FloodSettings
    knee: LoadResult
    calm: LoadResult | None
    """The polite crowd by itself."""
    flood: LoadResult
    polite: LoadResult | None
    """The polite crowd beside the flood."""

    @property
    def results(self) -> list[LoadResult]:
        return [each for each in (self.knee, self.calm, self.flood, self.polite) if each is not None]

    @property
    def trouble(self) -> int:
        """Requests that a sound deployment does not have, warm-up included."""
        counts = [count for each in self.results for count in (each.figures.counts, each.figures.outside)]
        return sum(count.trouble for count in counts)

    @property
    def goodput(self) -> float:
        """Right answers a second under the flood, in those of the knee."""
        rate = sum(each.figures.throughput_rps for each in (self.flood, self.polite) if each is not None)
        return rate / self.knee.figures.throughput_rps

    @property
    def missed(self) -> list[str]:
        """Aims that do not hold, in words."""
        words = []
        if self.goodput < AIM_GOODPUT:
            words.append(f"goodput is below {100 * AIM_GOODPUT:.0f} % of the knee's")
        if (self.flood.figures.refusal_p95_ms or 0.0) >= AIM_REFUSAL_MS:
            words.append(f"refusals take {AIM_REFUSAL_MS:g} ms or more (p95)")
        return words

    @property
    def polite_share(self) -> float | None:
        """What the polite crowd keeps of what it had by itself."""
        if self.calm is None or self.polite is None or not self.calm.figures.throughput_rps:
            return None
        return self.polite.figures.throughput_rps / self.calm.figures.throughput_rps


def check_flood(settings: FloodSettings) -> None:
    """Raises InputError for numbers that no flood can have."""
    if not 1 < settings.at <= MOST_TIMES:
        raise InputError(f"--at must be above 1 and at most {MOST_TIMES:g}, not {settings.at:g}")
    if settings.knee is not None and not 1 <= settings.knee <= MOST_KNEE_USERS:
        raise InputError(f"--knee must be 1 to {MOST_KNEE_USERS} users, not {settings.knee}")
    if not 0 <= settings.polite <= MOST_KNEE_USERS:
        raise InputError(f"--polite must be 0 to {MOST_KNEE_USERS} users, not {settings.polite}")


def run_flood(settings: FloodSettings, target: Target, texts: Texts, say: Callable[[LoadResult], None]) -> FloodResult:
    """The knee, then the flood. Raises OnesweepError."""

    def measure(mode: str, users: int) -> LoadResult:
        result = run_load(settings.load, target, texts, mode, users)
        say(result)
        return result

    mode = settings.load.mode
    if settings.knee is None:
        knee = climb(mode, MOST_KNEE_USERS, measure).knee_result
        if knee is None:
            raise ServiceError(f"{mode} has no knee: not one user is answered")
    else:
        knee = measure(mode, settings.knee)
    if not knee.figures.throughput_rps:
        raise ServiceError(
            f"{knee.users} users got no right answer in {settings.load.seconds:g} s: give more --seconds"
        )
    calm = measure(mode, settings.polite) if settings.polite else None
    crowds = [Crowd(math.ceil(knee.users * settings.at))]
    crowds += [Crowd(settings.polite, settings.polite_token)] if settings.polite else []
    flood, *polite = run_crowds(settings.load, target, texts, crowds)
    for result in (flood, *polite):
        say(result)
    return FloodResult(settings, knee, calm, flood, polite[0] if polite else None)


def run_crowds(settings: LoadSettings, target: Target, texts: Texts, crowds: Sequence[Crowd]) -> list[LoadResult]:
    """Crowds at the same time, each from a process of its own; judged over the time that their windows have in
    common. Raises OnesweepError."""

    def plan(crowd: Crowd) -> LoadPlan:
        return replace(settings.plan(target.access, texts.cases, settings.mode, crowd.users), token=crowd.token)

    with contextlib.ExitStack() as stack:
        generators = [stack.enter_context(start_generator(target, plan(crowd))) for crowd in crowds]

        def hurry() -> None:
            for generator in generators:
                generator.hurry()

        stack.enter_context(on_signal(hurry))
        # each pipe has its reader, or a full one would hold its crowd up
        with ThreadPoolExecutor(len(generators)) as readers:
            recordings = list(readers.map(lambda generator: generator.drain(), generators))
        stopped = [generator.stopped for generator in generators]
    recordings = in_common(recordings)
    users = [crowd.users for crowd in crowds]
    results = [result_of(each, texts, settings.mode, count) for each, count in zip(recordings, users, strict=True)]
    return [replace(result, interrupted=ended) for result, ended in zip(results, stopped, strict=True)]


def in_common(recordings: Sequence[Recording]) -> list[Recording]:
    """The same with the time that all windows share for a window. Raises ServiceError where that is too short.

    Processes of one machine share the clock that windows are read off.
    """
    windows = [recording.window for recording in recordings if recording.window is not None]
    if len(windows) < len(recordings):  # one was stopped before it measured anything
        return list(recordings)
    begin_s, end_s = max(window.begin_s for window in windows), min(window.end_s for window in windows)
    if end_s - begin_s < LEAST_COMMON * max(window.seconds for window in windows):
        raise ServiceError(
            f"the crowds were there together for {max(end_s - begin_s, 0.0):.1f} s only: "
            "this machine starts them too far apart; give more --seconds"
        )

    def cut(window: Window) -> Window:
        share = (end_s - begin_s) / window.seconds
        return replace(window, begin_s=begin_s, end_s=end_s, processor_s=window.processor_s * share)

    return [replace(recording, window=cut(window)) for recording, window in zip(recordings, windows, strict=True)]
