"""The table: one row for each arm on each profile."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from loadtest.latency.floor import Course
from loadtest.latency.interleave import Sample
from loadtest.report.table import aligned
from loadtest.workload.arms import Arm

_HEADER = (
    *("profile", "text", "mode", "length", "idle s", "p50 s", "floor s", "x floor", "sweeps", "tokens/s", "accepted"),
    *("wire bytes", "host-s", "texts", "nats a token", "excess", "entropy", "4-gram", "distinct-2", "as ar"),
    *("gap closed", "failed"),
)
# What texts.py says of a row's texts, while they are not read.
NO_TEXTS: dict[str, Any] = dict.fromkeys(
    (
        *("texts", "respelled", "nats_per_token", "nats_error", "excess_nats", "excess_error"),
        *("token_entropy", "token_entropy_error", "gram_entropy", "distinct_2", "same_as_ar", "compared"),
        *("gap_closed", "gap_error"),
    )
)


def row_of(profile: str, arm: Arm, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over the requests that ended well; failures are counted, and the most frequent one is quoted."""
    good = [sample for sample in samples if not sample.error]
    failed = Counter(sample.error for sample in samples if sample.error)
    latencies = sorted(sample.latency_ms for sample in good)
    return {
        "profile": profile,
        "mode": arm.choice.label,
        "text": arm.prompts.name,
        "length": arm.length.count,
        "unit": arm.length.unit,
        "temperature": arm.temperature,
        "idle_s": arm.idle_s,
        "requests": len(samples),
        "failures": len(samples) - len(good),
        "error": failed.most_common(1)[0][0] if failed else None,
        "p50_ms": statistics.median(latencies) if good else None,
        "p95_ms": percentile_95(latencies) if good else None,
        "first_byte_ms": _median(good, lambda s: s.first_byte_ms),
        "floor_ms": _median(good, lambda s: s.floor.total_ms if s.floor else 0.0),
        "ratio": _median(good, lambda s: s.ratio),
        "tokens": _count(good, lambda s: int(_account(s)["output_tokens"])),
        "tokens_per_s": _median(good, lambda s: int(_account(s)["output_tokens"]) / s.latency_ms * 1000),
        "sweeps": _count(good, lambda s: int(_account(s)["sweeps"])),
        "hops": _count(good, lambda s: int(_account(s)["hops"])),
        "wire_bytes": _count(good, lambda s: int(_account(s)["wire_bytes_total"])),
        "largest_hop_bytes": _count(good, lambda s: max(_account(s)["wire_bytes"], default=0)),
        "host_seconds": _median(good, lambda s: sum(h["compute_ms"] for h in _account(s)["hosts"]) / 1000),
        "acceptance": acceptance(good),
        "parts_ms": _median_parts(good) if good else None,
        **NO_TEXTS,
    }


# What a latency is made of. `rest` is what remains: gRPC, Python, TCP, headers, waiting for a processor.
PARTS = ("delay", "serialisation", "compute", "queue", "rest")


def parts_ms(sample: Sample) -> dict[str, float]:
    """The parts of one request's latency, milliseconds; they add up to it."""
    assert sample.floor is not None
    queue_ms = sum(host["queue_ms"] for host in _account(sample)["hosts"])
    known = (sample.floor.delay_ms, sample.floor.serialisation_ms, sample.floor.compute_ms, queue_ms)
    return dict(zip(PARTS, (*known, sample.latency_ms - sum(known)), strict=True))


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Share of the guesses whose place was reached that were right; None where nothing was guessed."""
    reached = sum(_account(sample).get("reached") or 0 for sample in samples)
    return sum(_account(sample)["accepted"] for sample in samples) / reached if reached else None


def percentile_95(ordered: Sequence[float]) -> float:
    """Nearest rank."""
    return ordered[-(-95 * len(ordered) // 100) - 1]


def wan_table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal; below it, why requests failed."""
    lines = [aligned(_HEADER, [_cells(row) for row in rows])]
    for row in rows:
        if row["failures"]:
            where = f"{row['profile']}, {row['text']}, {row['mode']}, {length_of(row)}"
            lines.append(f"{where}: {row['failures']} of {row['requests']} failed, such as: {row['error']}")
    return "\n".join(lines)


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(row["profile"], row["text"], row["mode"], length_of(row), f"{row['idle_s']:g}"),
        *(number(_seconds(row[key]), 3) for key in ("p50_ms", "floor_ms")),
        *(number(row[key], digits) for key, digits in (("ratio", 2), ("sweeps", 0), ("tokens_per_s", 1))),
        *(number(row[key], digits) for key, digits in (("acceptance", 2), ("wire_bytes", 0), ("host_seconds", 2))),
        number(row["texts"], 0),
        *text_cells(row),
        str(row["failures"]),
    )


def length_of(row: dict[str, Any]) -> str:
    """The output length that was requested."""
    return f"{row['length']} {row['unit']}"


def text_cells(row: dict[str, Any]) -> list[str]:
    """The figures of texts.py, from the loss to the gap that was closed."""
    return [
        spread(row["nats_per_token"], row["nats_error"]),
        spread(row["excess_nats"], row["excess_error"]),
        spread(row["token_entropy"], row["token_entropy_error"]),
        *(number(row[key], 2) for key in ("gram_entropy", "distinct_2")),
        "-" if row["compared"] is None else f"{row['same_as_ar']} of {row['compared']}",
        spread(row["gap_closed"], row["gap_error"], percent=True),
    ]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def spread(value: float | None, error: float | None, percent: bool = False) -> str:
    """A figure with its standard error."""
    if value is None:
        return "-"
    scale, digits, unit = (100, 0, " %") if percent else (1, 2, "")
    return f"{value * scale:.{digits}f}" + ("" if error is None else f" ± {error * scale:.{digits}f}") + unit


def _median(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float | None:
    return statistics.median(value(sample) for sample in samples) if samples else None


def _count(samples: Sequence[Sample], value: Callable[[Sample], int]) -> int | None:
    """The lower median: a count that some request had, not a mean of two."""
    return statistics.median_low(value(sample) for sample in samples) if samples else None


def _median_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Part by part, so they need not add up to a median latency."""
    parts = [parts_ms(sample) for sample in samples]
    return {name: statistics.median(part[name] for part in parts) for name in PARTS}


def _account(sample: Sample) -> dict[str, Any]:
    assert sample.account is not None
    return sample.account


# One sweep for a picture: where it went, and what each part of its way took.


def single_sweep(profile: str, course: Course, arm: Arm, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """The request of median latency, if the links were warm and it took one sweep; None if not."""
    good = sorted((sample for sample in samples if not sample.error), key=lambda sample: sample.latency_ms)
    if not good or arm.idle_s:
        return None
    middle = good[(len(good) - 1) // 2]
    path, account = course.sweep_path(), middle.account
    if account is None or account["sweeps"] != 1 or len(account["wire_bytes"]) != len(path):
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


def waterfall(sweep: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(what, part, milliseconds) of one sweep in the order of its way; they add up to its latency.

    Delay and serialisation are the profile's, queue and compute the hosts'. What remains is known only as a sum, so it
    stands at the end as one piece.
    """
    hosts = {host["name"]: host for host in sweep["hosts"]}
    steps = []
    for hop, size in zip(sweep["hops"], sweep["wire_bytes"], strict=True):
        steps.append((f"{hop['source']} → {hop['destination']}", "delay", hop["delay_ms"]))
        took_ms = size * 8 / (hop["rate_mbps"] * 1000) if hop["rate_mbps"] else 0.0
        steps.append((f"{size:,} bytes", "serialisation", took_ms))
        if host := hosts.get(hop["destination"]):
            steps.append((f"{host['name']} queue", "queue", host["queue_ms"]))
            steps.append((f"{host['name']} compute", "compute", host["compute_ms"]))
    rest_ms = sweep["latency_ms"] - sum(took_ms for _, _, took_ms in steps)
    return [*steps, ("gRPC, Python, TCP", "rest", rest_ms)]


def _hop(course: Course, source: str, destination: str) -> dict[str, Any]:
    wire = course.link(source, destination)
    return {
        "source": source,
        "destination": destination,
        "delay_ms": wire.delay_ms - wire.jitter_ms,
        "rate_mbps": wire.rate_mbps,
    }
