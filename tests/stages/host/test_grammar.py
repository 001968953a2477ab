"""Which symbols may come next by a JSON schema: of the text so far alone, however it was come to."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import torch

from onesweep.stages.host.grammar import Grammar, GrammarSettings
from onesweep.stages.host.parts import ModelSource, load_parts, plan_host
from onesweep.stages.host.schema_check import MAX_SCHEMA_BYTES, schema_problem
from onesweep.stages.v1 import stage_pb2
from tests.stages.host.test_candidates import Line

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
TEXT = b'{"a": 12, "b": "yy"}'


@pytest.fixture(scope="module")
def source(bundles: Path) -> ModelSource:
    found = plan_host(bundles / "own", (0,)).ar
    assert found is not None
    return found


def grammar(source: ModelSource, schema: str = SCHEMA) -> Grammar:
    return Grammar(source, GrammarSettings(schema, (), 0))


def allowed(made: Grammar) -> bytes:
    masked = made.masked(torch.zeros(1, 256))
    return b"" if masked is None else bytes(torch.isfinite(masked[0]).nonzero()[:, 0].tolist())


def test_masks_lead_to_a_complete_text(source: ModelSource) -> None:
    made = grammar(source)
    for at, byte in enumerate(TEXT):
        made.read(TEXT[:at])
        assert not made.complete
        assert byte in allowed(made)
    assert allowed(made) == b"}"
    made.read(TEXT)
    assert made.complete
    assert allowed(made) == b""


def test_a_branch_that_is_left_leaves_no_trace(source: ModelSource) -> None:
    """As where guesses turn out wrong."""
    made = grammar(source)
    for text in (TEXT, TEXT[:6], b'{"a": 7, "b": "x"}', TEXT[:9], b"", TEXT[:18], TEXT[:3]):
        made.read(text)
        fresh = grammar(source)
        fresh.read(text)
        assert (allowed(made), made.complete) == (allowed(fresh), fresh.complete)


def test_a_schema_that_turns_out_too_complex_ends_its_own_request(bundles: Path) -> None:
    """As a fault: other hops of the same pass go on."""
    pattern = {"type": "string", "pattern": "(.{0,300}a.{0,300}b.{0,300}){1,50}"}
    prompt, text = b"It was late when ", b'"' + b"acaddddbadaddadcbac" * 10
    more = stage_pb2.Sampling(grammar=stage_pb2.Grammar(json_schema=json.dumps(pattern), prompt=len(prompt)))
    line = Line([load_parts(plan_host(bundles / "own", (0, 1, 2)))], "ar", more=more)
    fault = line.step(prompt + text).fault
    assert fault.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert fault.message == "the JSON schema cannot be followed: lexer error: too many expressions constructed"


async def test_a_schema_too_complex_is_told_and_not_followed() -> None:
    assert "at most 16384" in await schema_problem(json.dumps({"description": "x" * MAX_SCHEMA_BYTES}))
    assert "recursion limit" in await schema_problem('{"items":' * 300 + "{}" + "}" * 300)
    assert "cannot be used" in await schema_problem("[1]")
    assert "cannot be used" in await schema_problem("nonsense")
    assert not await schema_problem(SCHEMA)


async def test_a_schema_that_takes_for_ever_is_refused_and_holds_up_no_other() -> None:
    endless = [
        schema_problem(json.dumps({"type": "integer", "multipleOf": 9_999_991, "title": str(i)})) for i in range(3)
    ]
    *refused, good = await asyncio.gather(*endless, schema_problem(SCHEMA))
    assert set(refused) == {"the JSON schema takes more than 1 s or too much memory to prepare: simplify it"}
    assert not good
