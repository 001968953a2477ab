"""Any bytes that others wrote give a result or an error message."""

import contextlib
import math
import random
import warnings
from pathlib import Path

import pytest

from stages.errors import OnesweepError
from stages.v1 import stage_pb2
from stages.wire.messages import put_work
from tests.fuzz.inputs import changed, damaged
from tests.fuzz.readers import readers
from tests.stages.hops import step

INPUTS = 40  # for each reader; `python .ci/fuzz files` has no end


def hop() -> stage_pb2.Hop:
    made = stage_pb2.Hop(router="r", session="s", digest="d" * 64, capacity=9, left_s=1)
    made.timings.add(host="h", queue_ms=1.5)
    put_work(made, step(number=3, clean=b"abc", hidden=bytes(range(64)), remaining=2, codec="int8"))
    made.read.sample.sampling.temperature = 0.8
    return made


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a reader that only warns would continue after its warning
        for reader in readers(tmp_path):
            reader.read(reader.sample)
            for _ in range(INPUTS):
                with contextlib.suppress(OnesweepError):
                    reader.read(damaged(rng, reader.sample))


def test_damage_changes_the_bytes_and_never_fails() -> None:
    rng, data = random.Random(1), hop().SerializeToString()
    found = {damaged(rng, data, [b"", b"x", data]) for _ in range(500)} | {damaged(rng, b"")}
    assert len(found) > 400
    assert {len(each) > len(data) for each in found} == {True, False}


def test_changes_reach_every_field_and_its_extremes() -> None:
    rng, touched, numbers, temperatures = random.Random(1), set(), set(), []
    for _ in range(3000):
        message = hop()
        changed(rng, message, [hop()])
        touched |= {field.name for field, value in message.ListFields() if value != getattr(hop(), field.name)}
        numbers.add(message.read.number)
        temperatures.append(message.read.sample.sampling.temperature)
        assert stage_pb2.Hop.FromString(message.SerializeToString()) is not None
    assert touched >= {"router", "session", "digest", "capacity", "timings", "path", "place", "read", "request"}
    assert {0, (1 << 64) - 1} <= numbers
    assert any(math.isnan(t) for t in temperatures)
    assert math.inf in temperatures


@pytest.mark.parametrize("target", ["hop", "request", pytest.param("http", marks=pytest.mark.slow), "files"])
def test_a_fuzz_target_accepts_its_seeds(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guided fuzzer starts from messages that the code accepts."""
    folder = Path(__file__).resolve().parents[2] / ".ci/fuzz"
    monkeypatch.syspath_prepend(str(folder))
    module = __import__("file_targets" if target == "files" else "serving_targets")
    made = getattr(module, target)()
    seeds = list(made.seeds)
    assert seeds
    for seed in seeds:
        made.parse(seed)
        with contextlib.suppress(ValueError, RecursionError, OverflowError, *made.errors):
            made.parse(made.mutated(random.Random(1), seed))
