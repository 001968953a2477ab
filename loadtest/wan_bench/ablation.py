"""What each measure is worth: one thing is changed at a time, and held against the same requests without the change.

A change of a server's flags gets a deployment of its own in the same lab, beside the unchanged one, and their requests
take turns. The first comparison changes nothing: what it shows is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.table import aligned
from loadtest.wan.lab import Lab
from loadtest.wan_bench.arms import Arm, Length, ModeChoice, codecs_of
from loadtest.wan_bench.deployment import FIRST_PORT, deployed
from loadtest.wan_bench.floor import Course
from loadtest.wan_bench.prompts import NOVEL, Prompts
from loadtest.wan_bench.rows import length_of, number
from loadtest.wan_bench.station import Station, open_station
from loadtest.wan_bench.turns import Sample, Seat, take_turns
from stages.errors import OnesweepError

IDLE_S = 5.0
AT_ONCE = 8
OTHER_PORT = FIRST_PORT + 100
"""Of the changed deployment's router; the unchanged one keeps the usual ports."""

_HEADER = (
    *("measure", "change", "mode", "length", "idle s", "at once", "base p50", "p50 ms", "difference ms", "middle half"),
    *("less compute", "x base", "wire bytes", "same text", "failed"),
)


@dataclass(frozen=True)
class Measure:
    """One thing that the servers do for latency, and the flags without it."""

    name: str
    change: str
    host_options: tuple[str, ...] = ()
    router_options: tuple[str, ...] = ()
    route: str = "ring"
    idle_s: float = 0.0
    at_once: int = 1


MEASURES = (
    Measure("(noise)", "nothing"),
    Measure("ring", "--route nested", router_options=("--route", "nested"), route="nested"),
    Measure("direct hops", "--route router", router_options=("--route", "router"), route="router"),
    Measure("keep-warm", "--keep-warm-ms 0", ("--keep-warm-ms", "0"), ("--keep-warm-ms", "0"), idle_s=IDLE_S),
    Measure("backend", "--backend torch", ("--backend", "torch")),
    Measure("backend", "--backend onnxruntime", ("--backend", "onnxruntime")),
    Measure("batching", "--batch 1", ("--batch", "1"), at_once=AT_ONCE),
)


@dataclass(frozen=True)
class Workload:
    """The requests that every comparison makes."""

    choices: tuple[ModeChoice, ...]
    lengths: tuple[Length, ...]
    requests: int
    seed: int
    prompts: Prompts = NOVEL
    temperature: float | None = None
    host_options: tuple[str, ...] = ()
    """Of every deployment."""

    def arms(self, idle_s: float = 0.0) -> list[Arm]:
        """The longest output of each mode; the shortest where every byte is a trip."""
        arms = []
        for choice in self.choices:
            if choice.mode == "local":
                continue
            pick = min if choice.mode.startswith("ar") else max
            length = pick(self.lengths, key=lambda length: length.count)
            arms.append(Arm(choice, length, idle_s, self.prompts, self.temperature))
            if idle_s and choice.mode == "sweep" and choice.codec is None:
                # what fits TCP's first window cannot show what an open window is worth
                arms.append(replace(arms[-1], choice=replace(choice, codec="fp32")))
        return arms


Pairs = list[tuple[Sample, Sample]]
"""The same request without and with the change."""


def ablate(
    lab: Lab, checkpoint: Path, base: Station, work: Workload, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each measure and mode. A change that the servers refuse is a row that says why."""
    tell(f"{base.profile}: ablation, codecs ...")
    yield from _codecs(base, work)
    for measure in MEASURES:
        tell(f"{base.profile}: ablation, {measure.name}: {measure.change} ...")
        arms = work.arms(measure.idle_s)
        try:
            yield from _measure(lab, checkpoint, base, work, measure, arms)
        except OnesweepError as error:
            yield from (refused_row(base.profile, measure, arm, str(error)) for arm in arms)


def _measure(
    lab: Lab, checkpoint: Path, base: Station, work: Workload, measure: Measure, arms: list[Arm]
) -> list[dict[str, Any]]:
    course = Course(base.course.hosts, base.course.link, measure.route)
    options = (*work.host_options, *measure.host_options)
    with (
        deployed(lab, checkpoint, options, measure.router_options, first_port=OTHER_PORT) as deployment,
        open_station(base.profile, deployment, course, lab.command) as changed,
    ):
        pairs = [tuple(Seat(station, arm, measure.at_once) for station in (base, changed)) for arm in arms]
        samples = collect([seat for pair in pairs for seat in pair], work)
        return [
            ablation_row(base.profile, measure, arm, list(zip(samples[before], samples[after], strict=True)))
            for arm, (before, after) in zip(arms, pairs, strict=True)
        ]


def _codecs(base: Station, work: Workload) -> Iterator[dict[str, Any]]:
    """A setting of a request: all codecs take turns on one deployment."""
    for arm in work.arms():
        if arm.choice.codec is not None:
            continue
        seats = {
            codec: Seat(base, replace(arm, choice=replace(arm.choice, codec=codec)))
            for codec in codecs_of(arm.choice.mode)
        }
        plain = Seat(base, arm)
        samples = collect([plain, *seats.values()], work)
        for codec, seat in seats.items():
            pairs = list(zip(samples[plain], samples[seat], strict=True))
            yield ablation_row(base.profile, Measure("codec", codec), arm, pairs)


def collect(seats: Sequence[Seat], work: Workload) -> dict[Seat, list[Sample]]:
    """All samples of each seat, in the order of their seeds."""
    samples: dict[Seat, list[Sample]] = {seat: [] for seat in seats}
    for seat, taken in take_turns(seats, work.requests, work.seed):
        samples[seat] += taken
    return samples


def ablation_row(profile: str, measure: Measure, arm: Arm, pairs: Pairs) -> dict[str, Any]:
    """Medians over the pairs of which both requests ended well."""
    good = [(before, after) for before, after in pairs if not before.error and not after.error]
    row = refused_row(profile, measure, arm, next((s.error for pair in pairs for s in pair if s.error), ""))
    row |= {"requests": len(pairs), "failures": len(pairs) - len(good)}
    if not good:
        return row
    differences = sorted(after.latency_ms - before.latency_ms for before, after in good)
    return row | {
        "base_p50_ms": statistics.median(before.latency_ms for before, _ in good),
        "p50_ms": statistics.median(after.latency_ms for _, after in good),
        "difference_ms": statistics.median(differences),
        "net_difference_ms": statistics.median(_net_ms(after) - _net_ms(before) for before, after in good),
        "net_ratio": statistics.median(_net_ms(after) / _net_ms(before) for before, after in good),
        "difference_quartiles_ms": [differences[len(differences) // 4], differences[-1 - len(differences) // 4]],
        "ratio": statistics.median(after.latency_ms / before.latency_ms for before, after in good),
        "floor_ms": statistics.median(after.floor.total_ms for _, after in good if after.floor),
        "wire_bytes": statistics.median(_booked(after)["wire_bytes_total"] for _, after in good),
        "base_wire_bytes": statistics.median(_booked(before)["wire_bytes_total"] for before, _ in good),
        "same_text": all(_booked(before)["output_hex"] == _booked(after)["output_hex"] for before, after in good),
    }


def refused_row(profile: str, measure: Measure, arm: Arm, error: str) -> dict[str, Any]:
    """A row without figures."""
    return {
        "profile": profile,
        "measure": measure.name,
        "change": measure.change,
        "mode": arm.choice.label,
        "length": arm.length.count,
        "unit": arm.length.unit,
        "idle_s": arm.idle_s,
        "at_once": measure.at_once,
        "requests": 0,
        "failures": 0,
        "error": error or None,
        **dict.fromkeys(("base_p50_ms", "p50_ms", "difference_ms", "difference_quartiles_ms", "ratio", "floor_ms")),
        **dict.fromkeys(("net_difference_ms", "net_ratio", "wire_bytes", "base_wire_bytes", "same_text")),
    }


def ablation_table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal; below it, what was refused or failed."""
    lines = [aligned(_HEADER, [_cells(row) for row in rows])]
    lines += [f"{row['change']}, {row['mode']}: {row['error']}" for row in rows if row["error"]]
    return "\n".join(dict.fromkeys(lines))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    quartiles = row["difference_quartiles_ms"]
    return (
        *(row["measure"], row["change"], row["mode"], length_of(row)),
        *(f"{row['idle_s']:g}", str(row["at_once"])),
        *(number(row[key]) for key in ("base_p50_ms", "p50_ms", "difference_ms")),
        "-" if quartiles is None else f"{quartiles[0]:+.1f} {quartiles[1]:+.1f}",
        number(row["net_difference_ms"]),
        number(row["ratio"], 2),
        number(row["wire_bytes"], 0),
        {True: "yes", False: "no", None: "-"}[row["same_text"]],
        "refused" if row["requests"] == 0 else str(row["failures"]),
    )


def _net_ms(sample: Sample) -> float:
    """Latency without the arithmetic: on a busy machine that varies by more than a trip saved."""
    assert sample.floor is not None
    return sample.latency_ms - sample.floor.compute_ms


def _booked(sample: Sample) -> dict[str, Any]:
    assert sample.account is not None
    return sample.account
