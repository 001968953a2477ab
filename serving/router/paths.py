"""The choice of hosts for a request: the cheapest path through all blocks, and the time for a second try.

Nothing here reads a clock or a socket: callers pass the time and the links' measurements.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stages.host.plan import MODEL_KINDS

if TYPE_CHECKING:
    from serving.router.host_link import HostLink, HostPath, Weights

# Cost of a link that failed a moment ago, for any request: a path uses it only without an alternative.
SUSPECT_MS = 1e6
# Cost of a host that failed this very request: more than suspicion of every link on a path.
AVOIDED_MS = 1e9
# Extra cost allowed for a path that already has a prompt's prefix: this share of the quickest path's cost, plus the
# spread of measured round trips. One running session there costs more.
PREFIX_SHARE, PREFIX_MS = 0.1, 1.0
# How long a failed link between hosts is avoided; by then its hosts themselves report the failure.
SUSPECT_S = 3.0


class Suspects:
    """Links between hosts that lost work a moment ago."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def add(self, source: str, target: str, now_s: float) -> None:
        """:param source, target: addresses."""
        self._until[source, target] = now_s + SUSPECT_S

    def now(self, now_s: float) -> Collection[tuple[str, str]]:
        """The pairs of addresses to avoid now."""
        self._until = {pair: until_s for pair, until_s in self._until.items() if until_s > now_s}
        return self._until.keys()


# The router chooses, since only it knows where a request's sessions are. Hosts dial only addresses in their own
# topology: otherwise a stolen router certificate could make hosts dial anything.
def best_path(
    links: Sequence[HostLink],
    weights: Weights,
    suspects: Collection[tuple[str, str]],
    avoid: Collection[str] = (),
    prefixes: Sequence[bytes] = (),
) -> HostPath | None:
    """The cheapest path through all blocks, over hosts without a problem that hold `weights`; None without one.

    :param avoid: addresses of hosts to avoid if possible; one named twice counts more.
    :param prefixes: of the text to read: a path that caches more of them wins unless it is busier or farther.
    """
    if (best := _cheapest(links, weights, suspects, avoid)) is None:
        return None
    keeps = _cheapest(links, weights, suspects, avoid, prefixes) if prefixes else None
    worth = keeps is not None and keeps.cost_ms <= best.cost_ms * (1 + PREFIX_SHARE) + PREFIX_MS
    return keeps.path if keeps is not None and worth else best.path


def problem_of(links: Sequence[HostLink], weights: Weights | None) -> str:
    """Why no request can use the hosts that hold `weights`; None: any weights that the hosts have in common."""
    # name lost hosts first: the others wait for them
    for link in sorted(links, key=lambda link: link.lost_at is None):
        if link.problem:
            return link.problem
    lacking = [link for link in links if weights is not None and weights not in link.held]
    if lacking:
        return f"host {lacking[0].entry.name} does not have the served release yet: it is being sent"
    for index, kind in enumerate(MODEL_KINDS):
        digests = {link.entry.name: next(reversed(link.held))[index] for link in links if link.held}
        if weights is None and len(set(digests.values())) > 1:
            shown = ", ".join(f"{name} {digest[:12] or '(none)'}" for name, digest in digests.items())
            return f"the hosts have different {kind} checkpoints ({shown}): give every host the same one"
    broken = [relay for link in links if link.info for relay in link.info.links if relay.problem]
    return broken[0].problem if broken else "no path leads through all blocks: check the topology of the hosts"


def cached_by(path: HostPath, prefixes: Sequence[bytes]) -> int:
    """Number of `prefixes` that every host of a path caches."""
    instances = [link.instance for link in path]
    return min(link.kept(prefixes, instances[:at]) for at, link in enumerate(path))


class _Route(NamedTuple):
    """A path through the first blocks; the lesser of two wins."""

    lost: int  # prefixes that one of its hosts does not cache
    cost_ms: float
    path: HostPath


def _cheapest(
    links: Sequence[HostLink],
    weights: Weights,
    suspects: Collection[tuple[str, str]],
    avoid: Collection[str],
    prefixes: Sequence[bytes] = (),
) -> _Route | None:
    """The path that caches most of `prefixes`; among equals, the cheapest."""
    able = sorted(
        (link for link in links if not link.problem and weights in link.held), key=lambda link: link.entry.blocks[0]
    )
    avoided = Counter(avoid)
    # by next block, then by first and last host, since the way back to the first counts too
    best = defaultdict[int, dict[tuple[str, str], _Route]](dict)
    for link in able:
        begin, due = link.entry.blocks[0], link.entry.blocks[-1] + 1
        waits_ms = link.sessions * link.hop_ms  # expected wait of a hop there
        own_ms = waits_ms + (AVOIDED_MS * avoided[link.entry.address] if avoid else 0.0)
        before = [_Route(0, _half_ms(link), ())] if begin == 0 else []
        for lost, cost_ms, path in best[begin].values():
            step_ms = _step_ms(path[-1], link, suspects)
            if step_ms is not None:
                before.append(_Route(lost, cost_ms + step_ms, path))
        for lost, cost_ms, path in before:
            kept = link.kept(prefixes, [each.instance for each in path]) if prefixes else 0
            route = _Route(max(lost, len(prefixes) - kept), cost_ms + own_ms, (*path, link))
            ends = (route.path[0].entry.address, link.entry.address)
            if ends not in best[due] or route[:2] < best[due][ends][:2]:
                best[due][ends] = route
    whole = []
    for due, found in best.items():
        for lost, cost_ms, path in found.values():
            if path[-1].parts != due:
                continue
            # an AR step returns from the last host to the first
            back_ms = _step_ms(path[-1], path[0], suspects) if len(path) > 1 else 0.0
            if back_ms is not None:
                whole.append(_Route(lost, cost_ms + _half_ms(path[-1]) + back_ms, path))
    return min(whole, key=lambda route: route[:2]) if whole else None


def _half_ms(link: HostLink) -> float:
    """One-way time between the router and a host."""
    return (link.relay.min_rtt_ms or 0.0) / 2


def _step_ms(source: HostLink, target: HostLink, suspects: Collection[tuple[str, str]]) -> float | None:
    """One-way time from one host to another; None without a link."""
    found = source.onward.get(target.entry.address)
    if found is None or found.problem:
        return None
    suspect_ms = SUSPECT_MS if (source.entry.address, target.entry.address) in suspects else 0.0
    return suspect_ms + (found.rtt_ms / 2 or max(_half_ms(source), _half_ms(target)))


# Hedging: work that takes longer than nearly all other work is tried again on other hosts.

# A fixed time would be too long for a byte and too short for a long sweep on a busy host.
# The least wait while the deadline leaves time: a machine that stalls for a moment must not get twice the work.
MIN_S = 1.0
HEDGES = 10.0  # Second tries allowed at once after a quiet time.
HEDGE_SHARE = 0.05  # Share of results that may be hedged: when everything is slow, more work slows it further.


class Hedging:
    """Mean and deviation of waiting times per kind of work, kept as TCP does for retransmissions (RFC 6298)."""

    def __init__(self, most: float = HEDGES) -> None:
        """:param most: most second tries at once."""
        self._seen: dict[str, tuple[float, float]] = {}
        self._hedges = self._most = most

    def record(self, kind: str, took_s: float) -> None:
        """Record the time that a first try's result took."""
        mean_s, deviation_s = self._seen.get(kind, (took_s, took_s / 2))
        deviation_s += (abs(took_s - mean_s) - deviation_s) / 4
        self._seen[kind] = (mean_s + (took_s - mean_s) / 8, deviation_s)
        self._hedges = min(self._hedges + HEDGE_SHARE, self._most)

    def wait_s(self, kind: str, left_s: float) -> float:
        """Seconds to wait for a result. `left_s`: until the deadline."""
        mean_s, deviation_s = self._seen.get(kind, (MIN_S, MIN_S))
        usual_s = max(mean_s + 4 * deviation_s, MIN_S)
        # a second try must end before the deadline
        return max(min(usual_s, left_s - 2 * mean_s), mean_s + 2 * deviation_s)

    def may_hedge(self) -> bool:
        """True, and one try counted, if a second try is within the limit."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True


# Patience: a request without a path waits for hosts that will be back.

# The longest wait: others take the blocks of a machine that joined after a minute, then load them.
RETURN_S = 90.0


@dataclass
class Patience:
    """The wait of requests while there is no path."""

    lost_s: float  # how long a host may be lost
    most_waiting: int = 32  # requests that may wait longer before they begin: each holds a place at the router
    waiting: int = 0

    def ends_at(self, links: Sequence[HostLink], since_s: float, most_s: float, *, joined: bool) -> float:
        """When a request that has looked for a path since `since_s` gives up: later, by `most_s` at most, while hosts
        load their weights, and while machines that joined start again or are replaced."""
        back_at = math.inf if joined else max((link.returning_at for link in links), default=-math.inf)
        answering = {link.entry.blocks for link in links if link.lost_at is None}

        def of(link: HostLink) -> float:
            if link.lost_at is not None:
                return max(link.lost_at, since_s) + self.lost_s
            # a host that waits for the next one notices a moment later that it is back
            latest_s = self.lost_s if link.quarantined else max(most_s, self.lost_s)
            return min(max(back_at, since_s) + self.lost_s, since_s + latest_s)

        needed = (link for link in links if link.lost_at is None or link.entry.blocks not in answering)
        return min((of(link) for link in needed if link.problem), default=since_s + self.lost_s)
