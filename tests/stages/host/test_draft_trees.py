"""Trees of draft tokens: each gives, to the last bit, what its branch would have given token by token."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.backends import Backend
from stages.backends.base import CleanPiece, StageRunner
from stages.host.parts import load_parts
from stages.host.plan import plan_host
from stages.model.architecture import Architecture
from stages.model.draft_tree import MAX_DRAFT_TREE, are_depths, drafted_after, first_branch
from stages.model.layers import LayerCache
from stages.model.llama import LlamaStage
from stages.model.pipeline import ArStage, new_caches
from stages.v1 import stage_pb2
from stages.wire.status import StatusError
from tests.stages.host.test_candidates import Line
from tests.stages.model.tiny_llama import OPTIONS, TINY, random_stages

KNOWN = b"It was late when the train came in. "


@st.composite
def trees(draw: st.DrawFn, most: int = 10) -> list[int]:
    """Depths, in order."""
    depths = [0]
    for _ in range(draw(st.integers(0, most - 1))):
        depths.append(draw(st.integers(0, depths[-1] + 1)))
    return depths


def branch_of(depths: Sequence[int], at: int) -> list[int]:
    """The draft tokens from the first one down to `at`."""
    branch = [at]
    for before in reversed(range(at)):
        if depths[before] == depths[branch[0]] - 1:
            branch.insert(0, before)
    return branch


# The shape
@given(trees(), st.randoms())
def test_a_tree_has_the_ancestors_of_each_token(depths: list[int], random: Any) -> None:
    tokens = [random.randrange(4) for _ in depths]
    following = drafted_after(tokens, depths)
    for at in range(len(depths)):
        above, before = -1, list[int]()
        for each in branch_of(depths, at):
            above = following[above, tokens[each]]
            before.append(tokens[each])
        assert [tokens[each] for each in branch_of(depths, above)] == before
    assert (-1, 9) not in following


@pytest.mark.parametrize(
    ("depths", "right"), [([], True), ([0, 1, 2, 1, 0], True), ([1], False), ([0, 2], False), ([0, -1], False)]
)
def test_depths_are_in_order(depths: list[int], right: bool) -> None:
    assert are_depths(depths) is right


def test_the_first_branch_ends_where_another_starts() -> None:
    assert [first_branch(depths) for depths in ([], [0], [0, 1, 2], [0, 1, 1, 2], [0, 0, 1])] == [0, 1, 3, 2, 1]


# One stage
def stage_of(family: str) -> ArStage | LlamaStage:
    if family != "bytes":
        return random_stages(OPTIONS.get(family, TINY))[0]
    torch.manual_seed(3)
    stage = ArStage(Architecture(parts=2, layers=2, width=32, heads=2, context_length=64), 0)
    return stage.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["llama", "bytes", "capped window", "two kinds of layers", "experts"])
def stage(request: pytest.FixtureRequest) -> tuple[ArStage | LlamaStage, StageRunner]:
    made = stage_of(request.param)
    return made, Backend().stage(copy.deepcopy(made))


def opened(stage: ArStage | LlamaStage, runner: StageRunner, known: Tensor) -> list[LayerCache]:
    caches = new_caches(len(stage.layers), stage.architecture, 48)
    runner.read([CleanPiece(known, caches)])
    return caches


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(depths=trees(), seed=st.integers(0, 99), before=st.integers(0, 3), company=st.booleans())
@example(depths=[0, 1, 2, 0, 1, 1], seed=1, before=1, company=True)
def test_a_tree_is_computed_like_its_branches_alone(stage, depths, seed: int, before: int, company: bool) -> None:
    """In whatever company, and what stays in the cache is the first branch."""
    made, runner = stage
    draws = torch.Generator().manual_seed(seed)
    known, new, other = (torch.randint(250, (count,), generator=draws) for count in (9, before + len(depths), 5))
    whole = (*range(before), *(before + depth for depth in depths))
    caches, beside = (opened(made, runner, known) for _ in range(2))
    pieces = [CleanPiece(new, caches, len(whole), whole), *([CleanPiece(other, beside)] if company else [])]
    found = runner.read(pieces)[0]
    for at in range(len(whole)):
        alone = opened(made, runner, known)
        rows = [runner.read([CleanPiece(new[each : each + 1], alone)])[0] for each in branch_of(whole, at)]
        assert torch.equal(found[at], rows[-1][0])
    plain = opened(made, runner, known)
    for each in range(first_branch(whole)):
        runner.read([CleanPiece(new[each : each + 1], plain)])
    for kept, wanted in zip(caches, plain, strict=True):
        assert kept.length == wanted.length
        assert all(map(torch.equal, kept.stored(), wanted.stored()))


# A whole ring
@pytest.fixture(scope="module")
def line_of(bundles: Path) -> Any:
    hosts = [load_parts(plan_host(bundles / "scored", span)) for span in ((0,), (1, 2))]
    return lambda **settings: Line(hosts, "ar", **settings)


PENALTIES = stage_pb2.Shaping(
    frequency_penalty=1, presence_penalty=1, repetition_penalty=1.2, top_p=0.9, prompt=len(KNOWN)
)
NUMBERS = stage_pb2.Grammar(
    json_schema='{"type": "array", "items": {"type": "integer"}, "minItems": 30}', prompt=len(KNOWN)
)
ASKED = {
    "plain": stage_pb2.Sampling(),
    "penalties": stage_pb2.Sampling(shaping=PENALTIES),
    "a schema": stage_pb2.Sampling(grammar=NUMBERS, logprobs=1),
}


@pytest.mark.parametrize("more", ASKED.values(), ids=ASKED)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.8]))
def test_the_text_is_that_of_plain_steps(
    line_of: Any, more: stage_pb2.Sampling, data: st.DataObject, seed: int, temperature: float
) -> None:
    """The tree has right draft tokens on its first branch, on another, or none."""
    asked = {"seed": seed, "temperature": temperature, "more": more, "prompt": len(KNOWN)}
    plain, text = line_of(**asked), KNOWN
    start = 0
    while len(text) < len(KNOWN) + 24:
        event = plain.step(text[start:], start)
        start, text = len(text), text + event.text
    # hosts that read all of it at once, as after a failure, go on with the same token
    assert line_of(**asked).step(text[:-1]).text == text[-1:]
    line, known, read = line_of(**asked), KNOWN, 0
    while len(known) < len(text):
        depths = data.draw(trees(6))
        right = text[len(known) :] + bytes(8)
        wrong = data.draw(st.lists(st.booleans(), min_size=len(depths), max_size=len(depths)))
        draft = bytes(right[d] ^ 1 if miss else right[d] for d, miss in zip(depths, wrong, strict=True))
        event = line.step(known[read:] + draft, read, draft=len(depths), depths=depths)
        assert text.startswith((known + event.text)[: len(text)])
        first = draft[: first_branch(depths)]
        kept = next((i for i, pair in enumerate(zip(first, event.text, strict=False)) if pair[0] != pair[1]), None)
        read = len(known) + min(len(first) if kept is None else kept, len(event.text) - 1)
        known += event.text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"depths": [0, 1], "draft": 3}, "2 depths for 3 draft tokens"),
        ({"depths": [0, 2, 1], "draft": 3}, "depths of a tree must begin with 0"),
        ({"depths": [4_000_000_000, 0, 0], "draft": 3}, "depths of a tree must begin with 0"),
        (
            {"depths": [0] * (MAX_DRAFT_TREE + 1), "draft": MAX_DRAFT_TREE + 1},
            "a tree has 65 draft tokens; the limit is 64",
        ),
        ({"depths": [0]}, "1 depths for 0 draft tokens"),
    ],
)
def test_an_invalid_tree_is_refused(line_of: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(StatusError, match=says):
        line_of().step(KNOWN * 3, **fields)


def test_branches_share_positions_of_the_session(line_of: Any) -> None:
    """A session need only have room for the deepest draft token."""
    draft = {"draft": 6, "depths": [0, 1, 0, 1, 0, 1]}
    assert line_of(capacity=len(KNOWN) + 2).step(KNOWN + b"abcdef", **draft).text
    with pytest.raises(StatusError, match="do not fit the session's"):
        line_of(capacity=len(KNOWN) + 1).step(KNOWN + b"abcdef", **draft)
