"""Results for a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loadtest.load.knee import Climb
from loadtest.load.run import LoadResult
from loadtest.load.scene import Scene


def run_record(result: LoadResult) -> dict[str, Any]:
    """Flat: `throughput_rps`, `p50_ms`, ..., `refused`, `failed`, `lost`, `wrong`, and what else was measured."""
    figures = asdict(result.figures)
    counts = figures.pop("counts")
    return {"mode": result.mode, "users": result.users, **counts, **figures, "texts": result.texts}


def load_record(scene: Scene, result: LoadResult) -> dict[str, Any]:
    """One run."""
    return {"loadtest": "run", **run_record(result), **scene.record()}


def knee_record(scene: Scene, climbs: Sequence[Climb]) -> dict[str, Any]:
    """`rows`, one for each run, and `knees`, one for each mode."""
    return {
        "loadtest": "knee",
        "rows": [run_record(result) for climb in climbs for result in climb.results],
        "knees": [{"mode": climb.mode, "users": climb.knee, "ended": climb.ended} for climb in climbs],
        **scene.record(),
    }
