"""The fields of requests: those of OpenAI's API that our models support, and our own."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, create_model, model_validator

from serving.gateway.base_fields import IGNORED_IMAGE_FIELDS, IGNORED_TEXT_FIELDS, Fields, without_effect
from serving.gateway.messages import ChatMessage
from serving.modes import DRAWING_MODES
from serving.router.request import (
    DEFAULT_MAX_BYTES,
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_TIMEOUT_S,
    MAX_TOOLS,
    SETTINGS,
    kind_of,
)
from stages.host.schema_check import OF_CALLS, held_part
from stages.limits import MAX_BIAS, MAX_BIASES, MAX_COUNT, MAX_LOGPROBS, MAX_SEED
from stages.settings import Bounds

MAX_CHOICES = 16  # per prompt and per request
MAX_PROMPTS = 128
MAX_IMAGES = 10  # OpenAI's limit
MAX_ENTRANTS = 16
DEFAULT_MAX_TOKENS = 128


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_prompts(given: list[Any]) -> list[str | list[int]]:
    """Read a list of prompts, each a text or a list of tokens. Raises ValueError for too many."""
    prompts = [given] if isinstance(given[0], int) else given
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} entries")
    return prompts


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema and schema.get("type") != "object":
        raise ValueError("the parameters of a tool must be a JSON schema of type object")
    return schema or {"type": "object", "properties": {}, "additionalProperties": False}


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    # hosts would enforce it on calls only, not on the words around them
    if OF_CALLS in schema:
        raise ValueError(f"{OF_CALLS} is not a keyword of JSON Schema: leave it out")
    return schema


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Token = Annotated[int, Field(ge=0, le=MAX_COUNT)]
# the JSON schema states bounds as doubles, which represent 2^64 but not the largest seed
SeedOrNone = Annotated[int, Field(ge=-1, lt=MAX_SEED + 1)]  # -1: none, as in other servers
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]
TopCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Timeout = Annotated[
    Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None, Field(description="deadline of the whole request")
]
TokenNumber = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
# a character has at least one byte; the router counts bytes
StopList = Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    StopList | None,  # the limit applies to the list: None has no length
    BeforeValidator(_as_list, json_schema_input_type=str | StopList | None),
    Field(description=f"Up to {MAX_STOPS} strings; the text ends before the first of them."),
]


def _setting_field(name: str, description: str = "") -> Any:  # noqa: ANN401
    """A field with the help and bounds of `Request`, which checks them, so that all clients get the same sentence."""
    about = _SETTINGS_BY_NAME[name].metadata
    bounds = about.get("bounds", Bounds())
    limits = {"minimum": bounds.minimum, "maximum": bounds.maximum, "exclusiveMinimum": bounds.above}
    return Field(
        default=None,
        description=description or about["http"] or about["help"].rpartition(" (")[0],
        json_schema_extra={word: bound for word, bound in limits.items() if bound is not None},
    )


_SETTINGS_BY_NAME = {f.name: f for f in SETTINGS}
# Settings of a request that OpenAI's API does not have.
_OWN: Any = {f.name: (kind_of(f) | None, _setting_field(f.name)) for f in SETTINGS if f.metadata.get("http")}
_Settings = create_model("_Settings", __base__=Fields, **_OWN)


class Extension(_Settings):  # type: ignore[misc, valid-type]
    """Settings that onesweep has and OpenAI's API does not. The router chooses those that are left out."""

    mode: str | None = Field(default=None, description="sweep, ar, ... (auto): where the model is `onesweep`")
    timeout_s: Timeout = None


class StreamOptions(Fields):
    include_usage: bool | None = Field(default=None, description="one more chunk at the end, with the usage")
    include_obfuscation: Any = Field(default=None, description="no effect")


class SampledRequest(without_effect(IGNORED_TEXT_FIELDS)):  # type: ignore[misc]
    """The common fields of completions, chats and responses."""

    model: str = Field(description="`onesweep`, or `onesweep-MODE`; GET /v1/models lists them")
    temperature: float | None = _setting_field("temperature", "0 = greedy (the model's, else 0.8)")
    seed: SeedOrNone | None = Field(
        default=None,
        description="the same seed and settings give the same text; none or -1: a random one, returned in the answer",
    )
    top_p: float | None = _setting_field("top_p")
    top_k: int | None = _setting_field("top_k")
    min_p: float | None = _setting_field("min_p")
    repetition_penalty: float | None = _setting_field("repetition_penalty")
    stream: bool | None = None
    onesweep: Extension = Field(default=Extension(), description="settings of onesweep")


class TextRequest(SampledRequest):
    """The common fields of completions and chats."""

    max_tokens: Count | None = Field(
        default=None, description=f"maximum to generate; a byte model's tokens are bytes ({DEFAULT_MAX_TOKENS})"
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        default=None, description="choices; choice i is what seed + i gives by itself"
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="no effect: as n")
    stop: Stops = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = _setting_field("frequency_penalty")
    presence_penalty: float | None = _setting_field("presence_penalty")
    logit_bias: Annotated[dict[TokenNumber, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        default=None, description="added to the logits of tokens, by their numbers in the model's vocabulary"
    )


_NOT_EMPTY = Field(min_length=1, fail_fast=True)
Prompt = Annotated[str, Field(min_length=1)]
TokenPrompt = Annotated[list[Token], _NOT_EMPTY]
Prompts = Annotated[list[Prompt | TokenPrompt], _NOT_EMPTY]


class CompletionRequest(TextRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        Prompts | TokenPrompt,
        BeforeValidator(_as_list, json_schema_input_type=Prompt | Prompts | TokenPrompt),
        AfterValidator(_as_prompts),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = Field(
        default=None, description=f"maximum to generate; 0: none, with echo ({DEFAULT_MAX_TOKENS})"
    )
    echo: bool | None = Field(
        default=None, description="the prompt before the text; with logprobs those of its tokens, too: ar"
    )

    @property
    def scores_prompt(self) -> bool:
        """True where the router tells the tokens of the prompt."""
        texts = all(isinstance(each, str) for each in self.prompt)
        return bool(self.echo) and not (texts and self.logprobs is None and self.max_tokens != 0)

    logprobs: TopCount | None = Field(
        default=None, description="ln of each token's probability, and of this many of the most likely ones"
    )


class TokenizeRequest(Fields):
    """POST /tokenize, as vLLM and llama.cpp have it."""

    model: str = "onesweep"
    prompt: str = Field(default="", validation_alias=AliasChoices("prompt", "content"))
    add_special_tokens: bool = Field(
        default=True,
        validation_alias=AliasChoices("add_special_tokens", "add_special"),
        description="false: without those that texts begin with",
    )


class DetokenizeRequest(Fields):
    """POST /detokenize"""

    model: str = "onesweep"
    tokens: list[Token] = Field(min_length=1, max_length=MAX_PROMPT_BYTES)


class FunctionKind(Fields):
    type: Literal["function"]


class FunctionName(Fields):
    name: ToolName


class FunctionTool(FunctionName):
    """A function that the model may call."""

    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)] = Field(None, validate_default=True)
    strict: bool | None = Field(default=None, description="true: each call follows its parameters: ar, ar-speculative")

    @property
    def unenforced(self) -> list[str]:
        """Parts of its parameters to which no call is held."""
        return held_part(self.parameters)[1]


class ChatTool(FunctionKind):
    function: FunctionTool


class ToolChoice(FunctionKind):
    function: FunctionName


class NamedSchema(Fields):
    """A JSON schema with the name that the client has for it."""

    name: str = Field(default="schema", description="ignored")
    description: str | None = Field(default=None, description="ignored")
    schema_: Annotated[dict[str, Any], AfterValidator(_check_schema)] = Field(alias="schema")
    strict: bool = Field(default=False, description="true: refuse a schema that cannot be enforced in full")


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class PlainFormat(Fields):
    type: Literal["text", "json_object"]
    schema_: Annotated[dict[str, Any], AfterValidator(_check_schema)] | None = Field(
        None, alias="schema", validation_alias=AliasChoices("schema", "value"), description="as llama.cpp and TGI do"
    )


class ChatRequest(TextRequest):
    """POST /v1/chat/completions: the messages in the model's own chat template. A byte model, which has no roles,
    continues their texts, one line each."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    response_format: Annotated[JsonSchemaFormat | PlainFormat, Field(discriminator="type")] | None = Field(
        default=None, description="the text is JSON, by a schema where one is given: ar, ar-speculative"
    )
    max_completion_tokens: Count | None = Field(default=None, description="as max_tokens")
    logprobs: bool | None = Field(default=None, description="ln of each token's probability")
    top_logprobs: TopCount | None = Field(default=None, description="and of this many of the most likely ones")
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="functions that the model may call, where its chat template takes tools"
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        default=None, description="whether, or which, a tool must be called: ar, ar-speculative"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: return only the first of several calls")
    continue_final_message: bool | None = Field(
        default=None, description="true: the last message, of role assistant, is continued where it ends"
    )
    add_generation_prompt: bool | None = Field(default=None, description="false: as continue_final_message")

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        if not self.continues:
            return self
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message excludes add_generation_prompt: true: leave out one of them")
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls or self.must_call:
            raise ValueError(
                "continue_final_message, or add_generation_prompt: false, is for a last message of role assistant that "
                "calls no tool, and needs tool_choice none or auto"
            )
        return self

    @property
    def continues(self) -> bool:
        """True where the last message is continued, not answered."""
        return bool(self.continue_final_message) or self.add_generation_prompt is False

    @property
    def offered(self) -> list[FunctionTool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def must_call(self) -> list[str]:
        """The names of the tools of which it must call one."""
        if isinstance(self.tool_choice, ToolChoice):
            return [self.tool_choice.function.name]
        return [tool.name for tool in self.offered] if self.tool_choice == "required" else []


class ImageExtension(Fields):
    """Settings of a drawing that OpenAI's API does not have. The router chooses those that are left out."""

    mode: str | None = Field(default=None, description=f"{', '.join(DRAWING_MODES)} (chain)")
    levels: Count | None = Field(default=None, description="steps from noise to picture")
    solver: str | None = Field(default=None, description="euler, 2m")
    guidance: float | None = Field(default=None, allow_inf_nan=False, description="pull towards the class; 1 = off")
    codec: str | None = Field(default=None, description="encoding on the wire: fp32, int8, int4")
    timeout_s: Timeout = None


class ImageRequest(without_effect(IGNORED_IMAGE_FIELDS)):  # type: ignore[misc]
    """POST /v1/images/generations"""

    prompt: str = Field(description="a class of the model, by name or number")
    model: str | None = Field(default=None, description="`onesweep`")
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = Field(
        default=None, description="pictures; picture i is what seed + i gives by itself"
    )
    size: Annotated[str, Field(pattern=r"^(auto|\d{1,5}x\d{1,5})$")] | None = Field(
        default=None, description="WIDTHxHEIGHT of the model, or auto"
    )
    seed: SeedOrNone | None = Field(default=None, description="left out: a random one, returned in the answer")
    onesweep: ImageExtension = Field(default=ImageExtension(), description="settings of onesweep")


class RaceRequest(Fields):
    """POST /api/race: one prompt in several modes."""

    prompt: Prompt
    entrants: list[Annotated[str, Field(pattern="^[^,]{1,200}$")]] = Field(
        min_length=1, max_length=MAX_ENTRANTS, description="modes with their settings, such as resample:ar:chunk=32"
    )
    max_bytes: Count = DEFAULT_MAX_BYTES
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED + 1)] = 1
    temperature: float | None = _setting_field("temperature", "0 = greedy (the model's, else 0.8)")
    budget_ms: int | None = _setting_field("budget_ms")
    together: bool = Field(default=True, description="all at once; else one after another, undisturbed by each other")
