"""Sampling of symbols: seed, temperature, what shapes the distribution, and the grammar of a text; checked."""

import math
from dataclasses import dataclass

from stages.checkpoint.manifest import TOKENIZER_NAME
from stages.host.grammar import MAX_ENDS, GrammarSettings
from stages.host.parts import ModelSource
from stages.host.schema_check import MAX_SCHEMA_BYTES, grammar_absent
from stages.limits import MAX_LOGPROBS, MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_TEMPERATURE
from stages.model.shaping import Shaping, bias_problem
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, invalid


@dataclass(frozen=True)
class SamplingPlan:
    """Seed, temperature and what else decides which symbols are sampled."""

    seed: int
    temperature: float
    shaping: Shaping
    grammar: GrammarSettings | None  # None: any text
    logprobs: int | None  # most likely symbols to tell of beside the one that is sampled; None tells nothing


def parse_sampling(sampling: stage_pb2.Sampling, source: ModelSource, known: int, is_last: bool) -> SamplingPlan:
    """Raises StatusError.

    :param known: symbols before the first one that is sampled.
    :param is_last: this host samples.
    """
    return SamplingPlan(
        sampling.seed,
        check_temperature(sampling.temperature),
        _parse_shaping(sampling.shaping, source.manifest.text_architecture.vocabulary, known),
        _parse_grammar(sampling, source, known, is_last),
        _parse_logprobs(sampling),
    )


def check_temperature(temperature: float) -> float:
    """The temperature. Raises StatusError."""
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be 0 to {MAX_TEMPERATURE:g}, not {temperature}")
    return temperature


def plain_sampling(sampling: stage_pb2.Sampling, what: str) -> tuple[int, float]:
    """Seed and temperature of work that nothing shapes."""
    if any(field.name not in ("seed", "temperature") for field, _ in sampling.ListFields()):
        raise invalid(f"{what} takes seed and temperature alone: top_p and its like are for work that draws symbols")
    return sampling.seed, check_temperature(sampling.temperature)


def _parse_logprobs(sampling: stage_pb2.Sampling) -> int | None:
    if sampling.logprobs > MAX_LOGPROBS:
        raise invalid(f"logprobs must be 0 to {MAX_LOGPROBS}, not {sampling.logprobs}")
    return sampling.logprobs if sampling.HasField("logprobs") else None


def _parse_grammar(
    sampling: stage_pb2.Sampling, source: ModelSource, known: int, is_last: bool
) -> GrammarSettings | None:
    """:param is_last: this host draws the symbols."""
    if not sampling.HasField("grammar"):
        return None
    told = sampling.grammar
    if is_last and (problem := grammar_absent()):
        raise failed_precondition(problem)
    if not 0 < len(told.json_schema.encode()) <= MAX_SCHEMA_BYTES:
        raise invalid(f"a JSON schema has 1 to {MAX_SCHEMA_BYTES} bytes")
    ends = tuple(told.ends)
    if len(ends) > MAX_ENDS or any(end >= source.alphabet.size for end in ends):
        raise invalid(f"at most {MAX_ENDS} symbols of the model end its texts")
    if told.prompt > known:
        raise invalid(f"a prompt of {told.prompt} symbols, where {known} are known")
    if source.alphabet != BYTES and not ends:
        raise invalid("a grammar for tokens needs one that ends a text")
    if is_last and source.alphabet != BYTES and not (source.directory / TOKENIZER_NAME).exists():
        raise failed_precondition(f"this host has no {TOKENIZER_NAME}: the last host needs that of its checkpoint")
    return GrammarSettings(told.json_schema, ends, told.prompt)


def _parse_shaping(told: stage_pb2.Shaping, vocabulary: int, known: int) -> Shaping:
    """:param known: symbols before the first one that is drawn."""
    shaping = Shaping(
        told.top_k,
        told.top_p if told.HasField("top_p") else 1.0,
        told.min_p,
        told.frequency_penalty,
        told.presence_penalty,
        told.repetition_penalty if told.HasField("repetition_penalty") else 1.0,
        dict(told.logit_bias),
        told.prompt,
    )
    if shaping.top_k > vocabulary:
        raise invalid(f"top_k must be 0 to {vocabulary}, not {shaping.top_k}")
    if not 0 < shaping.top_p <= 1:  # false for NaN, too
        raise invalid(f"top_p must be above 0 and at most 1, not {shaping.top_p}")
    if not 0 <= shaping.min_p <= 1:
        raise invalid(f"min_p must be 0 to 1, not {shaping.min_p}")
    for name in ("frequency_penalty", "presence_penalty"):
        if not abs(getattr(shaping, name)) <= MAX_PENALTY:
            raise invalid(f"{name} must be -{MAX_PENALTY:g} to {MAX_PENALTY:g}, not {getattr(shaping, name)}")
    if not 0 < shaping.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise invalid(
            f"repetition_penalty must be above 0 and at most {MAX_REPETITION_PENALTY:g}, not "
            f"{shaping.repetition_penalty}"
        )
    if problem := bias_problem(shaping.logit_bias, vocabulary):
        raise invalid(problem)
    if shaping.prompt > known:
        raise invalid(f"a prompt of {shaping.prompt} symbols, where {known} are known")
    return shaping
