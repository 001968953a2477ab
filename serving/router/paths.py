"""The choice of hosts for a request: the cheapest way through all blocks, and when it is time for a second try.

Nothing here reads a clock or a socket: callers tell the time, and what links know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stages.host.plan import MODEL_KINDS

if TYPE_CHECKING:
    from serving.router.host_link import HostLink, HostPath, Weights

# What a link costs that failed a moment ago, for any request: it is taken only where there is no other way.
SUSPECT_MS = 1e6
# What a host costs that failed this very request: more than suspicion of every link on a path.
AVOIDED_MS = 1e9
# What a way may cost more that saves reading a prompt's beginning: this share of the quickest one's cost, and what
# measured round trips differ by. A session under way there costs more.
PREFIX_SHARE, PREFIX_MS = 0.1, 1.0
# How long a link between hosts that failed is avoided; by then its hosts say themselves what is wrong with it.
SUSPECT_S = 3.0


class Suspects:
    """Links between hosts that lost work a moment ago."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def add(self, source: str, target: str, now_s: float) -> None:
        """:param source, target: addresses."""
        self._until[source, target] = now_s + SUSPECT_S

    def now(self, now_s: float) -> Collection[tuple[str, str]]:
        """The pairs of addresses that are avoided now."""
        self._until = {pair: until_s for pair, until_s in self._until.items() if until_s > now_s}
        return self._until.keys()


# The router chooses, and hosts dial only where their own topology allows: nobody else knows where a request's sessions
# are, and a path of any addresses would let a stolen router certificate make hosts dial anything.
def best_path(
    links: Sequence[HostLink],
    weights: Weights,
    suspects: Collection[tuple[str, str]],
    avoid: Collection[str] = (),
    prefixes: Sequence[bytes] = (),
) -> HostPath | None:
    """The cheapest way through all blocks, over hosts without a problem that hold `weights`; None where there is none.

    :param avoid: addresses of hosts to go round if that can be; of one that is named twice, even more so.
    :param prefixes: of a text to be read: a way that keeps more of them is taken unless it is busier or farther.
    """
    if (best := _cheapest(links, weights, suspects, avoid)) is None:
        return None
    keeps = _cheapest(links, weights, suspects, avoid, prefixes) if prefixes else None
    worth = keeps is not None and keeps.cost_ms <= best.cost_ms * (1 + PREFIX_SHARE) + PREFIX_MS
    return keeps.path if keeps is not None and worth else best.path


def problem_of(links: Sequence[HostLink], weights: Weights | None) -> str:
    """Why no request can use the hosts that hold `weights`; None: those that hold any that are the same."""
    # others wait for one that is lost
    for link in sorted(links, key=lambda link: not link.is_lost):
        if link.problem:
            return link.problem
    lacking = [link for link in links if weights is not None and weights not in link.held]
    if lacking:
        return f"host {lacking[0].entry.name} does not have the release that is served: it is being brought there"
    for index, kind in enumerate(MODEL_KINDS):
        digests = {link.entry.name: next(reversed(link.held))[index] for link in links if link.held}
        if weights is None and len(set(digests.values())) > 1:
            shown = ", ".join(f"{name} {digest[:12] or '(none)'}" for name, digest in digests.items())
            return f"the hosts have different {kind} checkpoints ({shown}): give every host the same one"
    broken = [relay for link in links if link.info for relay in link.info.links if relay.problem]
    return broken[0].problem if broken else "there is no way through all blocks: check the topology that hosts have"


def kept_by(path: HostPath, prefixes: Sequence[bytes]) -> int:
    """Number of `prefixes` that all hosts of a path keep."""
    instances = [link.instance for link in path]
    return min(link.kept(prefixes, instances[:at]) for at, link in enumerate(path))


class _Way(NamedTuple):
    """A way through the first blocks: of two the lesser is taken."""

    lost: int  # prefixes that one of its hosts does not keep
    cost_ms: float
    path: HostPath


def _cheapest(
    links: Sequence[HostLink],
    weights: Weights,
    suspects: Collection[tuple[str, str]],
    avoid: Collection[str],
    prefixes: Sequence[bytes] = (),
) -> _Way | None:
    """The way that keeps most of `prefixes`; of those that keep as many, the cheapest."""
    able = sorted(
        (link for link in links if not link.problem and weights in link.held), key=lambda link: link.entry.blocks[0]
    )
    avoided = Counter(avoid)
    # by the block that comes next, then by first and last host: what the way back to the first costs counts, too
    best = defaultdict[int, dict[tuple[str, str], _Way]](dict)
    for link in able:
        begin, due = link.entry.blocks[0], link.entry.blocks[-1] + 1
        waits_ms = link.sessions * link.hop_ms  # expected, of a hop there
        own_ms = waits_ms + (AVOIDED_MS * avoided[link.entry.address] if avoid else 0.0)
        before = [_Way(0, _half_ms(link), ())] if begin == 0 else []
        for lost, cost_ms, path in best[begin].values():
            step_ms = _step_ms(path[-1], link, suspects)
            if step_ms is not None:
                before.append(_Way(lost, cost_ms + step_ms, path))
        for lost, cost_ms, path in before:
            kept = link.kept(prefixes, [each.instance for each in path]) if prefixes else 0
            way = _Way(max(lost, len(prefixes) - kept), cost_ms + own_ms, (*path, link))
            ends = (way.path[0].entry.address, link.entry.address)
            if ends not in best[due] or way[:2] < best[due][ends][:2]:
                best[due][ends] = way
    whole = []
    for due, found in best.items():
        for lost, cost_ms, path in found.values():
            if path[-1].parts != due:
                continue
            # an AR step goes from the last host to the first
            back_ms = _step_ms(path[-1], path[0], suspects) if len(path) > 1 else 0.0
            if back_ms is not None:
                whole.append(_Way(lost, cost_ms + _half_ms(path[-1]) + back_ms, path))
    return min(whole, key=lambda way: way[:2]) if whole else None


def _half_ms(link: HostLink) -> float:
    """From the router to a host, or back."""
    return (link.relay.least_rtt_ms or 0.0) / 2


def _step_ms(source: HostLink, target: HostLink, suspects: Collection[tuple[str, str]]) -> float | None:
    """From one host to another; None where the one has no link to the other."""
    found = source.onward.get(target.entry.address)
    if found is None or found.problem:
        return None
    doubt_ms = SUSPECT_MS if (source.entry.address, target.entry.address) in suspects else 0.0
    return doubt_ms + (found.rtt_ms / 2 or max(_half_ms(source), _half_ms(target)))


# Hedging: a result that takes longer than nearly all others is tried again on other hosts.

# A fixed time would be too long for a byte and too short for a long sweep on a busy host.
# Less is not waited while the deadline leaves time: a machine that stalls a moment shall not get twice the work.
LEAST_S = 1.0
HEDGES = 10.0  # Second tries that may be made at once, after a quiet time.
HEDGE_SHARE = 0.05  # Of all results, how many may need one: when everything is slow, more work would make it slower.


class Hedging:
    """Mean and deviation of waiting times, as TCP keeps them for its retransmissions (RFC 6298), by kind of work."""

    def __init__(self, most: float = HEDGES) -> None:
        """:param most: second tries at once."""
        self._seen: dict[str, tuple[float, float]] = {}
        self._hedges = self._most = most

    def record(self, kind: str, took_s: float) -> None:
        """Book how long a result took that came of the first try."""
        mean_s, deviation_s = self._seen.get(kind, (took_s, took_s / 2))
        deviation_s += (abs(took_s - mean_s) - deviation_s) / 4
        self._seen[kind] = (mean_s + (took_s - mean_s) / 8, deviation_s)
        self._hedges = min(self._hedges + HEDGE_SHARE, self._most)

    def wait_s(self, kind: str, left_s: float) -> float:
        """Time to wait for a result. `left_s`: until the deadline."""
        mean_s, deviation_s = self._seen.get(kind, (LEAST_S, LEAST_S))
        usual_s = max(mean_s + 4 * deviation_s, LEAST_S)
        # a second try must end before the deadline
        return max(min(usual_s, left_s - 2 * mean_s), mean_s + 2 * deviation_s)

    def may_hedge(self) -> bool:
        """True where a second try is within bounds; counts it."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True
