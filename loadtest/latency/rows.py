"""Rows of the table, one for each arm on each profile, and the table that a terminal and a page show."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onesweep.loadtest.latency.floor import Course, least_delay_ms, wire_ms
from onesweep.loadtest.latency.interleave import Sample, ended_well
from onesweep.loadtest.report.table import Column, Table, number_column, percentile, text_column
from onesweep.loadtest.workload.arms import LEVELS, SPECULATIVE, Arm

Row = dict[str, Any]
# Keys of a row that pictures have: how many are those drawn in one process, and how many were compared.
NO_PIXELS: Row = dict.fromkeys(("same_as_one", "compared"))
# The parts of a latency. `rest` is what remains: gRPC, Python, TCP, headers, waiting for a processor.
PARTS = ("delay", "serialisation", "compute", "queue", "rest")


def row_of(profile: str, arm: Arm, samples: Sequence[Sample]) -> Row:
    """Medians over the requests that ended well; failures are counted, and the most frequent one is quoted."""
    good, error = ended_well(samples)
    latencies, parts = sorted(sample.latency_ms for sample in good), [parts_ms(sample) for sample in good]

    def median(value: Callable[[Sample], float]) -> float | None:
        return statistics.median(map(value, good)) if good else None

    def count(value: Callable[[Sample], int]) -> int | None:
        """The lower median: a count that some request had, not a mean of two."""
        return statistics.median_low(map(value, good)) if good else None

    row = {
        "profile": profile,
        "mode": arm.choice.label,
        "text": arm.prompts.name,
        "length": arm.length.count,
        "unit": arm.length.unit,
        "temperature": arm.temperature,
        "idle_s": arm.idle_s,
        "requests": len(samples),
        "failures": len(samples) - len(good),
        "error": error,
        "p50_ms": median(lambda s: s.latency_ms),
        "p95_ms": percentile(latencies, 95),
        "first_byte_ms": median(lambda s: s.first_byte_ms),
        "floor_ms": median(lambda s: s.least.total_ms),
        "ratio": median(lambda s: s.ratio),
        "sweeps": count(lambda s: int(s.booked["sweeps"])),
        "hops": count(lambda s: int(s.booked["hops"])),
        "wire_bytes": count(lambda s: int(s.booked["wire_bytes_total"])),
        "largest_hop_bytes": count(lambda s: max(s.booked["wire_bytes"], default=0)),
        "host_seconds": median(lambda s: s.host_ms / 1000),
        # part by part, so they need not add up to a median latency
        "parts_ms": {name: statistics.median(part[name] for part in parts) for name in PARTS} if good else None,
    }
    if arm.length.draws:
        return row | NO_PIXELS
    return row | {
        "tokens": count(lambda s: int(s.booked["output_tokens"])),
        "tokens_per_s": median(lambda s: int(s.booked["output_tokens"]) / s.latency_ms * 1000),
        "acceptance": acceptance(good),
        "same_as_ar": None,
        "compared": None,
    }


def parts_ms(sample: Sample) -> dict[str, float]:
    """The parts of one request's latency, milliseconds; they add up to it."""
    queue_ms = sum(host["queue_ms"] for host in sample.booked["hosts"])
    known = (sample.least.delay_ms, sample.least.serialisation_ms, sample.least.compute_ms, queue_ms)
    return dict(zip(PARTS, (*known, sample.latency_ms - sum(known)), strict=True))


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Share of the draft tokens whose place was reached that were right; None where nothing was drafted."""
    reached = sum(sample.booked.get("reached") or 0 for sample in samples)
    return sum(sample.booked["accepted"] for sample in samples) / reached if reached else None


def same_as_ar(arm: Arm, taken: Mapping[Arm, Sequence[Sample]]) -> Row:
    """Texts equal to those of `ar` with the same seeds, for a mode that promises them; `taken`: of one profile."""
    exact = arm.choice.mode == SPECULATIVE
    alike = [other for other in taken if other.choice.mode == "ar" and replace(other, choice=arm.choice) == arm]
    if not exact or not alike:
        return {}
    # with the same codec, if there is one: int8 writes another text
    other = next((other for other in alike if other.choice.codec == arm.choice.codec), alike[0])
    theirs, ours = (
        {s.number: s.account["output_hex"] for s in taken[each] if s.account is not None} for each in (other, arm)
    )
    both = theirs.keys() & ours.keys()
    if not both:
        return {}
    return {"same_as_ar": sum(theirs[number] == ours[number] for number in both), "compared": len(both)}


def length_of(row: Row) -> str:
    """The output length that was requested."""
    return f"{row['length']} {row['unit']}"


def compared(name: str) -> Callable[[Row], str]:
    """A cell: how many of those that were compared are the same."""
    return lambda row: "-" if row["compared"] is None else f"{row[name]} of {row['compared']}"


ARM: tuple[Column[Row], ...] = (
    *map(text_column, ("profile", "text", "mode")),
    ("length", length_of),
    ("idle s", lambda row: f"{row['idle_s']:g}"),
)
WAN: Table[Row] = Table(
    (
        *ARM,
        number_column("p50 s", "p50_ms", 3, scale=1e-3),
        number_column("floor s", "floor_ms", 3, scale=1e-3),
        number_column("x floor", "ratio", 2),
        number_column("sweeps", "sweeps", 0),
        number_column("tokens/s", "tokens_per_s"),
        number_column("accepted", "acceptance", 2),
        number_column("wire bytes", "wire_bytes", 0),
        number_column("host-s", "host_seconds", 2),
        ("as ar", compared("same_as_ar")),
        text_column("failed", "failures"),
    )
)

# Of pictures: no figure of texts, and what a picture takes of the hosts.
PICTURES: Table[Row] = Table(
    (
        *map(text_column, ("profile", "mode")),
        number_column("levels", "length", 0),
        number_column("p50 s", "p50_ms", 3, scale=1e-3),
        number_column("p95 s", "p95_ms", 3, scale=1e-3),
        number_column("floor s", "floor_ms", 3, scale=1e-3),
        number_column("x floor", "ratio", 3),
        number_column("trips", "sweeps", 0),
        number_column("hops", "hops", 0),
        number_column("largest hop", "largest_hop_bytes", 0),
        number_column("wire bytes", "wire_bytes", 0),
        number_column("host ms a picture", "host_seconds", 1, scale=1e3),
        ("as one process", compared("same_as_one")),
        ("idle s", lambda row: f"{row['idle_s']:g}"),
        text_column("failed", "failures"),
    ),
    text_columns=2,
)


def drawn(rows: Sequence[Row]) -> bool:
    """True for rows of pictures: a bundle either writes or draws."""
    return any(row["unit"] == LEVELS for row in rows)


def wan_table(rows: Sequence[Row]) -> str:
    """For a terminal; below it, why requests failed."""
    return "\n".join([(PICTURES if drawn(rows) else WAN).aligned(rows), *failures(rows)])


def failures(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row with requests that failed."""
    return [
        f"{row['profile']}, {row['text']}, {row['mode']}, {length_of(row)}: "
        f"{row['failures']} of {row['requests']} failed, such as: {row['error']}"
        for row in rows
        if row["failures"]
    ]


# One sweep for a chart: its way, and the time of each part of it.


def single_sweep(profile: str, course: Course, arm: Arm, samples: Sequence[Sample]) -> Row | None:
    """The request of median latency, if the links were warm and it took one sweep; None if not."""
    good = sorted(ended_well(samples)[0], key=lambda sample: sample.latency_ms)
    if not good or arm.idle_s:
        return None
    middle = good[(len(good) - 1) // 2]
    path, account = course.sweep_path(), middle.booked
    if account["sweeps"] != 1 or len(account["wire_bytes"]) != len(path):
        return None
    return {
        "profile": profile,
        "mode": arm.choice.label,
        "length": arm.length.count,
        "unit": arm.length.unit,
        "seed": middle.seed,
        "latency_ms": middle.latency_ms,
        "wire_bytes": account["wire_bytes"],
        "hosts": account["hosts"],
        "hops": [_hop(course, *pair) for pair in path],
    }


def waterfall(sweep: Row) -> list[tuple[str, str, float]]:
    """(what, part, milliseconds) of one sweep in the order of its way; they add up to its latency.

    Delay and serialisation are the profile's, queue and compute the hosts'. What remains is known only as a sum, so it
    stands at the end as one piece.
    """
    hosts = {host["name"]: host for host in sweep["hosts"]}
    steps = []
    for hop, size in zip(sweep["hops"], sweep["wire_bytes"], strict=True):
        steps.append((f"{hop['source']} → {hop['destination']}", "delay", hop["delay_ms"]))
        steps.append((f"{size:,} bytes", "serialisation", wire_ms(size, hop["rate_mbps"])))
        if host := hosts.get(hop["destination"]):
            steps.append((f"{host['name']} queue", "queue", host["queue_ms"]))
            steps.append((f"{host['name']} compute", "compute", host["compute_ms"]))
    rest_ms = sweep["latency_ms"] - sum(took_ms for _, _, took_ms in steps)
    return [*steps, ("gRPC, Python, TCP", "rest", rest_ms)]


def _hop(course: Course, source: str, destination: str) -> Row:
    link = course.link(source, destination)
    ends = {"source": source, "destination": destination}
    return ends | {"delay_ms": least_delay_ms(link), "rate_mbps": link.rate_mbps}
