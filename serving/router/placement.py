"""Places of machines that come and go: in which order they make a ring, and which blocks each of them holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from stages.importing.cut import StageHost

Span: TypeAlias = tuple[int, ...]
ROUTER_END = "router"  # no host is called so
ALL_ORDERS = 8  # machines, of which every order is tried: 40,320; of more, the nearest comes next
UNKNOWN_MS = 1000.0  # for a trip that could not be measured
WORTH_MS, WORTH_SHARE = 5.0, 0.1  # that another order than the last one must spare: a new cut is sent anew


def ring_order(names: Sequence[str], trips_ms: Mapping[tuple[str, str], float]) -> tuple[str, ...]:
    """Machines in the order in which a token takes them with the least delay.

    :param names: in the order of before, which stays where another one spares little.
    :param trips_ms: one way, from one to another; those of the router are from and to ROUTER_END.
    """

    def delay_ms(order: Sequence[str]) -> float:
        # the first host and the router get the last one's token; a prompt comes from the router
        pairs = [*pairwise((ROUTER_END, *order, ROUTER_END)), *([(order[-1], order[0])] if order[1:] else [])]
        return sum(trips_ms.get(pair, UNKNOWN_MS) for pair in pairs)

    def by_nearest(first: str) -> tuple[str, ...]:
        order, left = [first], [name for name in names if name != first]
        while left:
            order.append(min(left, key=lambda name: trips_ms.get((order[-1], name), UNKNOWN_MS)))
            left.remove(order[-1])
        return tuple(order)

    orders = permutations(names) if len(names) <= ALL_ORDERS else map(by_nearest, names)
    best = min(orders, key=delay_ms)
    before_ms = delay_ms(names)
    return best if before_ms - delay_ms(best) > max(WORTH_MS, WORTH_SHARE * before_ms) else tuple(names)


def placed(
    held: Mapping[str, Span], machines: Mapping[str, StageHost], sizes: Sequence[int]
) -> tuple[dict[str, Span], list[Span]]:
    """Blocks that each machine is to hold, and the runs of blocks that none has room for.

    :param held: blocks of machines, of those that are gone, too.
    :param machines: those that are there, by name, with all their room: what they hold is in it.
    :param sizes: bytes of each block.

    Who holds blocks keeps them. What is missing goes to a machine without any, to one whose blocks another holds, too,
    or to a neighbour, beside its own. All others become replicas, or relieve one that holds several of one of them.
    """
    spans = {name: span for name, span in held.items() if name in machines}

    def fits(name: str, span: Span) -> bool:
        return sum(sizes[block] for block in span) <= machines[name].memory_bytes

    def is_alone(name: str) -> bool:
        return [*spans.values()].count(spans[name]) == 1

    def take(run: Span) -> bool:
        free = [name for name in machines if (name not in spans or not is_alone(name)) and fits(name, run)]
        if free:
            spans[max(free, key=lambda name: (name not in spans, machines[name].speed))] = run
            return True
        for name, span in spans.items():
            both = tuple(sorted((*span, *run)))
            if is_alone(name) and len(both) == both[-1] - both[0] + 1 and fits(name, both):
                spans[name] = both
                return True
        return False

    def need(span: Span) -> tuple[int, float]:
        """More for blocks that fewer machines hold, then for those that their machines take longer for."""
        speeds = [machines[name].speed for name, other in spans.items() if other == span]
        return -len(speeds), sum(sizes[block] for block in span) / sum(speeds)

    for run in _missing_runs(spans, len(sizes)):
        if not take(run):
            for block in run:
                take((block,))
    missing = _missing_runs(spans, len(sizes))
    for name in machines:
        able = sorted({span for span in spans.values() if fits(name, span)})
        if name not in spans and able:
            spans[name] = max(able, key=need)
        for other, span in [*spans.items()] if name not in spans else ():
            ends = [end for end in (span[-1:], span[:1]) if fits(name, end)]
            if len(span) > 1 and is_alone(other) and ends:
                spans[name], spans[other] = ends[0], tuple(block for block in span if block not in ends[0])
                break
    return spans, missing


def _missing_runs(spans: Mapping[str, Span], blocks: int) -> list[Span]:
    """Blocks that nobody holds, neighbours together."""
    runs, there = list[Span](), {block for span in spans.values() for block in span}
    for block in range(blocks):
        if block not in there:
            follows = bool(runs) and runs[-1][-1] == block - 1
            runs[-1:] = [(*runs[-1], block)] if follows else [*runs[-1:], (block,)]
    return runs
