"""Rows of the table, one for each series of requests on each profile."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onesweep.loadtest.latency.commands import LEVELS
from onesweep.loadtest.latency.turns import RequestSeries, Sample, ended_well
from onesweep.loadtest.report.table import Table, number_column, percentile, text_column
from onesweep.loadtest.workload.variants import ModeVariant

Row = dict[str, Any]
# The parts of a latency. `rest` is what remains: gRPC, Python, TCP, headers, waiting for a processor.
PARTS = ("delay", "serialisation", "compute", "queue", "rest")


def row_of(profile: str, series: RequestSeries, samples: Sequence[Sample]) -> Row:
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
        "mode": series.variant.label,
        "text": series.prompts.name,
        "length": series.length.count,
        "unit": series.length.unit,
        "temperature": series.variant.get("temperature"),
        "idle_s": series.idle_s,
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
    if series.length.draws:
        return row
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


def same_as_ar(series: RequestSeries, taken: Mapping[RequestSeries, Sequence[Sample]]) -> Row:
    """Texts equal to those of `ar` with the same seeds, for a mode that promises them; `taken`: of one profile."""
    variant = series.variant
    if variant.mode != "ar-speculative":
        return {}
    # int8 writes another text, so with the same codec
    plain = ModeVariant("ar").having(codec=variant.get("codec"), temperature=variant.get("temperature"))
    theirs, ours = (
        {s.number: s.account["output_hex"] for s in taken.get(each, ()) if s.account is not None}
        for each in (replace(series, variant=plain), series)
    )
    both = theirs.keys() & ours.keys()
    same = sum(theirs[number] == ours[number] for number in both)
    return {"same_as_ar": same, "compared": len(both)} if both else {}


def length_of(row: Row) -> str:
    """The output length that was requested."""
    return f"{row['length']} {row['unit']}"


def _as_ar(row: Row) -> str:
    """The share of compared texts that are the same."""
    return "-" if row["compared"] is None else f"{row['same_as_ar']} of {row['compared']}"


WAN: Table[Row] = Table(
    (
        *map(text_column, ("profile", "text", "mode")),
        ("length", length_of),
        ("idle s", lambda row: f"{row['idle_s']:g}"),
        number_column("first s", "first_byte_ms", 3, scale=1e-3),
        number_column("p50 s", "p50_ms", 3, scale=1e-3),
        number_column("floor s", "floor_ms", 3, scale=1e-3),
        number_column("x floor", "ratio", 2),
        number_column("sweeps", "sweeps", 0),
        number_column("tokens/s", "tokens_per_s"),
        number_column("accepted", "acceptance", 2),
        number_column("wire bytes", "wire_bytes", 0),
        number_column("host-s", "host_seconds", 2),
        ("as ar", _as_ar),
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
        ("idle s", lambda row: f"{row['idle_s']:g}"),
        text_column("failed", "failures"),
    )
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
