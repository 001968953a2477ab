"""What inputs are made of: always the same for a seed, well-formed where they claim to be, and far from the middle."""

import asyncio
import math
import random

import pytest

from onesweep.loadtest.fuzz.files import FilesTarget, Reader
from onesweep.loadtest.fuzz.inputs import Inputs, changed, damaged, drawn
from onesweep.serving.v1 import router_pb2
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import put_work, work_of
from tests.stages.hops import step


def hop() -> stage_pb2.Hop:
    made = stage_pb2.Hop(router="r", session="s", digest="d" * 64, capacity=9, left_s=1)
    made.timings.add(host="h", queue_ms=1.5)
    put_work(made, step(number=3, clean=b"abc", hidden=bytes(range(64)), remaining=2, codec="int8"))
    work_of(made).sampling.temperature = 0.8
    return made


def test_the_same_seed_makes_the_same_inputs() -> None:
    def some(seed: int) -> list[bytes]:
        return Inputs(stage_pb2.Hop, [hop().SerializeToString()], random.Random(seed)).take(100)

    assert some(1) == some(1)
    assert some(1) != some(2)


def test_damage_leaves_other_bytes_and_never_fails() -> None:
    rng, data = random.Random(1), hop().SerializeToString()
    found = {damaged(rng, data, [b"", b"x", data]) for _ in range(500)} | {damaged(rng, b"")}
    assert len(found) > 400
    assert {len(each) > len(data) for each in found} == {True, False}
    target, read = FilesTarget(rng), list[bytes]()
    target.readers = [Reader("any", b"", read.append)]
    asyncio.run(target.send(20))
    assert any(read), "an empty file grows"
    asyncio.run(target.close())


def test_changes_reach_every_field_and_its_extremes() -> None:
    rng, touched, numbers, temperatures = random.Random(1), set(), set(), []
    for _ in range(3000):
        message = hop()
        changed(rng, message, [hop()])
        touched |= {field.name for field, value in message.ListFields() if value != getattr(hop(), field.name)}
        numbers.add(message.decode.number)
        temperatures.append(message.decode.sampling.temperature)
        assert stage_pb2.Hop.FromString(message.SerializeToString()) is not None
    assert touched >= {"router", "session", "digest", "capacity", "timings", "path", "place", "decode", "request"}
    assert {0, (1 << 64) - 1} <= numbers
    assert any(math.isnan(t) for t in temperatures)
    assert math.inf in temperatures


@pytest.mark.parametrize("kind", [stage_pb2.Hop, stage_pb2.Events, router_pb2.GenerateRequest, stage_pb2.WarmRequest])
def test_any_message_type_can_be_drawn(kind: type) -> None:
    rng = random.Random(1)
    found = [drawn(rng, kind) for _ in range(50)]
    assert all(kind.FromString(message.SerializeToString()) is not None for message in found)
    assert len({message.SerializeToString(deterministic=True) for message in found}) > 5
