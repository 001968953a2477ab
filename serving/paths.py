"""Which hosts a request goes through: those that hold all blocks between them with the least delay and waiting."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from serving.link import HostLink, Weights

Path = tuple[HostLink, ...]
AVOIDED_MS = 1e6
"""What going through a host or link that failed just now costs: it is taken only where there is no other way."""
SUSPECT_S = 3.0
"""How long a link between hosts that failed is avoided; by then its hosts say themselves what is wrong with it."""


class Suspects:
    """Links between hosts that lost work a moment ago."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def add(self, source: str, target: str) -> None:
        """:param source, target: addresses."""
        now = time.monotonic()
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        self._until[source, target] = now + SUSPECT_S

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return self._until.get(pair, 0.0) > time.monotonic()


def best_path(
    links: Sequence[HostLink], weights: Weights, suspects: Suspects, avoid: Collection[str] = ()
) -> Path | None:
    """The cheapest way through all blocks, over hosts without a problem that hold `weights`; None where there is none.

    :param avoid: addresses of hosts to go round if that can be.
    """
    able = sorted(
        (link for link in links if not link.problem and weights in link.held), key=lambda link: link.entry.blocks[0]
    )
    # by the block that comes next, then by first and last host: what the way back to the first costs counts, too
    best = defaultdict[int, dict[tuple[str, str], tuple[float, Path]]](dict)
    for link in able:
        begin, due = link.entry.blocks[0], link.entry.blocks[-1] + 1
        own_ms = link.load_ms + (AVOIDED_MS if link.entry.address in avoid else 0.0)
        ways: list[tuple[float, Path]] = [(_half_ms(link), (link,))] if link.entry.is_first else []
        for cost_ms, path in best[begin].values():
            step_ms = _step_ms(path[-1], link, suspects)
            if step_ms is not None:
                ways.append((cost_ms + step_ms, (*path, link)))
        for cost_ms, path in ways:
            ends = (path[0].entry.address, link.entry.address)
            if ends not in best[due] or cost_ms + own_ms < best[due][ends][0]:
                best[due][ends] = (cost_ms + own_ms, path)
    whole = []
    for due, found in best.items():
        for cost_ms, path in found.values():
            if path[-1].parts != due:
                continue
            # an AR step goes from the last host to the first
            back_ms = _step_ms(path[-1], path[0], suspects) if len(path) > 1 else 0.0
            if back_ms is not None:
                whole.append((cost_ms + _half_ms(path[-1]) + back_ms, path))
    return min(whole, key=lambda way: way[0])[1] if whole else None


def _half_ms(link: HostLink) -> float:
    """From the router to a host, or back."""
    return (link.relay.least_rtt_ms or 0.0) / 2


def _step_ms(source: HostLink, target: HostLink, suspects: Suspects) -> float | None:
    """From one host to another; None where the one has no link to the other."""
    found = source.onward.get(target.entry.address)
    if found is None or found.problem:
        return None
    doubt_ms = AVOIDED_MS if (source.entry.address, target.entry.address) in suspects else 0.0
    return doubt_ms + (found.rtt_ms / 2 or max(_half_ms(source), _half_ms(target)))
