"""Placement of machines that come and go: their order in the ring, and the blocks that each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from stages.importing.cut import StageHost

Span: TypeAlias = tuple[int, ...]
ROUTER_END = "router"  # no host has this name
ALL_ORDERS = 8  # machines up to which every order is tried (40,320); with more, the nearest comes next
UNKNOWN_MS = 1000.0  # for a trip without a measurement
MIN_GAIN_MS, MIN_GAIN_SHARE = 5.0, 0.1  # saving that justifies a new order: its blocks must be sent again


def ring_order(names: Sequence[str], trips_ms: Mapping[tuple[str, str], float]) -> tuple[str, ...]:
    """The order of machines that delays a token least.

    :param names: in the previous order, which stays if another saves little.
    :param trips_ms: one-way times from one machine to another; the router is ROUTER_END.
    """

    def delay_ms(order: Sequence[str]) -> float:
        # the last host's token goes to the first host and to the router, and a prompt comes from the router
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
    return best if before_ms - delay_ms(best) > max(MIN_GAIN_MS, MIN_GAIN_SHARE * before_ms) else tuple(names)


def placed(
    held: Mapping[str, Span], machines: Mapping[str, StageHost], sizes: Sequence[int]
) -> tuple[dict[str, Span], list[Span]]:
    """The blocks that each machine is to hold, and the runs of blocks that none has room for.

    :param held: blocks by machine, including machines that are gone.
    :param machines: the present machines by name, with their total room, blocks already held included.
    :param sizes: bytes per block.

    A machine keeps its blocks. Missing ones go to a machine without any, to one whose blocks are replicated, or to a
    neighbour on top of its own. The other machines become replicas, or take over one of a machine's several blocks.
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
        """Greater for blocks on fewer machines, then for blocks on slower machines."""
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
    """Blocks that no machine holds, neighbours joined into runs."""
    runs, there = list[Span](), {block for span in spans.values() for block in span}
    for block in range(blocks):
        if block not in there:
            follows = bool(runs) and runs[-1][-1] == block - 1
            runs[-1:] = [(*runs[-1], block)] if follows else [*runs[-1:], (block,)]
    return runs
