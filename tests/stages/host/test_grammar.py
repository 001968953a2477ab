"""Tokens that a JSON schema allows next, which depend on the text so far alone."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import AddedToken

from stages.host.grammar import Grammar, GrammarSettings, with_tags_as_text
from stages.host.parts import load_parts
from stages.host.plan import ModelSource, plan_host
from stages.host.schema_check import MAX_SCHEMA_BYTES, OF_CALLS, compiled, held_part, problem_of, schema_problem
from stages.v1 import stage_pb2
from stages.wire.status import StatusError
from tests.serving.pretrained import tokenizer
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
    return plan_host(bundles / "own", (0,)).models["ar"]


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


def test_text_is_free_until_a_call_opens(source: ModelSource) -> None:
    made = grammar(source, json.dumps({**json.loads(SCHEMA), OF_CALLS: True}))
    call = b"<tool_call>\n" + TEXT + b"\n</tool_call>"
    for text, may in ((b"\n{", b'"'), (b"x<tool_call>", b"\t\n\r {"), (b"x<tool_call>" + TEXT, b"\t\n\r <")):
        made.read(text)
        assert allowed(made) == may
    for text in (b" ", b"a {", b"a <tool", b"x" + call, b"x" + call + b"and " + call + b" <"):
        made.read(text)
        assert {*b'{" <_x'} <= {*allowed(made)}
    made.read(TEXT)
    assert made.complete


def test_an_answer_beside_calls_follows_its_own_schema(source: ModelSource) -> None:
    made = grammar(source, json.dumps({**json.loads(SCHEMA), OF_CALLS: {"const": "sea"}}))
    call = b"<tool_call>\n" + TEXT + b"\n</tool_call>"
    for text, may in ((b"", b'\t\n\r "<{'), (b'"s', b"e"), (b"<tool_call>", b"\t\n\r {"), (call + b"<", b"t")):
        made.read(text)
        assert allowed(made) == may
    for text in (TEXT, b'"sea"'):
        made.read(text)
        assert made.complete


def test_a_tag_that_is_one_token_opens_a_call(source: ModelSource) -> None:
    """As Qwen's are: added to the vocabulary, and text to a reader."""
    made_of = tokenizer()
    made_of.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("<|no|>", special=True)])
    made = LLTokenizer(with_tags_as_text(made_of.to_str()), n_vocab=made_of.get_vocab_size(), eos_token=[1])
    matcher = compiled(made, json.dumps({**json.loads(SCHEMA), OF_CALLS: True}))
    assert not isinstance(matcher, str)
    tokens = made_of.encode("a <tool_call>").ids
    assert tokens[-1] == made_of.token_to_id("<tool_call>")
    assert matcher.try_consume_tokens([*tokens, *made_of.encode("x").ids]) == len(tokens)
    assert matcher.try_consume_tokens(made_of.encode('{"a": 1').ids) == 7
    assert not matcher.try_consume_tokens([made_of.token_to_id("<|no|>")])


def test_an_abandoned_branch_leaves_no_trace(source: ModelSource) -> None:
    """As where draft tokens are rejected."""
    made = grammar(source)
    for text in (TEXT, TEXT[:6], b'{"a": 7, "b": "x"}', TEXT[:9], b"", TEXT[:18], TEXT[:3]):
        made.read(text)
        fresh = grammar(source)
        fresh.read(text)
        assert (allowed(made), made.complete) == (allowed(fresh), fresh.complete)


def test_a_schema_found_too_complex_ends_its_request_only(bundles: Path) -> None:
    """As a fault: other hops of the same pass go on."""
    pattern = {"type": "string", "pattern": "(.{0,300}a.{0,300}b.{0,300}){1,50}"}
    prompt, text = b"It was late when ", b'"' + b"acaddddbadaddadcbac" * 10
    more = stage_pb2.Sampling(grammar=stage_pb2.Grammar(json_schema=json.dumps(pattern), prompt=len(prompt)))
    line = Line([load_parts(plan_host(bundles / "own", (0, 1, 2)))], "ar", more=more)
    fault = line.step(prompt + text).fault
    assert fault.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert fault.message == "the JSON schema cannot be followed: lexer error: too many expressions constructed"


def test_a_host_refuses_an_invalid_schema(source: ModelSource) -> None:
    with pytest.raises(StatusError, match="the JSON schema cannot be followed: expected ident"):
        grammar(source, "nonsense")


def test_a_schema_that_is_too_complex_is_reported() -> None:
    assert "the limit is 16384" in schema_problem(json.dumps({"description": "x" * MAX_SCHEMA_BYTES}))
    assert "recursion limit" in schema_problem('{"items":' * 300 + "{}" + "}" * 300)
    assert "cannot be used" in schema_problem("[1]")
    assert "cannot be used" in schema_problem("nonsense")
    assert not schema_problem(SCHEMA)


STRING, LIST = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
# Parts of schemas as zod and pydantic make them.
PARTS: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": LIST},
    LIST | {"uniqueItems": True},
    LIST | {"contains": {"const": 1}, "minContains": 1},
    {"type": "object", "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}},
    *(STRING | {"pattern": each} for each in (r"^(?=.*a)b", r"^(?!x)[a-z]+$", r"(?<=a)b", r"(a)\1", r"\bfoo\b")),
    *(STRING | {"pattern": each} for each in (r"^(?<year>\d+)$", r"^(?:a|b)\\b$", r"^\p{L}+$", r"a\/b\-c")),
    *(STRING | {"format": each} for each in ("binary", "byte", "ipvanyaddress", "jwt", "uuid", "date-time")),
    *({"not": each} for each in (STRING, {"anyOf": [STRING]})),
]


@pytest.mark.parametrize("schema", PARTS, ids=str)
def test_only_unsupported_keywords_are_left_out_of_a_schema(schema: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {"not": schema, "if": {"enum": [{"uniqueItems": True}]}}}
    kept, left_out = held_part(nested)
    assert problem_of(json.dumps(kept)) == ""
    assert (kept == nested) is (problem_of(json.dumps(nested)) == "") is not left_out
    assert {each.partition(" ")[0] for each in left_out} <= schema.keys()


@pytest.mark.parametrize("more", [{"uniqueItems": False}, *({"propertyNames": each} for each in (STRING, {}, True))])
def test_a_keyword_without_effect_is_not_reported(more: dict[str, Any]) -> None:
    assert held_part(LIST | more) == (LIST, [])
