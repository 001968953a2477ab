"""The report of a deployment under faults: sentences, tables, JSON and panels of the time line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.faults.growth import Slope, longest_lives
from onesweep.loadtest.faults.report import TITLE, FaultReport, ReportTable, draw_faults, seconds
from onesweep.loadtest.faults.serving_ledger import (
    Fate,
    Stalls,
    counts_by_mode,
    fate_of,
    longest_wait,
    reasons,
    stalls,
    undisturbed,
    wrong_words,
)
from onesweep.loadtest.faults.serving_run import ChaosResult
from onesweep.loadtest.faults.serving_testbed import SERVING_FAULTS, SERVING_WORDS
from onesweep.loadtest.report.chart import COLOURS, FAINT, INK, Panel, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AIM_S = 3.0  # to the next byte of a request whose stage was killed, 95 times of 100
SHOWN = 5
SLICE_S = 5.0
OTHER_COLOUR = "#777777"
MODE_HEAD = (
    *("mode", "requests", "right", "wrong", "lost", "turned away", "late", "replays", "refused", "called again"),
    *("p50 s", "p95 s", "max s"),
)
FAULT_HEAD = (
    *("fault", "times", "requests", "next byte p50 s", "p95 s", "max s"),
    *("met", "whole p95 s", "work x"),
)
LIFE_HEAD = ("process", "watched s", "most MB", "KB a minute", "most descriptors", "a minute")
DONE_HEAD = ("at s", "fault", "on", "for s", "whole again s later")


def serving_report(result: ChaosResult) -> FaultReport:
    """The report of `chaos` and of `soak`."""
    settings = result.settings
    requests = ReportTable("Requests", MODE_HEAD, mode_rows(result))
    cost = ReportTable("What faults cost the requests that they hit", FAULT_HEAD, fault_rows(result))
    processes = ReportTable("Processes", LIFE_HEAD, life_rows(result))
    faults = [cost, ReportTable("Faults", DONE_HEAD, done_rows(result), 0)] if result.faults else []
    last_s = max([result.end_s, *(answer.end_s for answer in result.answers)])
    return FaultReport(
        run=result,
        title=f"{settings.minutes:g} minutes, {len(result.faults)} faults, profile {settings.profile}",
        verdict=verdict(result),
        trouble=result.trouble,
        tables=[requests, *faults, processes],
        printed=[requests, *faults[:1], processes],
        faults=SERVING_FAULTS,
        words=SERVING_WORDS,
        settings={
            "requests at once": settings.requests_at_once,
            "patience of a request": f"{settings.patience_s:g} s",
            "seed": settings.seed,
        },
        record=chaos_record(result),
        seconds=last_s - result.begin_s,
        height=8.4,
        panels=[
            Panel(2.2, lambda axes: _draw_faults(axes, result)),
            Panel(1.1, lambda axes: _draw_answers(axes, result)),
            Panel(1.4, lambda axes: _draw_waits(axes, result)),
            Panel(1.1, lambda axes: _draw_memory(axes, result)),
        ],
    )


def mode_rows(result: ChaosResult) -> list[list[str]]:
    rows = []
    for mode, counted in counts_by_mode(result.answers, result.cases, result.texts).items():
        *counts, p50_s, p95_s, most_s = astuple(counted)
        rows.append([mode, *map(str, counts), seconds(p50_s), seconds(p95_s), seconds(most_s)])
    return rows


def fault_rows(result: ChaosResult) -> list[list[str]]:
    hit = [*stalls(result.answers, result.faults), undisturbed(result.answers, result.faults)]
    return [
        [
            *(s.kind, str(s.faults or "-"), str(len(s.waits_s)), *(seconds(s.percentile_s(p)) for p in (50, 95, 100))),
            *(str(len(s.met)), seconds(s.whole_p95_s), seconds(s.work)),
        ]
        for s in hit
    ]


def life_rows(result: ChaosResult) -> list[list[str]]:
    """A row for the longest life of each name."""
    return [
        [
            *(name, f"{life.seconds:.0f}", f"{max(life.rss_kb) / 1024:.0f}", slope_words(life.memory_slope)),
            *(f"{max(life.descriptors):.0f}", slope_words(life.descriptor_slope)),
        ]
        for name, life in sorted(longest_lives(result.lives).items())
    ]


def done_rows(result: ChaosResult) -> list[list[str]]:
    return [
        [
            *(f"{fault.begin_s - result.begin_s:.1f}", fault.kind, fault.target, f"{fault.end_s - fault.begin_s:.1f}"),
            "-" if fault.sound_s is None else f"{fault.sound_s - fault.end_s:.1f}",
        ]
        for fault in result.faults
    ]


def verdict(result: ChaosResult) -> list[str]:
    """The outcome, a sentence a line."""
    total = counts_by_mode(result.answers, result.cases, result.texts)["all"]
    words = [
        f"{total.requests} requests in {result.seconds / 60:.1f} min under {len(result.faults)} faults: "
        f"{total.right} right, {total.wrong} wrong, {total.lost} lost, "
        f"of floods {total.turned_away} turned away and {total.late} late; {total.replays} replays on other hosts, "
        f"{total.refused} refusals with a time to come back, {total.repeated} calls made again for another reason"
    ]
    kill = next((s for s in stalls(result.answers, result.faults) if s.kind == "kill"), None)
    if kill is not None and kill.waits_s:
        words.append(_kill_words(kill))
    if result.settings.audit:
        words.append(
            f"{result.audited} sweeps audited since the router last started, {result.accused} honest hosts accused"
        )
    words += [*result.omissions, *result.endings]
    words += [f"not usable at the end: {name}: {problem}" for name, problem in result.unusable.items()]
    words += result.growth
    if result.sessions_left:
        words.append(f"{result.sessions_left} sessions are still open on hosts after the last answer")
    words += [f"called again {count} x: {why}" for why, count in reasons(result.answers).most_common(SHOWN)]
    return words + wrong_words(result.answers, result.cases, result.texts)[:SHOWN]


def slope_words(slope: Slope | None) -> str:
    return "-" if slope is None else f"{slope.per_minute:+.1f} ± {slope.margin:.1f}"


def chaos_record(result: ChaosResult) -> dict[str, Any]:
    settings = result.settings

    def times(record: object, *names: str) -> dict[str, float | None]:
        """Moments of a record, since the run began."""
        moments = {name: getattr(record, name) for name in names}
        return {name: None if at_s is None else at_s - result.begin_s for name, at_s in moments.items()}

    def slope(found: Slope | None) -> list[float] | None:
        """With half the width of its 95 % interval."""
        return None if found is None else [found.per_minute, found.margin]

    counts = counts_by_mode(result.answers, result.cases, result.texts)
    return {
        "profile": settings.profile,
        "seed": settings.seed,
        "requests_at_once": settings.requests_at_once,
        "patience_s": settings.patience_s,
        "seconds": result.seconds,
        "verdict": verdict(result),
        "modes": {mode: asdict(each) for mode, each in counts.items()},
        "faults": [{**vars(fault), **times(fault, "begin_s", "end_s", "sound_s")} for fault in result.faults],
        "stalls": {
            s.kind: {"faults": s.faults, "waits_s": s.waits_s, "whole_p95_s": s.whole_p95_s, "work": s.work}
            for s in [*stalls(result.answers, result.faults), undisturbed(result.answers, result.faults)]
        },
        "processes": {
            name: {
                "seconds": life.seconds,
                "most_rss_kb": max(life.rss_kb),
                "most_descriptors": max(life.descriptors),
                "rss_kb_per_minute": slope(life.memory_slope),
                "descriptors_per_minute": slope(life.descriptor_slope),
            }
            for name, life in longest_lives(result.lives).items()
        },
        "sessions_left": result.sessions_left,
        "unusable": result.unusable,
        "ended": result.ended,
        "audit": {"share": settings.audit, "audited": result.audited, "accused": result.accused},
        "requests": [
            {
                "mode": result.cases[answer.case].mode,
                **times(answer, "begin_s", "end_s"),
                "fate": fate_of(answer, result.texts).value,
                "replays": answer.replays,
                "calls": [each.code for each in answer.tries],
                "flood": not answer.first,
            }
            for answer in result.answers
        ],
    }


def _kill_words(kill: Stalls) -> str:
    p95_s = kill.percentile_s(95) or 0.0
    held = "holds" if p95_s < AIM_S else "does not hold"
    return (
        f"a stage killed in the middle of a request, a replica there: {len(kill.waits_s)} requests, next byte after "
        f"{seconds(kill.percentile_s(50))} s (p50), {p95_s:.2f} s (p95): the aim of {AIM_S:g} s {held}"
    )


def _draw_faults(axes: Axes, result: ChaosResult) -> None:
    """A row for each host, link and the router that something happened to."""
    names = sorted({fault.target for fault in result.faults}, key=lambda name: (" - " in name, name), reverse=True)
    title = "faults; a thin line: until every host and link was usable again"
    draw_faults(axes, [(f, f.sound_s) for f in result.faults], SERVING_FAULTS, result.begin_s, names, title)


def _draw_answers(axes: Axes, result: ChaosResult) -> None:
    """Answers a second, stacked by fate."""
    count = int((result.end_s - result.begin_s) / SLICE_S) + 1
    rates: dict[Fate, list[float]] = {fate: [0.0] * count for fate in Fate}
    for answer in result.answers:
        place = int((answer.end_s - result.begin_s) / SLICE_S)
        if 0 <= place < count:
            rates[fate_of(answer, result.texts)][place] += 1 / SLICE_S
    moments, below = [i * SLICE_S for i in range(count)], [0.0] * count
    for fate, colour in zip(Fate, (COLOURS[2], COLOURS[1], INK, FAINT, OTHER_COLOUR), strict=True):
        if any(rates[fate]):
            axes.bar(moments, rates[fate], SLICE_S, bottom=below, align="edge", color=colour, label=fate.value)
            below = [low + rate for low, rate in zip(below, rates[fate], strict=True)]
    axes.set_title(f"answers a second, in slices of {SLICE_S:g} s", **TITLE)
    axes.legend(**legend_above(len(Fate)))


def _draw_waits(axes: Axes, result: ChaosResult) -> None:
    """The longest wait for a byte in each request of the steady load."""
    dots: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    for answer in result.answers:
        if answer.first and answer.arrivals_s:
            end_s, wait_s = longest_wait(answer)
            dots[bool(answer.replays or answer.tries)].append((end_s - result.begin_s, wait_s))
    for moved, colour, words in ((False, FAINT, "undisturbed"), (True, COLOURS[1], "done again, wholly or in part")):
        if dots[moved]:
            axes.plot(*zip(*dots[moved], strict=True), "o", ms=2.2, color=colour, label=words, alpha=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("longest wait for a byte in each request, seconds", **TITLE)
    axes.legend(**legend_above(2))


def _draw_memory(axes: Axes, result: ChaosResult) -> None:
    names = sorted({life.name for life in result.lives})
    colours = dict(zip(names, (*COLOURS, INK, FAINT), strict=False))
    labelled: set[str] = set()
    for life in result.lives:
        moments = [at_s - result.begin_s for at_s in life.at_s]
        label = f"_{life.name}" if life.name in labelled else life.name  # matplotlib leaves out what begins with _
        labelled.add(life.name)
        colour = colours.get(life.name, OTHER_COLOUR)
        axes.plot(moments, [kb / 1024 for kb in life.rss_kb], color=colour, linewidth=1, label=label)
    axes.set_title("resident memory of each process, MB", **TITLE)
    axes.legend(**legend_above(len(names) or 1))
