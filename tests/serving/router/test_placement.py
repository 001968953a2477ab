"""Machines that come and go: the order of their ring, and who holds what."""

from itertools import combinations

import pytest

from serving.router.placement import ROUTER_END, Span, placed, ring_order
from stages.importing.cut import StageHost


def test_the_shortest_ring_is_chosen_unless_little_is_gained() -> None:
    at = {ROUTER_END: 0.0} | {f"m{i}": 10.0 * (i * 7 % 9) for i in range(9)}  # machines along a line
    trips = {pair: abs(at[pair[0]] - at[pair[1]]) for a, b in combinations(at, 2) for pair in ((a, b), (b, a))}
    for count in (8, 9):  # all orders, then the nearest next
        order = ring_order([f"m{i}" for i in range(count)], trips)
        assert sum(trips[pair] for pair in zip(order, (*order[1:], order[0]), strict=True)) == 160, "there and back"
    trips["m1", "m2"] += 4
    assert ring_order(order, trips) == order
    assert ring_order(["m0"], {}) == ("m0",)
    lost = {pair: trip for pair, trip in trips.items() if pair != ("m0", "m1")}
    first, second, third = ring_order(["m0", "m1", "m2"], lost)
    assert ("m0", "m1") not in {(first, second), (second, third), (third, first)}, "one that could not be measured"


@pytest.mark.parametrize(
    ("held", "rooms", "after", "missing"),  # four machines; `-` is none, or one that is gone
    [
        pytest.param("- - - -", "- - - 30", "- - - 012", [], id="one for all"),
        pytest.param("0 1 2 -", "10 10 10 10", "0 1 2 1", [], id="a replica of the slowest"),
        pytest.param("0 1 2 -", "10 10 10 8", "0 1 2 2", [], id="of the slowest that fits"),
        pytest.param("0 1 2 -", "10 10 10 1", "0 1 2 -", [], id="one that stands by"),
        pytest.param("0 12 0 -", "10 20 10 20", "0 12 0 12", [], id="of the least replicated"),
        pytest.param("0 1 2 1", "10 10 10 -", "0 1 2 -", [], id="a replica goes"),
        pytest.param("0 1 2 -", "- 10 10 10", "- 1 2 0", [], id="who is free takes over"),
        pytest.param("0 1 2 1", "- 10 10 10", "- 0 2 1", [], id="a replica takes over"),
        pytest.param("0 1 2 -", "16 - 16 -", "01 - 2 -", [], id="a neighbour takes over"),
        pytest.param("0 1 2 -", "14 - 17 -", "0 - 12 -", [], id="the other neighbour"),
        pytest.param("01 - 2 -", "17 7 9 -", "1 0 2 -", [], id="one that comes back with little room"),
        pytest.param("0 1 2 -", "- 15 - -", "- 01 - -", [(2,)], id="too little room"),
        pytest.param("0 1 2 -", "10 - - -", "0 - - -", [(1, 2)], id="none that could"),
    ],
)
def test_blocks_move_as_machines_join_or_leave(held: str, rooms: str, after: str, missing: list[Span]) -> None:
    def named(words: str) -> list[tuple[str, str]]:
        return [(name, word) for name, word in zip("abcd", words.split(), strict=True) if word != "-"]

    def spans(words: str) -> dict[str, Span]:
        return {name: tuple(map(int, word)) for name, word in named(words)}

    machines = {name: StageHost(1.0, int(word), name) for name, word in named(rooms)}
    assert placed(spans(held), machines, (6, 9, 8)) == (spans(after), missing)
