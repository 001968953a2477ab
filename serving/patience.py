"""How long to wait for a result before a second try: longer than nearly all results take, by what was seen so far."""

from __future__ import annotations

LEAST_S = 1.0
"""Less is not waited while the deadline leaves time: a machine that stalls a moment shall not get twice the work."""
HEDGES = 10.0
"""Second tries that may be made at once, after a quiet time."""
HEDGE_SHARE = 0.05
"""And of all results, how many may need one: when everything is slow, more work would make it slower."""


class Patience:
    """Mean and deviation of waiting times, as TCP keeps them for its retransmissions (RFC 6298), by kind of work."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        self._hedges = HEDGES

    def learn(self, kind: str, took_s: float) -> None:
        """Book how long a result took that came of the first try."""
        mean_s, deviation_s = self._seen.get(kind, (took_s, took_s / 2))
        deviation_s += (abs(took_s - mean_s) - deviation_s) / 4
        self._seen[kind] = (mean_s + (took_s - mean_s) / 8, deviation_s)
        self._hedges = min(self._hedges + HEDGE_SHARE, HEDGES)

    def wait_s(self, kind: str, left_s: float) -> float:
        """How long to wait for a result. `left_s`: until the deadline."""
        mean_s, deviation_s = self._seen.get(kind, (LEAST_S, LEAST_S))
        usual_s = max(mean_s + 4 * deviation_s, LEAST_S)
        # a second try must end before the deadline
        return max(min(usual_s, left_s - 2 * mean_s), mean_s + 2 * deviation_s)

    def may_hedge(self) -> bool:
        """Whether a second try is within bounds; counts it if so."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True
