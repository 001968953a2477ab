"""Bytes of a plan: by hand, as the engine in one process counts them, and as calls have them."""

from dataclasses import replace

import pytest

from tests.trainer.small import corpus, tiny
from trainer.blocks.config import RoundSettings
from trainer.planning.cost import PartInventory, take_inventory, traffic_of
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec, settled

PART = PartInventory("block-0", {"a": (3, 256), "b": (5,)}, 0, {"block-1": {"c": (128,)}}, 3)
"""773 numbers in four rows, in groups of 128 that are seven."""


@pytest.mark.parametrize(
    ("codec", "own", "copy"),
    [("fp32", 4 * 773, 512), ("int8", 773 + 4 * 4, 128 + 4), ("e3m0", 384 + 3 + 4 * 7, 64 + 4)],
)
@pytest.mark.parametrize(("overlap", "versions"), [("none", 9), ("eager", 8)])
def test_bytes_are_those_counted_by_hand(codec: str, own: int, copy: int, overlap: str, versions: int) -> None:
    settings = RoundSettings(rounds=10, codec=codec, down_codec=codec, overlap=overlap)  # type: ignore[arg-type]
    traffic = traffic_of(PART, settings)
    assert (traffic.up, traffic.down, traffic.copies) == (own, own, (copy,))
    assert traffic.first == 4 * (773 + 128)
    assert traffic.up_in_all == 10 * own
    assert traffic.down_in_all == traffic.first + versions * (own + copy)


def test_all_fragments_but_the_last_come_once_more() -> None:
    settings = RoundSettings(rounds=10, codec="e3m0", down_codec="int8", fragments=2)
    part = replace(PART, copied={"block-1": {"c": (128,), "d": (2, 3)}})
    traffic = traffic_of(part, settings)
    assert (traffic.ups, traffic.copies) == ((384 + 4 * 6, 3 + 4), (128 + 4, 6 + 8))
    assert traffic.downs == (768 + 4 * 3, 5 + 4)
    assert traffic.down_in_all == traffic.first + 10 * 780 + 9 * 9 + 9 * 146


def test_what_is_more_as_a_difference_comes_whole() -> None:
    """Numbers in rows of one have a scale each."""
    traffic = traffic_of(replace(PART, shapes={"a": (100, 1)}), RoundSettings(rounds=2, down_codec="int8"))
    assert traffic.downs == (400,)


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("e3m0", "int8"), ("top32", "top7")])
@pytest.mark.parametrize("overlap", ["none", "eager"])
def test_the_engine_in_one_process_counts_the_same(codecs: tuple[str, str], overlap: str) -> None:
    """Exactly, but for one version: it fetches the last one, too."""
    rounds = replace(tiny.rounds, steps_per_round=1, rounds=3, replicas=2, deadline="lockstep", overlap=overlap)
    rounds = replace(rounds, model="scorer", context_by="copies", codec=codecs[0], down_codec=codecs[1])
    config = replace(tiny, rounds=rounds)
    frame = RunSpec.of(config, corpus)
    counted = Simulation(frame, corpus, SimulatedWorkers()).run()
    parts = take_inventory(config)
    traffic = [traffic_of(part, settled(config).rounds) for part in parts]
    assert counted.up_bytes == 2 * sum(each.up_in_all for each in traffic)
    down = sum(part.weight_bytes + (each.versions + 1) * each.down for part, each in zip(parts, traffic, strict=True))
    assert counted.down_bytes == 2 * down
    first = sum(each.first - part.weight_bytes for part, each in zip(parts, traffic, strict=True))
    assert counted.copies_bytes == 2 * (first + sum(each.versions * sum(each.copies) for each in traffic))
