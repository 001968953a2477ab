"""The choice of the hosts of a request."""

import math
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.host_link import HostLink
from serving.router.paths import RETURN_S, SUSPECT_S, Patience, Suspects, best_path, problem_of
from serving.router.topology import HostEntry
from stages.host.plan import weights_of
from stages.host.prefixes import MAX_LISTED, path_digest, piece_key
from stages.v1 import stage_pb2
from stages.wire.status import StatusError


class Relay:
    min_rtt_ms: float | None = None


def make(name: str, blocks: tuple[int, ...], rtt_ms: float = 10.0, parts: int = 2, **links: float | str) -> HostLink:
    """A host as described. links: round trip to another one, or why it cannot be used."""
    link = HostLink.__new__(HostLink)
    link.entry, link.problem, link.sessions, link.hop_ms = HostEntry(name, name, blocks, name), "", 0, 5.0
    link.lost_at, link.returning_at, link.quarantined = None, -math.inf, ""
    link.prefixes, link.prefix_version = frozenset(), 0
    link.relay = Relay()  # type: ignore[assignment]
    link.relay.min_rtt_ms = rtt_ms  # type: ignore[misc]
    dialled = [
        stage_pb2.LinkInfo(address=to, problem=x) if isinstance(x, str) else stage_pb2.LinkInfo(address=to, rtt_ms=x)
        for to, x in links.items()
    ]
    link.update(stage_pb2.DescribeResponse(instance=name, releases=[release("a", parts)], links=dialled))
    return link


def release(ar: str, parts: int = 2, loading: bool = False) -> stage_pb2.Release:
    chain = stage_pb2.ModelInfo(digest="c", parts=parts)
    return stage_pb2.Release(name=ar, chain=chain, ar=stage_pb2.ModelInfo(digest=ar), loading=loading)


def names(links: list[HostLink], avoid: tuple[str, ...] = (), suspects: Collection[tuple[str, str]] = ()) -> str | None:
    path = best_path(links, weights_of(release("a")), suspects, avoid)
    return None if path is None else " ".join(link.entry.name for link in path)


def test_a_lost_host_is_reported_before_hosts_that_wait_for_it() -> None:
    waits, lost = make("a", (0,)), make("b", (1,))
    waits.problem, lost.problem, lost.lost_at = "a waits for b", "b is lost", 1.0
    assert problem_of([waits, lost], None) == "b is lost"


def test_a_lost_host_whose_blocks_another_one_loads_does_not_shorten_the_wait() -> None:
    lost, loads, other = make("lost", (0,)), make("loads", (0,)), make("other", (1,))
    lost.problem, lost.lost_at, loads.problem, loads.returning_at = "it is lost", 1.0, "it loads its weights", 4.0
    for links, ends_at in (([lost, loads, other], 9.0), ([lost, other], 7.0), ([other], 7.0)):
        assert Patience(5.0).ends_at(links, 2.0, RETURN_S, joined=False) == ends_at


def square() -> list[HostLink]:
    """Two hosts for each of two halves; from a to x is near, from b to y too."""
    return [
        make("a", (0,), x=10.0, y=80.0),
        make("b", (0,), x=80.0, y=20.0),
        make("x", (1,), a=10.0, b=80.0),
        make("y", (1,), a=80.0, b=20.0),
    ]


def even() -> list[HostLink]:
    """The same, but all links are alike."""
    return [*(make(name, (0,), x=10.0, y=10.0) for name in "ab"), *(make(name, (1,), a=10.0, b=10.0) for name in "xy")]


PREFIXES = [bytes([i]) * 32 for i in range(3)]


def keeping(links: list[HostLink], after: str = "", **counts: int) -> str:
    """The way of a text, of whose beginnings these hosts keep so many, x as it came from a, and y as it came from b.

    :param after: the host from which both had it."""
    for link in links:
        name = link.entry.name
        before = [after or {"x": "a", "y": "b"}[name]] if name in "xy" else []
        kept = PREFIXES[: counts.get(name, 0)]
        digests = b"".join(piece_key(digest, path_digest(before))[:8] for digest in kept)
        link.update_prefixes(stage_pb2.PrefixList(version=link.prefix_version + 1, digests=digests))
    path: Any = best_path(links, weights_of(release("a")), (), (), PREFIXES)
    return " ".join(link.entry.name for link in path)


def test_hosts_with_a_cached_prefix_are_preferred_and_requests_alternate_between_equal_paths() -> None:
    assert keeping(even()) == "a x"
    assert keeping(even(), b=2, y=2) == "b y"
    assert keeping(even(), b=3, y=1, a=2, x=2) == "a x", "the path caches the prefixes of each of its hosts"
    assert keeping(even(), a=1, x=1, b=3, y=3) == "b y"
    assert keeping(even(), b=3) == "a x", "one alone is of no use"
    assert keeping(even(), b=3, y=3, after="a") == "a x", "prefixes from another host are not looked up"
    assert keeping(even(), b=2, y=2, x=3, after="b") == "b x"
    links, ways = even(), list[str | None]()
    for _ in range(4):
        ways.append(way := names(links))
        for link in links:
            link.sessions += link.entry.name in (way or "")
    assert ways == ["a x", "b y"] * 2


def test_a_prefix_list_stands_until_the_next_version_and_the_description_of_a_host_is_bounded() -> None:
    (link, *_) = links = even()
    keeping(links, a=2)
    assert link.kept(PREFIXES) == 2
    link.update_prefixes(stage_pb2.PrefixList(version=link.prefix_version))
    assert link.kept(PREFIXES) == 2, "no change"
    assert link.kept([PREFIXES[2], *PREFIXES]) == 0, "a piece without those before it is worth nothing"
    link.update_prefixes(stage_pb2.PrefixList(version=99))
    assert link.kept(PREFIXES) == 0
    keeping(links, a=2)
    link.forget_prefixes()
    assert (link.kept(PREFIXES), link.prefix_version) == (0, 0)
    link.update_prefixes(stage_pb2.PrefixList(version=7, digests=bytes(range(256)) * (1 << 15)))
    assert len(link.prefixes) <= MAX_LISTED
    before = link.info
    for field, most, each in (("links", 64, stage_pb2.LinkInfo()), ("releases", 2, release("a")), ("blocks", 1024, 1)):
        with pytest.raises(StatusError, match=f"{most + 1} {field}"):
            link.update(stage_pb2.DescribeResponse(**{field: [each] * (most + 1)}))
    assert link.info is before


def test_hosts_to_avoid_are_used_if_there_is_no_other_and_a_failed_link_after_a_while() -> None:
    assert names(square(), ("a", "x")) == "b y"
    assert names(square(), ("a", "b", "x", "y")) == "a x"
    assert names(square()[:3], ("b",)) == "a x"
    assert names(even(), ("a", "a", "b", "x")) == "b y"
    suspects = Suspects()
    suspects.add("a", "x", now_s=100.0)
    assert names(square(), suspects=suspects.now(100.0)) == "b y"
    assert names(square(), suspects=suspects.now(100.0 + SUSPECT_S)) == "a x", "by then its hosts report the problem"


def test_a_host_serves_every_release_it_has_loaded() -> None:
    links = square()
    exchange(links[0], release("a"), release("other"))
    exchange(links[2], release("a"), release("other", loading=True))
    assert names(links) == "a x"
    assert best_path(links, weights_of(release("other")), ()) is None
    exchange(links[2], release("other"))
    assert names(links) == "b y"
    path: Any = best_path(links, weights_of(release("other")), ())
    assert [link.entry.name for link in path] == ["a", "x"]


def exchange(link: HostLink, *releases: stage_pb2.Release) -> None:
    link.update(stage_pb2.DescribeResponse(releases=releases, links=link.info.links))


@given(st.lists(st.integers(1, 100), min_size=12, max_size=12), st.sets(st.integers(0, 5)))
def test_the_cheapest_path_is_found(rtts_ms: list[int], lost: set[int]) -> None:
    """Against trying them all: two hosts for each of three blocks."""
    pairs = [(i, j) for i in range(6) for j in range(6) if j // 2 == (i // 2 + 1) % 3]
    rtt_ms = dict(zip(pairs, rtts_ms, strict=True))
    links = [
        make(f"h{i}", (i // 2,), parts=3, **{f"h{b}": float(ms) for (a, b), ms in rtt_ms.items() if a == i})
        for i in range(6)
    ]
    for i in lost:
        links[i].problem = "lost"
    costs = {
        f"h{i} h{j} h{k}": rtt_ms[i, j] + rtt_ms[j, k] + rtt_ms[k, i]
        for i, j, k in product((0, 1), (2, 3), (4, 5))
        if not {i, j, k} & lost
    }
    found = names(links)
    assert (found is None) == (not costs)
    assert found is None or costs[found] == min(costs.values())
