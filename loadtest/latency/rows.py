"""Rows of the table, one for each arm on each profile, and the table that a terminal and a page show."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from onesweep.loadtest.latency.floor import Course, least_delay_ms, wire_ms
from onesweep.loadtest.latency.interleave import Sample, ended_well
from onesweep.loadtest.report.table import Column, Table, number_column, percentile, text_column
from onesweep.loadtest.workload.arms import LEVELS, Arm

Row = dict[str, Any]
# Keys of texts.py in a row, while its texts are not read.
NO_TEXTS: Row = dict.fromkeys(
    (
        *("texts", "respelled", "nats_per_token", "nats_error", "excess_nats", "excess_error"),
        *("token_entropy", "token_entropy_error", "gram_entropy", "distinct_2", "same_as_ar", "compared"),
        *("gap_closed", "gap_error"),
    )
)
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
        **NO_TEXTS,
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


def length_of(row: Row) -> str:
    """The output length that was requested."""
    return f"{row['length']} {row['unit']}"


def spread(value: float | None, error: float | None, percent: bool = False) -> str:
    """A figure with its standard error."""
    if value is None:
        return "-"
    scale, digits, unit = (100, 0, " %") if percent else (1, 2, "")
    return f"{value * scale:.{digits}f}" + ("" if error is None else f" ± {error * scale:.{digits}f}") + unit


def _spread_column(title: str, name: str, error: str, percent: bool = False) -> Column[Row]:
    return title, lambda row: spread(row[name], row[error], percent)


ARM: tuple[Column[Row], ...] = (
    *map(text_column, ("profile", "text", "mode")),
    ("length", length_of),
    ("idle s", lambda row: f"{row['idle_s']:g}"),
)
# The figures of texts.py, from the loss to the gap that was closed.
TEXTS: tuple[Column[Row], ...] = (
    number_column("texts", "texts", 0),
    _spread_column("nats a token", "nats_per_token", "nats_error"),
    _spread_column("excess", "excess_nats", "excess_error"),
    _spread_column("entropy", "token_entropy", "token_entropy_error"),
    number_column("4-gram", "gram_entropy", 2),
    number_column("distinct-2", "distinct_2", 2),
    ("as ar", lambda row: "-" if row["compared"] is None else f"{row['same_as_ar']} of {row['compared']}"),
    _spread_column("gap closed", "gap_closed", "gap_error", percent=True),
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
        *TEXTS,
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
        (
            "as one process",
            lambda row: "-" if row["compared"] is None else f"{row['same_as_one']} of {row['compared']}",
        ),
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
