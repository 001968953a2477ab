"""What a saboteur makes of an honest pseudo-gradient: one function for each lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Lie = Callable[[Row, float], Row]
"""From a direction and the norm of an honest update to what is handed in."""

ABSURD, LONG = 1000.0, 5.0


def stretched(direction: Row, norm: float) -> Row:
    """In this direction, of this norm."""
    length = float(np.linalg.norm(direction.astype(np.float64)))
    return (direction * (norm / length) if length else direction).astype(np.float32)


def _times(factor: float) -> Lie:
    return lambda direction, norm: stretched(direction, norm) * np.float32(factor)


LIES: Mapping[str, Lie] = {
    "nan": lambda direction, norm: np.full_like(direction, np.nan),
    "absurd": _times(ABSURD),
    "scaled": _times(LONG),
    "flipped": _times(-1.0),
}
