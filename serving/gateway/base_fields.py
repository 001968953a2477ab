"""The base of all requests: a strict object, and the table of OpenAI's fields without effect here."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

MAX_FIELDS = 64


def _describe_nulls(schema: dict[str, Any]) -> None:
    """Make a JSON schema say that `Fields` accepts null for any optional field."""
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}
    for name, about in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and about and {"type": "null"} not in about.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [about, {"type": "null"}]}


class Fields(BaseModel):
    """A strict model: unknown fields and values of another type are errors. A field that is null was not given."""

    # a client that sends `tools` and gets an answer without them would not notice
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe_nulls)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: object) -> object:
        """Read 1.0 as an integer, like JSON. Raise ValueError for too many fields: each unknown one is an error."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"an object can have at most {MAX_FIELDS} fields")
        given = {name: each for name, each in value.items() if each is not None}
        return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in given.items()}


# The fields of OpenAI's API without effect here, with the values accepted. `tests/serving/gateway` compares
# docs/http.md with these tables.
IGNORED_TEXT_FIELDS: dict[str, Any] = {
    "background": Literal[False],
    "best_of": Literal[1],
    "include": Any,
    "max_tool_calls": Any,  # for OpenAI's own tools, which this server lacks
    "metadata": Any,
    "modalities": list[Literal["text"]],
    "prediction": Any,
    "prompt_cache_key": Any,
    "prompt_cache_options": Any,
    "prompt_cache_retention": Any,
    "reasoning": Any,
    "reasoning_effort": Any,
    "safety_identifier": Any,
    "service_tier": Any,
    "store": Literal[False],
    "suffix": Literal[""],
    "truncation": Literal["disabled"],
    "user": Any,
    "verbosity": Any,
}
IGNORED_IMAGE_FIELDS: dict[str, Any] = {
    "background": Literal["auto"],
    "moderation": Any,
    "output_compression": Any,
    "output_format": Literal["png"],
    "quality": Literal["auto", "standard"],
    "response_format": Literal["b64_json"],
    "safety_identifier": Any,
    "stream": Literal[False],
    "style": Any,
    "user": Any,
}
# Advice for a rejected field or value.
INSTEAD = {
    "audio": "the model writes text only",
    "best_of": "ask for n choices, and choose among them",
    "context_management": "shorten the conversation where it is too long",
    "conversation": "nothing is stored: send the conversation again",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "input": "send messages, or a prompt to /v1/completions",
    "max_completion_tokens": "send max_tokens, or max_output_tokens to /v1/responses",
    "max_output_tokens": "send max_tokens",
    "max_tokens": "send max_output_tokens",
    "messages": "ask /v1/chat/completions, or send input to /v1/responses, a prompt to /v1/completions",
    "modalities": "the model writes text only",
    "moderation": "there is no moderation here",
    "previous_response_id": "nothing is stored: send the conversation again",
    "prompt": "send messages to /v1/chat/completions, input to /v1/responses",
    "repeat_penalty": "send repetition_penalty",
    "response_format": "send text.format to /v1/responses, or ask /v1/chat/completions",
    "store": "nothing is stored",
    "suffix": "no model here fills in between a prompt and a suffix",
    "tools": "send functions, which the client runs, in a chat",
    "top_logprobs": "ask /v1/chat/completions",
    "truncation": "shorten the conversation where it is too long",
    "web_search_options": "there is no web search here: send tools",
}


def without_effect(table: dict[str, Any]) -> type[Fields]:
    """Make a base class with the fields of a table."""
    own = {name: (kind | None, Field(None, description="no effect")) for name, kind in table.items()}
    return create_model("WithoutEffect", __base__=Fields, **own)  # type: ignore[call-overload]
