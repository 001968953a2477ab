"""Checks that several kinds of work share: that tokens fit a session, and how tokens are sampled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from stages.checkpoint.manifest import TOKENIZER_NAME
from stages.host.grammar import GrammarSettings
from stages.host.plan import ModelSource
from stages.host.schema_check import MAX_SCHEMA_BYTES, grammar_absent
from stages.limits import MAX_ENDS, MAX_LOGPROBS, MAX_TEMPERATURE
from stages.model.scoring import Shaping, bias_problem
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, invalid


def check_reads(reads: Sequence[int], clean: int) -> None:
    """Raise StatusError unless `clean` new tokens can have come in these reads."""
    # count the reads before looking at them: checking 60 MB of reads held the event loop for seconds
    if len(reads) > clean or not all(reads) or sum(reads) > clean:
        raise invalid(f"{len(reads)} reads do not fit {clean} clean tokens: too many, too long, or empty")


def check_extent(capacity: int, start: int, new: int, positions: int) -> None:
    """Raise StatusError unless a session of `capacity` positions has room for `new` tokens at `start`."""
    if not 1 <= capacity <= positions:
        raise invalid(f"a session of {capacity} positions does not fit the context of {positions}")
    if start + new > capacity:
        raise invalid(f"{new} tokens at position {start} do not fit the session's {capacity} positions")


# Sampling: seed, temperature, the shaping of the distribution, and the grammar of a text.
@dataclass(frozen=True)
class SamplingPlan:
    """Seed, temperature and all other settings that decide which tokens are sampled."""

    seed: int
    temperature: float
    shaping: Shaping
    grammar: GrammarSettings | None  # None: any text
    logprobs: int | None  # number of most likely tokens to report with the sampled one; None reports no logprobs


def parse_sampling(sampling: stage_pb2.Sampling, source: ModelSource, known: int, is_last: bool) -> SamplingPlan:
    """Raises StatusError.

    :param known: tokens before the first one that is sampled.
    :param is_last: this host samples.
    """
    plan = _parse_sampling(sampling.SerializeToString(), source, is_last)
    for prompt in (plan.shaping.prompt, plan.grammar.prompt if plan.grammar else 0):
        if prompt > known:
            raise invalid(f"the prompt has {prompt} tokens, but only {known} are known")
    return plan


@lru_cache(256)  # the same in every step of a request
def _parse_sampling(data: bytes, source: ModelSource, is_last: bool) -> SamplingPlan:
    sampling = stage_pb2.Sampling.FromString(data)
    if sampling.logprobs > MAX_LOGPROBS:
        raise invalid(f"logprobs must be 0 to {MAX_LOGPROBS}, not {sampling.logprobs}")
    return SamplingPlan(
        sampling.seed,
        check_temperature(sampling.temperature),
        _parse_shaping(sampling.shaping, source.manifest.text_architecture.vocabulary),
        _parse_grammar(sampling.grammar, source, is_last) if sampling.HasField("grammar") else None,
        sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def check_temperature(temperature: float) -> float:
    """The temperature. Raises StatusError."""
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be 0 to {MAX_TEMPERATURE:g}, not {temperature}")
    return temperature


def plain_sampling(sampling: stage_pb2.Sampling, what: str) -> tuple[int, float]:
    """Seed and temperature of work whose distribution nothing else shapes."""
    if any(field.name not in ("seed", "temperature") for field, _ in sampling.ListFields()):
        raise invalid(f"{what} takes only seed and temperature: top_p and the like are for work that draws tokens")
    return sampling.seed, check_temperature(sampling.temperature)


def _parse_grammar(message: stage_pb2.Grammar, source: ModelSource, is_last: bool) -> GrammarSettings:
    """:param is_last: this host draws the tokens."""
    if is_last and (problem := grammar_absent()):
        raise failed_precondition(problem)
    if not 0 < len(message.json_schema.encode()) <= MAX_SCHEMA_BYTES:
        raise invalid(f"a JSON schema must have 1 to {MAX_SCHEMA_BYTES} bytes")
    ends = tuple(message.ends)
    if len(ends) > MAX_ENDS or any(end >= source.vocabulary.size for end in ends):
        raise invalid(f"ends must be at most {MAX_ENDS} tokens of the model")
    if source.vocabulary != BYTES and not ends:
        raise invalid("a grammar for tokens needs a token that ends the text")
    if is_last and source.vocabulary != BYTES and not (source.directory / TOKENIZER_NAME).exists():
        raise failed_precondition(f"this host has no {TOKENIZER_NAME}: the last host needs the one of its checkpoint")
    return GrammarSettings(message.json_schema, ends, message.prompt)


def _parse_shaping(message: stage_pb2.Shaping, vocabulary: int) -> Shaping:
    shaping = Shaping(
        message.top_k,
        message.top_p if message.HasField("top_p") else 1.0,
        message.min_p,
        message.frequency_penalty,
        message.presence_penalty,
        message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        dict(message.logit_bias),
        message.prompt,
    )
    if shaping.top_k > vocabulary:
        raise invalid(f"top_k must be 0 to {vocabulary}, not {shaping.top_k}")
    for f in fields(shaping):
        value, bounds = getattr(shaping, f.name), f.metadata.get("bounds")
        if bounds is not None and not bounds.hold(value):
            raise invalid(f"{f.name} must be {bounds.words(value)}, not {value}")
    if problem := bias_problem(shaping.logit_bias, vocabulary):
        raise invalid(problem)
    return shaping
