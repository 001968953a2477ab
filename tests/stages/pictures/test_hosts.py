"""Hosts that draw, over gRPC: the same pixels wherever the parts lie and whatever is drawn beside them."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from stages.limits import MAX_SEED
from stages.pictures.trajectory import MAX_GUIDANCE, DrawPlan
from tests.stages.pictures.lines import PLAN, Line, drawing_of, drawn_here, open_line
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle
from tests.stages.raw_client import Peer, sweep

KINDS = pytest.mark.parametrize("kind", ["chain", "steps"])


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture_bundle(tmp_path_factory.mktemp("drawing"), ("chain", "steps"))


@pytest.fixture(scope="module")
def three(drawing: Path, module_servers: Any) -> Iterator[Line]:
    with open_line(module_servers, drawing, (0,), (1,), (2,), session_mb=1) as line:
        yield line


@pytest.fixture(scope="module")
def one(drawing: Path, module_servers: Any) -> Iterator[Line]:
    with open_line(module_servers, drawing, (0, 1, 2)) as line:
        yield line


@pytest.fixture(scope="module")
def two(drawing: Path, module_servers: Any) -> Iterator[Line]:
    with open_line(module_servers, drawing, (0,), (1, 2)) as line:
        yield line


def pixels_here(kind: Any, plan: DrawPlan = PLAN, codec: str = "int8") -> bytes:
    return drawn_here(kind, plan, codec)[-1].numpy().tobytes()


def unused(line: Line) -> bool:
    """True if no host of the line keeps anything."""
    counters = [each.describe().counters for each in line.peers]
    return not any(each.sessions or each.session_bytes or each.queued for each in counters)


@KINDS
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_any_split_gives_the_pixels_of_one_process(
    one: Line, two: Line, three: Line, name: str, kind: Any, codec: str
) -> None:
    expected = pixels_here(kind, codec=codec)
    assert len(expected) == PLAN.pictures * 64
    assert len(set(expected)) > 20
    for line in (one, two, three):
        assert line.drawn(kind, name, codec=codec) == expected
        assert unused(line)


@KINDS
def test_pictures_drawn_together_are_those_drawn_alone(three: Line, name: str, kind: Any) -> None:
    plans = [
        replace(PLAN, seed=seed, classes=classes, levels=levels, solver=solver, guidance=guidance)
        for seed, classes, levels, solver, guidance in (
            (MAX_SEED, (1, 1), 5, "2m", 1.0),
            (7, (0,) * 40, 3, "euler", 1.0),
            (0, (1,), 5, "2m", 1.0),
            (1, (3, 2), 9, "2m", 4.0),
        )
    ]
    sessions = [f"{name}{i}" for i in range(len(plans))]
    hops = [three.hop(kind, session, plan) for session, plan in zip(sessions, plans, strict=True)]
    assert not three.peers[0].send(*hops).rejections
    found: dict[str, bytes] = {}
    while len(found) < len(plans):
        event = three.peers[-1].event()
        found[event.session] = event.pictures.pixels
    three.release(*sessions)
    assert [found[session] for session in sessions] == [pixels_here(kind, plan) for plan in plans]
    assert found[sessions[0]][64:] == found[sessions[2]], "the seed after the largest is 0"


def test_previews_show_the_pixels_of_each_host(three: Line, two: Line, name: str) -> None:
    shown = [pixels.numpy().tobytes() for pixels in drawn_here("chain")]
    for line in (three, two):
        line.peers[0].push(line.hop("chain", name, previews=True))
        events = [each.event_of(name) for each in line.peers]
        assert [event.pictures.pixels for event in events] == [*shown[: len(events) - 1], shown[-1]]
        assert [event.pictures.preview for event in events] == [True] * (len(events) - 1) + [False]
        assert [event.pictures.block for event in events[:-1]] == list(range(len(events) - 1))
        line.release(name)


@KINDS
def test_hops_out_of_order_are_refused(three: Line, name: str, kind: Any) -> None:
    first = three.peers[0]
    first.push(three.hop(kind, name, number=3))
    assert three.result(name).HasField("pictures")
    due = 4 if kind == "chain" else 4 + PLAN.levels
    assert first.refusal(three.hop(kind, name, number=3)).code() is grpc.StatusCode.ALREADY_EXISTS
    assert first.refusal(three.hop(kind, name, number=due + 1)).code() is grpc.StatusCode.FAILED_PRECONDITION
    more = three.hop(kind, name, replace(PLAN, classes=(0,) * 6), number=due)
    assert "opened for 10 pictures at once, not 12" in first.refusal(more).details()
    first.push(three.hop(kind, name, number=due))
    assert three.result(name).HasField("pictures")
    three.release(name)
    assert first.refusal(three.hop(kind, name)).code() is grpc.StatusCode.CANCELLED


def test_a_hop_for_the_other_kind_of_checkpoint_is_refused(one: Line, alone: Peer, name: str) -> None:
    error = one.peers[0].refusal(sweep(one.digests["chain"], name))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "this checkpoint draws pictures: ask for pictures with `onesweep draw`" in error.details()
    error = alone.refusal(one.hop("chain", name))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "this checkpoint writes text: ask for text with `onesweep generate`" in error.details()


# Bad hops

ROWS = PLAN.pictures * TINY.tokens
E_INT8 = struct.pack("<f", 0.001) * ROWS + bytes(4 * ROWS)
HIDDEN = bytes(2 * ROWS * TINY.features * 4)
NAN = struct.pack("<f", float("nan"))
FAR = struct.pack("<f", TINY.limit * 1.01)
STATE = bytes(16 * ROWS)


def setting(**fields: Any) -> Callable[[Any], object]:
    return lambda work: work.drawing.CopyFrom(drawing_of(PLAN, **fields))


def fields(**values: Any) -> Callable[[Any], object]:
    return lambda work: [setattr(work, key, value) for key, value in values.items()]


DRAWINGS: list[tuple[Callable[[Any], object], str]] = [
    (lambda work: work.ClearField("drawing"), "a hop of this model can have 1 to 1024 pictures with guidance, not 0"),
    (setting(classes=[0] * 1025), "a hop of this model can have 1 to 1024 pictures with guidance, not 1025"),
    (setting(classes=[0] * 1025, guidance=1), "of this model can have 1 to 1024 pictures, not"),
    (setting(classes=[0, 4]), "unknown class 4; this model has classes 0 to 2, and 3 for none"),
    (setting(levels=0), "noise levels, not 0"),
    (setting(solver="heun"), "unknown solver 'heun'; choose from euler, 2m"),
    (setting(guidance=float("nan")), "guidance must be 0 to 20, not nan"),
    (setting(guidance=MAX_GUIDANCE + 0.1), "guidance must be 0 to 20, not 20.1"),
    (fields(codec="jpeg"), "unknown"),
    (fields(number=(1 << 62) + 1), "the limit is"),
]
DRAWS = [
    (0, fields(estimate=E_INT8), "block 0 starts from noise: its message must carry no estimate"),
    (0, setting(levels=2), "this model takes 3 to 256 noise levels, not 2"),
    (1, fields(estimate=b""), "int8 payload has 0 bytes; 80 x 4 numbers take 640"),
    (1, fields(estimate=NAN + E_INT8[4:]), "scales that are not finite, negative or beyond"),
    (1, fields(codec="fp32", estimate=FAR + bytes(16 * ROWS - 4)), "numbers that are not finite or beyond 1"),
]
DENOISES = [
    (0, fields(codec="int4"), "unknown codec of hidden states 'int4'"),
    (0, fields(level=8), "level 8 does not exist: these pictures are done after level 7"),
    (0, fields(estimate=STATE), "level 0 starts from noise"),
    (0, fields(before=STATE), "uses the previously denoised pictures: send none"),
    (0, fields(hidden=HIDDEN), "stage 0 reads patches"),
    (0, fields(level=1, before=STATE), "fp32 payload has 0 bytes; 80 x 4 numbers take 1280"),
    (0, fields(level=1, estimate=STATE, before=FAR + STATE[4:]), "numbers that are not finite or beyond 1"),
    (1, fields(hidden=b""), "int8 payload has 0 bytes; 160 x 32 numbers take"),
    (1, fields(codec="fp32", hidden=NAN + HIDDEN[4:]), "numbers that are not finite or beyond 1e+06"),
]


@pytest.mark.parametrize(
    ("kind", "part", "change", "sentence"),
    [
        *((kind, 0, *bad) for kind in ("chain", "steps") for bad in DRAWINGS),
        *(("chain", *bad) for bad in DRAWS),
        *(("steps", *bad) for bad in DENOISES),
    ],
)
def test_a_wrong_hop_is_refused_and_leaves_no_session(
    three: Line, name: str, kind: Any, part: int, change: Callable[[Any], object], sentence: str
) -> None:
    hop = three.hop(kind, name)
    work = hop.draw if kind == "chain" else hop.denoise
    if part and kind == "chain":
        work.block, work.estimate = part, E_INT8
    elif part:
        work.stage, work.codec, work.hidden = part, "fp32", HIDDEN
        work.codec = "int8" if sentence.startswith("int8") else "fp32"
    change(work)
    error = three.peers[part].refusal(hop)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.rstrip("$") in error.details()
    assert not sentence.endswith("$") or error.details().endswith(sentence[:-1])
    assert unused(three)


@KINDS
def test_a_hop_for_other_weights_or_another_part_is_refused(three: Line, name: str, kind: Any) -> None:
    host, hop = three.peers[0], three.hop(kind, name)
    hop.digest = "f" * 64
    assert "is for the checkpoint ffffffffffff, but this host has" in host.refusal(hop).details()
    hop = three.hop(kind, name, **({"block": 1} if kind == "chain" else {"stage": 1}))
    error = host.refusal(hop)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "1 does not start here: this host holds 0" in error.details()
    assert unused(three)
