"""`onesweep bench flood`: many times more users than a deployment carries, its goodput and the time of its refusals."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onesweep.loadtest.load.generator import Recording, start_generator
from onesweep.loadtest.load.plan import LoadPlan, LoadSettings, Window
from onesweep.loadtest.load.run import LoadResult, climb, result_of, run_load
from onesweep.loadtest.report.table import number
from onesweep.loadtest.workload.testbed import Testbed
from onesweep.loadtest.workload.texts import Texts
from onesweep.serving.router.request import PRIORITIES
from onesweep.stages.errors import ServiceError
from onesweep.stages.signals import on_signal
from onesweep.stages.wire.flags import TOKEN_VARIABLE
from onesweep.stages.wire.tokens import Key, new_token, token_hash, write_tokens

AIM_GOODPUT = 0.9  # of the knee's right answers a second
AIM_REFUSAL_MS = 50.0
LEAST_COMMON = 0.5  # of a window: the crowds' windows must have so much in common
MOST_KNEE_USERS = 64


@dataclass(frozen=True)
class UserGroup:
    """Users that come together."""

    users: int
    token: str = ""  # empty: that of this process
    priority: str = PRIORITIES[0]


@dataclass(frozen=True)
class FloodSettings:
    """A load run's settings, whose `users` are those of the knee once it is known."""

    load: LoadSettings
    at: float  # the flood's users, in those of the knee
    knee: int | None  # None: it is searched
    polite: int  # users of a second crowd beside the flood; 0: none
    polite_token: str = ""  # of the second crowd, where the router asks for tokens
    batch: bool = False  # a second flood, of batch requests


@dataclass(frozen=True)
class FloodResult:
    """Figures at the knee and under the flood."""

    settings: FloodSettings
    knee: LoadResult
    calm: LoadResult | None  # the polite crowd by itself
    flood: LoadResult
    polite: LoadResult | None  # the polite crowd beside the flood
    batch: LoadResult | None = None  # a flood of batch requests
    interactive: LoadResult | None = None  # the polite crowd beside that

    @property
    def results(self) -> list[LoadResult]:
        rows = (self.knee, self.calm, self.flood, self.polite, self.batch, self.interactive)
        return [each for each in rows if each is not None]

    @property
    def trouble(self) -> int:
        """Requests that no sound deployment has, warm-up included."""
        counts = [count for each in self.results for count in (each.figures.counts, each.figures.outside)]
        return sum(count.trouble for count in counts)

    @property
    def goodput(self) -> float:
        """Right answers a second under the flood, in those of the knee."""
        rate = sum(each.figures.throughput_rps for each in (self.flood, self.polite) if each is not None)
        return rate / self.knee.figures.throughput_rps

    @property
    def missed(self) -> list[str]:
        """Sentences for the aims that do not hold."""
        words = []
        if self.goodput < AIM_GOODPUT:
            words.append(f"goodput is below {100 * AIM_GOODPUT:.0f} % of the knee's")
        if (self.flood.figures.refusal_p95_ms or 0.0) >= AIM_REFUSAL_MS:
            words.append(f"refusals take {AIM_REFUSAL_MS:g} ms or more (p95)")
        return words

    @property
    def polite_share(self) -> float | None:
        """Right answers a second of the polite crowd beside the flood, in those that it has by itself."""
        if self.calm is None or self.polite is None or not self.calm.figures.throughput_rps:
            return None
        return self.polite.figures.throughput_rps / self.calm.figures.throughput_rps


def run_flood(settings: FloodSettings, target: Testbed, texts: Texts, say: Callable[[LoadResult], None]) -> FloodResult:
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
    crowds = [UserGroup(math.ceil(knee.users * settings.at))]
    crowds += [UserGroup(settings.polite, settings.polite_token)] if settings.polite else []
    flood, *polite = run_crowds(settings.load, target, texts, crowds)
    classes = list[LoadResult]()
    if settings.batch:
        crowds = [replace(crowds[0], priority=PRIORITIES[1]), *crowds[1:]]
        classes = run_crowds(settings.load, target, texts, crowds)
    for result in (flood, *polite, *classes):
        say(result)
    batch, interactive = (*classes, None, None)[:2]
    return FloodResult(settings, knee, calm, flood, polite[0] if polite else None, batch, interactive)


def run_crowds(settings: LoadSettings, target: Testbed, texts: Texts, crowds: Sequence[UserGroup]) -> list[LoadResult]:
    """Crowds at the same time, each from a process of its own; judged over the time that their windows have in
    common. Raises OnesweepError."""

    def plan(crowd: UserGroup) -> LoadPlan:
        plan = settings.plan(target.access, texts.cases, settings.mode, crowd.users)
        return replace(plan, token=crowd.token, priority=crowd.priority)

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
    """The recordings with the time that all windows share as their window. Raises ServiceError where that is short.

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


@contextlib.contextmanager
def two_keys(settings: FloodSettings) -> Iterator[FloodSettings]:
    """Settings of a deployment that asks for tokens; in the `with` block the flood's is this process's own."""
    own, polite = new_token(), new_token()
    before = os.environ.get(TOKEN_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="onesweep-keys-") as directory:
        path = Path(directory) / "tokens.toml"
        write_tokens(path, [Key("flood", token_hash(own)), Key("polite", token_hash(polite))])
        target = settings.load.target
        options = (*target.router_options, "--tokens", str(path))
        load = replace(settings.load, target=replace(target, router_options=options))
        os.environ[TOKEN_VARIABLE] = own
        try:
            yield replace(settings, load=load, polite_token=polite)
        finally:
            os.environ.pop(TOKEN_VARIABLE)
            if before is not None:
                os.environ[TOKEN_VARIABLE] = before


def flood_notes(result: FloodResult) -> list[str]:
    """A sentence a line."""
    figures, knee = result.flood.figures, result.knee
    held = "holds" if result.goodput >= AIM_GOODPUT else "does not hold"
    notes = [
        f"knee: {knee.users} users, {knee.figures.throughput_rps:.2f} right answers a second",
        f"{result.flood.users} users: {100 * result.goodput:.0f} % of the knee's right answers a second; the aim of "
        f"{100 * AIM_GOODPUT:.0f} % {held}",
    ]
    if figures.refusal_p95_ms is None:
        notes.append("nobody was refused: the router takes as many requests at once (its --max-requests)")
    else:
        quick = "holds" if figures.refusal_p95_ms < AIM_REFUSAL_MS else "does not hold"
        notes.append(
            f"{figures.counts.refused} refusals after {number(figures.refusal_p50_ms)} ms (p50), "
            f"{number(figures.refusal_p95_ms)} ms (p95); the aim of {AIM_REFUSAL_MS:g} ms {quick}"
        )
    if result.polite is not None and result.polite_share is not None:
        keys = "its key gets the next free place" if result.settings.polite_token else "without --keys it is one of all"
        notes.append(
            f"a second crowd, of {result.polite.users}, keeps {100 * result.polite_share:.0f} % of the right answers a "
            f"second that it has by itself: {keys}, and then shares the hosts with the requests that the router takes "
            "at once (--max-requests)"
        )
    if result.interactive is not None and result.calm is not None and result.polite is not None:
        shown = [number(each.figures.p95_ms) for each in (result.calm, result.interactive, result.polite)]
        notes.append(
            f"p95 of interactive requests: {shown[0]} ms alone, {shown[1]} ms beside the flood as batch requests, "
            f"{shown[2]} ms beside it without classes"
        )
    return notes


def flood_record(result: FloodResult) -> dict[str, Any]:
    rows = {"knee": result.knee, "calm": result.calm, "flood": result.flood, "polite": result.polite}
    rows |= {"batch": result.batch, "interactive": result.interactive}
    return {
        "mode": result.settings.load.mode,
        "at": result.settings.at,
        "goodput": result.goodput,
        "polite_share": result.polite_share,
        "missed": result.missed,
        **{name: {"users": r.users, **asdict(r.figures)} for name, r in rows.items() if r is not None},
    }
