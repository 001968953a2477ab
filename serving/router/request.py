"""A request: one dataclass whose fields define the message, the command's flags, the HTTP fields and the checks.

Clients and the command line import this module, so it must not import torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from serving.modes import AUTO, MODES, SCORERS, SHAPED, WITHOUT_HOSTS
from serving.v1 import router_pb2
from stages.errors import InputError, one_of, quoted
from stages.limits import (
    MAX_BRANCHES,
    MAX_CANDIDATES,
    MAX_COUNT,
    MAX_DRAFT,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STEPS,
    MAX_TEMPERATURE,
)
from stages.settings import flag, limits, setting

DEFAULT_ROUTER = "127.0.0.1:7700"
ROUTER_HELP = f"default: the router that is up here, else {DEFAULT_ROUTER}; A,B: either"
# Limit on any text.
MAX_PROMPT_BYTES = 1 << 20
DEFAULT_MAX_BYTES = 128
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_MESSAGES = 1024
MAX_TOOLS, MAX_TOOLS_BYTES = 128, 64 << 10
# Time for a whole request: by default, and at most.
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 120.0, 3600.0
PRIORITIES = ("interactive", "batch")

# Modes that accept Euler steps, drafts by the last host, and a codec.
DENOISING, DRAFTING, RESAMPLING = ("sweep", "chunked"), ("ar-speculative",), ("resample",)
_PENALTIES = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
SENDING = tuple(mode for mode in MODES if mode not in (*WITHOUT_HOSTS, AUTO))
CODECS, HIDDEN_CODECS = ("fp32", "int8", "int4"), ("fp32", "int8")  # of estimates; of hidden states

ONE_TEXT = "temperature 0 leaves mode resample nothing to choose among: give one above 0, or use mode ar"
AS_HELP = object()


def _setting(
    help: str,
    http: object = AS_HELP,
    own: Mapping[str, Any] | None = None,
    modes: Collection[str] = MODES,
    **more: Any,  # noqa: ANN401 - of `flag`
) -> Any:  # noqa: ANN401
    """A field for `--set` that is None unless given.

    http: its description in HTTP, by default `help` without the final brackets; empty: HTTP lacks it or has its own.
    own: further metadata. modes: the modes that accept it.
    """
    description = help.rpartition(" (")[0] if http is AS_HELP else http
    metadata = flag(help, **{"rare": True, **more})
    return field(default=None, metadata={**metadata, "http": description, "modes": modes, **(own or {})})


def _count(help: str, http: object = AS_HELP, maximum: int = MAX_COUNT, **more: Any) -> Any:  # noqa: ANN401
    return _setting(help, http, minimum=1, maximum=maximum, **more)


def _name(help: str, http: object = AS_HELP, known: Mapping[str, Collection[str]] | None = None) -> Any:  # noqa: ANN401
    """:param known: the modes that accept it, with the names that each knows."""
    return _setting(help, http, {"name": True, "known": known or {}}, tuple(known or MODES))


def _shape(help: str, neutral: float, http: object = AS_HELP, **bounds: Any) -> Any:  # noqa: ANN401
    """A number that shapes sampling. `neutral`: the value without effect."""
    return _setting(help, http, {"neutral": neutral}, SHAPED, **bounds)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Text to continue, and how. None leaves a setting to the router or the mode."""

    prompt: str | bytes = b""
    mode: str = field(default="auto", metadata={"name": True})
    max_bytes: int | None = _count("maximum bytes to generate (128)", "", rare=False)
    # The tighter of this and max_bytes counts; 128 bytes if neither is given.
    max_tokens: int | None = _count("maximum tokens; a byte model's tokens are bytes", "", rare=False)
    seed: int = setting(0, "the same seed gives the same text (0)", shown="", minimum=0, maximum=MAX_SEED, metavar="S")
    chunk: int | None = _count(
        "tokens a sweep: chunked (32 bytes, 8 tokens), resample (all)", "tokens a sweep", modes=("chunked", "resample")
    )
    temperature: float | None = setting(
        None, "0 = greedy (the model's, else 0.8)", metavar="T", minimum=0, maximum=MAX_TEMPERATURE
    )
    top_p: float | None = _shape(
        "draw from the most likely tokens with this total probability (the model's, else 1)",
        1.0,
        "",
        above=0,
        maximum=1,
    )
    top_k: int | None = _shape(
        "most likely tokens to draw from; 0: all (the model's, else 0)", 0, minimum=0, maximum=MAX_COUNT
    )
    min_p: float | None = _shape(
        "draw from tokens with at least this share of the top probability (the model's, else 0)",
        0.0,
        minimum=0,
        maximum=1,
    )
    frequency_penalty: float | None = _shape(
        "subtracted from a token's logit for each time it occurred (0)", 0.0, "", **_PENALTIES
    )
    presence_penalty: float | None = _shape("subtracted from it once if it occurred (0)", 0.0, "", **_PENALTIES)
    repetition_penalty: float | None = _shape(
        "divides logits of tokens in prompt or text (the model's, else 1)", 1.0, above=0, maximum=MAX_REPETITION_PENALTY
    )
    steps: int | None = _count("Euler steps in each block: sweep, chunked (8)", maximum=MAX_STEPS, modes=DENOISING)
    codec: str | None = _name(
        "encoding on the wire: fp32, int8, int4 (int8; AR modes: fp32, int8)",
        known={mode: CODECS if mode in DENOISING else HIDDEN_CODECS for mode in SENDING},
    )
    sampler: str | None = _name(
        "stochastic, ode: sweep, chunked (stochastic)", known=dict.fromkeys(DENOISING, ("stochastic", "ode"))
    )
    draft: int | None = _count("draft tokens a sweep: ar-speculative (adaptive)", maximum=MAX_DRAFT, modes=DRAFTING)
    branches: int | None = _count(
        "alternatives drafted per position: ar-speculative (adaptive)", maximum=MAX_BRANCHES, modes=DRAFTING
    )
    scorer: str | None = _name("scorer, ar: resample (what the hosts have)", known={"resample": SCORERS})
    candidates: int | None = _count(
        "continuations scored in a sweep: resample (16)", maximum=MAX_CANDIDATES, modes=RESAMPLING
    )
    max_distance: float | None = _setting(
        "maximum distance_bound: resample; above it, ar-speculative writes (1)", minimum=0, maximum=1, modes=RESAMPLING
    )
    budget_ms: int | None = _count("latency budget: auto (the best text)", metavar="MS", rare=False, modes=(AUTO,))
    priority: str | None = _name(
        "interactive, batch (interactive)", "interactive, batch: yields to others", dict.fromkeys(MODES, PRIORITIES)
    )
    # Added to the logits of tokens, by token number in the model's vocabulary.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # `AsyncClient.events` reports each token's logprob (natural log), and those of this many most likely tokens.
    logprobs: int | None = field(default=None, metadata=limits(minimum=0, maximum=MAX_LOGPROBS))
    # JSON schema that the text must follow, itself JSON: modes `ar` and `ar-speculative`.
    json_schema: str = ""
    # The text ends before the first of these.
    stops: Sequence[str | bytes] = ()
    # A conversation as (role, content), instead of a prompt; a third item is the message's `more` in JSON.
    messages: Sequence[tuple[str, ...]] = ()
    # Functions that the model may call, as a JSON list in OpenAI's format, and the names of which it must call one.
    tools: str = ""
    must_call: Sequence[str] = ()
    # The prompt as token numbers in the model's vocabulary, instead of text.
    prompt_tokens: Sequence[int] = ()
    # `AsyncClient.events` also reports the logprobs of the prompt's own tokens: mode `ar`, with `logprobs`.
    score_prompt: bool = False
    # Continue the last message instead of answering it.
    continue_last: bool = False
    # Shorten the text if the context lacks room for all of it. True if no length is given.
    fits_context: bool = False

    def message(self, whole: bool = False, trips: bool = False) -> router_pb2.GenerateRequest:
        """The gRPC message. Raises InputError for a value that no message can carry.

        :param whole: send the text in one piece at the end.
        :param trips: report every sweep as it comes back.
        """
        from stages.wire.status import CALLS  # imports grpc, which `--help` must not wait for

        limited = self.max_bytes is not None or self.max_tokens is not None
        values = {f.name: getattr(self, f.name) for f in SETTINGS}
        if not limited:
            values["max_bytes"] = DEFAULT_MAX_BYTES
        if problem := mode_problem(self.mode, values):
            raise InputError(problem)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or not 0 <= token <= MAX_COUNT or not isinstance(bias, int | float):
                raise InputError(f"logit_bias must map whole numbers of tokens to numbers, not {token!r} to {bias!r}")
        return router_pb2.GenerateRequest(
            prompt=_raw("prompt", self.prompt),
            **values,
            json_schema=_raw("JSON schema", self.json_schema).decode(),
            logit_bias=self.logit_bias,
            stops=[_raw("stop string", stop) for stop in self.stops],
            messages=[
                router_pb2.Message(
                    role=_word("role", role), content=_raw("message", content).decode(), more="".join(more)
                )
                for role, content, *more in self.messages
            ],
            tools=_raw("list of tools", self.tools).decode(),
            must_call=[_word("tool", name) for name in self.must_call],
            prompt_tokens=self.prompt_tokens,
            score_prompt=self.score_prompt,
            continue_last=self.continue_last,
            fits_context=self.fits_context or not limited,
            whole=whole,
            trips=trips,
            protocol=CALLS,
        )


# Single-valued fields that a message, a command or an HTTP request may carry.
SETTINGS: tuple[Field[Any], ...] = tuple(f for f in fields(Request) if f.metadata)
# Settings that shape sampling, with their neutral values.
SHAPES: dict[str, float] = {f.name: f.metadata["neutral"] for f in SETTINGS if "neutral" in f.metadata}
# Settings with presence in the message.
OPTIONAL = tuple(f.name for f in router_pb2.GenerateRequest.DESCRIPTOR.fields if f.has_presence)


def given_in(message: router_pb2.GenerateRequest) -> dict[str, Any]:
    """The optional settings that a message carries, by name."""
    has: Callable[[Any], bool] = message.HasField  # its stub wants literals
    return {name: getattr(message, name) for name in OPTIONAL if has(name)}


def bounds_problem(f: Field[Any], value: object) -> str:
    """Why a setting cannot be `value`, for client and router; empty if it can."""
    if f.metadata.get("name"):
        if not isinstance(value, str):
            return f"{f.name} must be text, not {value!r}"
        return "" if value.isascii() else f"unknown {f.name} {quoted(value)}: its name must be ASCII"
    bounds, decimal = f.metadata["bounds"], kind_of(f) is float
    if not isinstance(value, int | float) or not (decimal or isinstance(value, int)):
        return f"{f.name} must be a {'' if decimal else 'whole '}number, not {value!r}"
    noun = "" if decimal else "a whole number "
    return "" if bounds.hold(value) else f"{f.name} must be {noun}{bounds.words(value)}, not {value!r}"


def mode_problem(mode: str, given: Mapping[str, Any]) -> str:
    """Why a mode does not accept some settings, for clients, the router and a frontier; empty if it does."""
    # resample leaves the rest to ar-speculative when its text drifts too far from the scorer's
    drafting = DRAFTING if given.get("max_distance") is None else (*DRAFTING, "resample")
    for f in SETTINGS:
        modes, value = f.metadata.get("modes", MODES), given.get(f.name)
        modes = drafting if modes == DRAFTING else modes
        if value is not None and (problem := bounds_problem(f, value)):
            return problem
        names = f.metadata.get("known", {}).get(mode, ())
        if value is not None and names and value not in names:
            return f"mode {mode} has no {f.name} {quoted(value)}{one_of(str(value), names)}"
        if mode not in MODES or mode in modes or value in (None, f.metadata.get("neutral")):
            continue
        if mode == AUTO:
            return f"mode {mode} chooses {f.name} itself: leave it out, or name a mode ({', '.join(modes)})"
        return f"mode {mode} does not take {f.name}: leave it out, or use mode {', '.join(modes)}"
    return ONE_TEXT if mode == "resample" and given.get("temperature") == 0 else ""


def kind_of(f: Field[Any]) -> type:
    """The type of a setting's values: str, float or int."""
    return str if f.metadata.get("name") else float if "float" in str(f.type) else int


def _word(what: str, word: str) -> str:
    if not word.isascii():
        raise InputError(f"unknown {what} {quoted(word)}: its name must be ASCII")
    return word


def _raw(name: str, text: str | bytes) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise InputError(f"the {name} is not UTF-8: check the terminal's or file's encoding") from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise InputError(f"the {name} has {len(raw)} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten it")
    return raw
