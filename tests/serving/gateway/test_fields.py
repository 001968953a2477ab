"""Every field of OpenAI's API is honoured, taken without effect, or refused with advice; the page lists them."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from pydantic import ValidationError

from serving.gateway.base_fields import IGNORED_IMAGE_FIELDS, IGNORED_TEXT_FIELDS, INSTEAD, Fields
from serving.gateway.errors import field_error
from serving.gateway.fields import ChatRequest, CompletionRequest, ImageRequest
from serving.gateway.responses import ResponseRequest

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
MIN: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    ResponseRequest: {"input": "x"},
}
# New, and of machines that only OpenAI has.
OF_OPENAI = {"access_programs", "background_options", "image"}
TAKEN = {"store": False, "background": False, "best_of": 1, "truncation": "disabled", "modalities": ["text"]} | {
    "suffix": ""
}


def refusal(request: type[Fields], **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        request.model_validate(body := {"model": "onesweep", **MIN.get(request, {}), **fields})
    return str(field_error([{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()], body).detail)


@pytest.mark.parametrize(
    ("request_", "params"),
    [(ChatRequest, ChatParams), (CompletionRequest, TextParams), (ResponseRequest, ResponseParams)],
)
def test_every_field_of_openai_is_known(request_: type[Fields], params: Any) -> None:
    unknown = params.__annotations__.keys() - request_.model_fields.keys()
    assert unknown - OF_OPENAI <= INSTEAD.keys()
    for name in unknown & INSTEAD.keys():
        assert refusal(request_, **{name: "x"}).endswith(f"field {name!r}: {INSTEAD[name]}")


@pytest.mark.parametrize("request_", MIN)
def test_ignored_fields_and_nulls_are_accepted_everywhere(request_: type[Fields]) -> None:
    habits: dict[str, Any] = {name: TAKEN.get(name, {"a": "b"}) for name in IGNORED_TEXT_FIELDS}
    request_.model_validate({"model": "onesweep", **MIN[request_], **habits, "seed": -1})
    request_.model_validate({"model": "onesweep", **dict.fromkeys({*habits, *INSTEAD, "x"}), **MIN[request_]})
    assert refusal(request_, store=True) == "store must be false, not true: nothing is stored"
    assert refusal(request_, chunk=3) == "unknown or unsupported field 'chunk': send it in the object onesweep"


@pytest.mark.parametrize("request_", MIN)
@pytest.mark.parametrize("junk", [True, 1.5, -5, 10**400, "x", [], {}, [1], {"a": 1}, ["x"] * 2000, [{"type": "x"}]])
def test_an_invalid_value_is_explained_in_our_words(request_: type[Fields], junk: Any) -> None:
    for name in request_.model_fields:
        with contextlib.suppress(ValidationError):
            request_.model_validate({"model": "onesweep", **MIN[request_], name: junk})
            continue
        assert not re.search(r"Input|should|valid |[a-z] required|\w\[", refusal(request_, **{name: junk})), name


def test_the_schema_has_the_bounds_of_a_request() -> None:
    schema = CompletionRequest.model_json_schema()
    of_ours = schema["$defs"]["Extension"]["properties"]
    own, (one, several, _) = schema["properties"], schema["properties"]["stop"]["anyOf"]
    assert (own["top_p"]["exclusiveMinimum"], own["presence_penalty"]["maximum"]) == (0, 2)
    assert own["seed"]["anyOf"][0]["exclusiveMaximum"] == 1 << 64
    assert (one["type"], several["items"]["maxLength"], several["maxItems"]) == ("string", 256, 16)
    assert [kind.get("minItems", kind.get("minLength")) for kind in own["prompt"]["anyOf"]] == [1, 1, 1]
    assert ResponseRequest.model_json_schema()["properties"]["input"]["anyOf"][1]["minItems"] == 1
    assert (of_ours["steps"]["minimum"], of_ours["steps"]["maximum"]) == (1, 64)


def test_a_refusal_names_the_field_as_it_was_sent() -> None:
    assert refusal(CompletionRequest, prompt=[1.5]) == "prompt.0 must be a string or a list, not 1.5"
    assert refusal(CompletionRequest, prompt=[1, -1]) == "prompt.1 must be at least 0, not -1"
    assert refusal(CompletionRequest, prompt=[1, "x"]) == 'prompt.1 must be a whole number, not "x"'
    assert refusal(CompletionRequest, prompt=["x"] * 129) == "prompt: must have at most 128 entries"
    assert refusal(CompletionRequest, prompt=[[1, "x"]]) == 'prompt.0.1 must be a whole number, not "x"'
    assert "logit_bias.sea must be the number of a token" in refusal(CompletionRequest, logit_bias={"sea": 1})
    assert "'assistant' or 'tool', not \"dog\"" in refusal(ChatRequest, messages=[{"role": "dog"}])
    assert refusal(ChatRequest, response_format={"type": "json_schema"}) == "response_format.json_schema is missing"
    assert "add_generation_prompt: false, is for" in refusal(ChatRequest, add_generation_prompt=False)
    assert refusal(ResponseRequest, input=3) == "input must be a string or a list, not 3"
    assert refusal(ImageRequest, prompt="x", response_format="url") == "response_format must be 'b64_json', not \"url\""


def test_the_page_names_every_ignored_field() -> None:
    named = {word for words in re.findall("`([^`\n]+)`", PAGE) for word in re.findall("[a-z_]+", words)}
    assert named >= IGNORED_TEXT_FIELDS.keys() | IGNORED_IMAGE_FIELDS.keys()
