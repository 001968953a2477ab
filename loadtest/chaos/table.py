"""A run in words: Markdown tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.chaos.account import Stalls, calm, reasons, stalls, tallies, wrong_words
from loadtest.chaos.run import ChaosResult
from loadtest.chaos.slope import Slope

AIM_S = 3.0
"""To the next byte of a request whose stage was killed, 95 times of 100."""
SHOWN = 5
MODE_HEAD = (
    "mode",
    "requests",
    "right",
    "wrong",
    "lost",
    "turned away",
    "late",
    "replays",
    "refused",
    "called again",
    "p50 s",
    "p95 s",
    "max s",
)
FAULT_HEAD = ("fault", "times", "requests", "next byte p50 s", "p95 s", "max s")
LIFE_HEAD = ("process", "watched s", "most MB", "KB a minute", "most descriptors", "a minute")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; figures stand to the right."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mode_rows(result: ChaosResult) -> list[list[str]]:
    rows = []
    for mode, t in tallies(result.answers, result.cases, result.texts).items():
        counts = [t.requests, t.right, t.wrong, t.lost, t.turned_away, t.late, t.replays, t.refused, t.repeated]
        rows.append([mode, *map(str, counts), seconds(t.p50_s), seconds(t.p95_s), seconds(t.most_s)])
    return rows


def fault_rows(result: ChaosResult) -> list[list[str]]:
    hit = [*stalls(result.answers, result.happened), calm(result.answers, result.happened)]
    return [
        [s.kind, str(s.faults or "-"), str(len(s.waits_s)), *(seconds(s.percentile_s(p)) for p in (50, 95, 100))]
        for s in hit
    ]


def life_rows(result: ChaosResult) -> list[list[str]]:
    """Of each process that was watched long enough, the one that lived longest under its name."""
    rows = []
    for name, life in sorted(result.longest.items()):
        rows.append(
            [
                name,
                f"{life.seconds:.0f}",
                f"{max(life.rss_kb) / 1024:.0f}",
                slope_words(life.memory_slope),
                f"{max(life.descriptors):.0f}",
                slope_words(life.descriptor_slope),
            ]
        )
    return rows


def verdict(result: ChaosResult) -> list[str]:
    """What came out, a sentence a line."""
    total = tallies(result.answers, result.cases, result.texts)["all"]
    minutes = (result.end_s - result.begin_s) / 60
    words = [
        f"{total.requests} requests in {minutes:.1f} min under {len(result.happened)} faults: "
        f"{total.right} right, {total.wrong} wrong, {total.lost} lost, "
        f"of floods {total.turned_away} turned away and {total.late} late; {total.replays} replays on other hosts, "
        f"{total.refused} refusals with a time to come back, {total.repeated} calls made again for another reason"
    ]
    kill = next((s for s in stalls(result.answers, result.happened) if s.kind == "kill"), None)
    if kill is not None and kill.waits_s:
        words.append(_kill_words(kill))
    if result.settings.audit:
        words.append(
            f"{result.audited} sweeps audited since the router last started, {result.accused} honest hosts accused"
        )
    words += [f"left out: {reason}" for reason in result.left_out]
    words += [f"{name} had ended: {last}" for name, last in result.ended.items()]
    words += [f"not usable at the end: {name}: {problem}" for name, problem in result.unusable.items()]
    words += result.growth
    if result.sessions_left:
        words.append(f"{result.sessions_left} sessions are still open on hosts after the last answer")
    words += [f"called again {count} x: {why}" for why, count in reasons(result.answers).most_common(SHOWN)]
    return words + wrong_words(result.answers, result.cases, result.texts)[:SHOWN]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def slope_words(slope: Slope | None) -> str:
    return "-" if slope is None else f"{slope.per_minute:+.1f} ± {slope.margin:.1f}"


def _kill_words(kill: Stalls) -> str:
    p95_s = kill.percentile_s(95) or 0.0
    held = "holds" if p95_s < AIM_S else "does not hold"
    return (
        f"a stage killed in the middle of a request, a replica there: {len(kill.waits_s)} requests, next byte after "
        f"{seconds(kill.percentile_s(50))} s (p50), {p95_s:.2f} s (p95): the aim of {AIM_S:g} s {held}"
    )
