"""The report of a deployment under faults: tables, sentences and a JSON record."""

from dataclasses import asdict, astuple
from typing import Any

from loadtest.commands import BenchReport
from loadtest.faults.report import ReportTable, fault_report, seconds
from loadtest.faults.serving_ledger import (
    Stalls,
    counts_by_mode,
    fate_of,
    reasons,
    stalls,
    undisturbed,
    wrong_words,
)
from loadtest.faults.serving_run import ChaosResult
from loadtest.faults.usage import longest_lives

AIM_S = 3.0  # to the next byte of a request whose stage was killed, 95 times of 100
SHOWN = 5
MODE_HEAD = (
    *("mode", "requests", "right", "wrong", "lost", "turned away", "late", "replays", "refused", "called again"),
    *("p50 s", "p95 s", "max s"),
)
FAULT_HEAD = ("fault", "times", "requests", "next byte p50 s", "p95 s", "max s")
USAGE_HEAD = (
    *("process", "watched s", "MB when warm", "MB at the end", "most MB"),
    *("descriptors when warm", "at the end", "most"),
)


def serving_report(result: ChaosResult) -> BenchReport:
    """The report of `bench chaos`."""
    faults = ReportTable("What faults cost the requests that they hit", FAULT_HEAD, fault_rows(result))
    tables = [ReportTable("Requests", MODE_HEAD, mode_rows(result)), *([faults] if result.faults else [])]
    tables.append(ReportTable("Processes", USAGE_HEAD, usage_rows(result)))
    return fault_report(tables, verdict(result), chaos_record(result), trouble=result.trouble)


def mode_rows(result: ChaosResult) -> list[list[str]]:
    rows = []
    for mode, counted in counts_by_mode(result.answers, result.cases, result.texts).items():
        *counts, p50_s, p95_s, most_s = astuple(counted)
        rows.append([mode, *map(str, counts), seconds(p50_s), seconds(p95_s), seconds(most_s)])
    return rows


def fault_rows(result: ChaosResult) -> list[list[str]]:
    hit = [*stalls(result.answers, result.faults), undisturbed(result.answers, result.faults)]
    return [
        [s.kind, str(s.faults or "-"), str(len(s.waits_s)), *(seconds(s.percentile_s(p)) for p in (50, 95, 100))]
        for s in hit
    ]


def usage_rows(result: ChaosResult) -> list[list[str]]:
    """A row for the longest life of each name: what it held once it was warm, at the end, and at most."""
    return [
        [
            *(name, f"{usage.seconds:.0f}"),
            *(f"{mb:.0f}" for mb in (usage.rss_mb[usage.warm], usage.rss_mb[-1], max(usage.rss_mb))),
            *map(str, (usage.descriptors[usage.warm], usage.descriptors[-1], max(usage.descriptors))),
        ]
        for name, usage in sorted(longest_lives(result.usages).items())
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
    if result.sessions_left:
        words.append(f"{result.sessions_left} sessions are still open on hosts after the last answer")
    words += [f"called again {count} x: {why}" for why, count in reasons(result.answers).most_common(SHOWN)]
    return words + wrong_words(result.answers, result.cases, result.texts)[:SHOWN]


def chaos_record(result: ChaosResult) -> dict[str, Any]:
    settings = result.settings

    def times(record: object, *names: str) -> dict[str, float | None]:
        """Moments of a record, since the run began."""
        moments = {name: getattr(record, name) for name in names}
        return {name: None if at_s is None else at_s - result.begin_s for name, at_s in moments.items()}

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
            s.kind: {"faults": s.faults, "waits_s": s.waits_s}
            for s in [*stalls(result.answers, result.faults), undisturbed(result.answers, result.faults)]
        },
        "processes": {
            name: {
                "seconds": usage.seconds,
                "rss_mb": [usage.rss_mb[usage.warm], usage.rss_mb[-1], max(usage.rss_mb)],
                "descriptors": [usage.descriptors[usage.warm], usage.descriptors[-1], max(usage.descriptors)],
            }
            for name, usage in longest_lives(result.usages).items()
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
