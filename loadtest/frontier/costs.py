"""What each arm costs wherever it runs, sweeps and arithmetic: with its worth, an option of the file for `auto`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.frontier.measuring import Answer
from loadtest.frontier.worth import Ranking, Worth
from loadtest.wan_bench.rows import percentile_95
from serving.frontier import Frontier, Option
from stages.errors import OnesweepError


def option_of(worth: Worth, answers: Sequence[Answer], output_bytes: int) -> Option:
    """:param answers: at least one, none of them failed."""
    settings = {name: value for name, value in worth.arm.request().items() if name != "mode"}
    sweeps = [answer.booked["sweeps"] for answer in answers]
    return Option(
        mode=worth.arm.mode,
        settings=tuple(settings.items()),
        bits=worth.bits,
        output_bytes=output_bytes,
        sweeps=statistics.fmean(sweeps),
        sweeps_high=percentile_95(sorted(sweeps)),
        host_ms=statistics.median(answer.host_ms for answer in answers),
        router_ms=statistics.median(answer.router_ms for answer in answers),
        wire_bytes=statistics.fmean(answer.booked["wire_bytes_total"] for answer in answers),
        bits_low=worth.low,
        bits_high=worth.high,
    )


def frontier_of(ranking: Ranking, options: Sequence[Option]) -> Frontier:
    return Frontier(tuple(options), ranking.weights, ranking.judge, ranking.basis, ranking.human_bits)


def write_frontier(path: Path, frontier: Frontier, origin: dict[str, Any]) -> None:
    """:param origin: how it was measured. Raises OnesweepError."""
    try:
        path.write_text(json.dumps(frontier.to_record() | origin, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OnesweepError(f"cannot write {path}: {error.strerror}") from None
