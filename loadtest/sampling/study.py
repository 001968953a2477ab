"""`onesweep bench sampler`: texts of every variant, scored by the AR model, beside human text and both AR models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtest.quality.entropy import Counts, gram_counts, pooled_entropy, symbol_counts
from loadtest.quality.intervals import Estimate, around, difference_of_ratios, ratio_of_sums
from loadtest.quality.novelty import TrainingText
from loadtest.quality.prompts import cut_prompts
from loadtest.quality.text import held_out_documents, training_documents
from loadtest.sampling.sampler import Sampler, Streams, Written, byte_nats, continue_text
from loadtest.sampling.variant import UNCHANGED, Variant
from loadtest.table import aligned
from stages.ar import ArModel
from stages.bundle import find_bundle
from stages.checkpoint import load_ar, load_chain
from stages.errors import InputError
from stages.manifest import read_manifest

ROWS = 12
"""Texts that are computed together: more fall out of a processor's cache."""
HUMAN = "human"
_HEADER = ("variant", "sweeps", "work", "bits/byte", "+-", "less default", "+-", "H(byte)", "H(4-gram)", "+-", "unseen")


@dataclass(frozen=True)
class SamplerStudy:
    """What `onesweep bench sampler` is told."""

    weights: Path
    """A bundle with chain/ and ar/; local/ for variants and a row that need it."""
    data: Path
    variants: dict[str, Variant]
    chain: Path | None = None
    """Another chain than the bundle's."""
    count: int = 48
    max_bytes: int = 64
    prompt_bytes: int = 64
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True)
class SamplerRow:
    """One variant, or a text to compare with. Intervals hold 95 %, over prompts."""

    name: str
    sweeps: int | None
    work: float | None
    """Evaluations of a slot by a block, for a byte of text."""
    bits: Estimate
    """A byte under the AR model, given the prompt."""
    less_default: Estimate | None
    """`bits` less those of the unchanged variant, prompt by prompt."""
    byte_entropy: Estimate
    gram_entropy: Estimate
    unseen_words: Estimate | None
    """Share of words that the training text does not have; None where there is none."""
    first: str
    """The first text."""


@dataclass(frozen=True)
class Passages:
    """Prompts of one length, and what a human wrote after each."""

    prompts: torch.Tensor
    continuations: torch.Tensor
    training: TrainingText | None


@dataclass(frozen=True)
class Models:
    """What a study runs."""

    sampler: Sampler
    judge: ArModel
    local: ArModel | None


def check_study(study: SamplerStudy) -> None:
    """Everything that can be refused before a text is written. Raises InputError or CheckpointError."""
    least = {"--count": study.count, "--bytes": study.max_bytes, "--threads": study.threads}
    for flag, value in least.items():
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    if study.prompt_bytes < 8:
        raise InputError(f"--prompt-bytes must be at least 8, not {study.prompt_bytes}")
    bundle = find_bundle(study.weights)
    chain = study.chain or bundle.chain
    if chain is None or bundle.ar is None:
        raise InputError(
            f"{study.weights} needs chain/ to write the texts and ar/ to score them; name another --weights"
        )
    if bundle.local is None and any(v.needs_local for v in study.variants.values()):
        raise InputError(f"candidates, draft and reader=local need a local model: {study.weights} has no local/")
    directories = [chain, bundle.ar, *([bundle.local] if bundle.local else [])]
    manifests = [read_manifest(directory) for directory in directories]
    if manifests[0].partition is None:
        raise InputError(f"{chain} holds no chain of blocks; name another --chain")
    room = min(manifest.architecture.positions for manifest in manifests)
    if study.prompt_bytes + study.max_bytes > room:
        raise InputError(f"--prompt-bytes and --bytes together must be at most {room}, the context of the models")
    low, high = manifests[0].partition.sigma_min, manifests[0].partition.sigma_max
    for name, v in study.variants.items():
        start, end = v.start or high, v.read or low
        if not low <= end < start <= high:
            raise InputError(
                f"{name!r}: noise falls from at most {high:g} to at least {low:g}, not {start:g} to {end:g}"
            )


def measure_sampler(study: SamplerStudy, progress: Callable[[str], object]) -> Iterator[SamplerRow]:
    """Human text, both AR models, then every variant. Raises InputError or CheckpointError."""
    check_study(study)
    torch.set_num_threads(study.threads)
    passages, models = _passages(study), _models(study)
    seeds = [study.seed + i for i in range(len(passages.prompts))]
    bits: dict[str, list[float]] = {}

    def row(name: str, written: Written, priced: bool = True) -> SamplerRow:
        progress(name)
        bits[name] = _bits(models.judge, passages.prompts, written.texts)
        return _row(name, written, priced, bits, passages, study)

    yield row(HUMAN, _together([Written(_texts(passages.continuations), 0, 0)]), priced=False)
    for name, model in (("local", models.local), ("ar", models.judge)):
        if model is not None:
            yield row(name, _in_turns(_writer(model, study), passages.prompts, seeds), priced=False)
    for name, variant in study.variants.items():

        def write(prompts: torch.Tensor, own: Sequence[int], variant: Variant = variant) -> Written:
            return models.sampler.write(prompts, study.max_bytes, variant, own)

        yield row(name, _in_turns(write, passages.prompts, seeds))


def sampler_table(rows: Sequence[SamplerRow]) -> str:
    return aligned(_HEADER, [_cells(row) for row in rows])


def sampler_record(study: SamplerStudy, rows: Sequence[SamplerRow]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    settings = {
        "count": study.count,
        "bytes": study.max_bytes,
        "prompt_bytes": study.prompt_bytes,
        "seed": study.seed,
        "variants": {name: _plain(asdict(variant)) for name, variant in study.variants.items()},
    }
    return {"bench": "sampler", **settings, "rows": [asdict(row) for row in rows]}


def _passages(study: SamplerStudy) -> Passages:
    documents = held_out_documents(study.data)
    asked = cut_prompts(documents, study.count, study.prompt_bytes, study.max_bytes, study.seed).asked
    # a cut between characters can cost bytes: all are made as long as the shortest
    prompt = min(len(passage.prompt) for passage in asked)
    human = min(len(passage.continuation) for passage in asked)
    training = training_documents(study.data, None)
    return Passages(
        _tensor([passage.prompt[-prompt:] for passage in asked]),
        _tensor([passage.continuation[:human] for passage in asked]),
        TrainingText(b"\n".join(document.raw for document in training)) if training else None,
    )


def _models(study: SamplerStudy) -> Models:
    bundle = find_bundle(study.weights)
    chain = study.chain or bundle.chain
    assert chain is not None
    assert bundle.ar is not None
    partition = read_manifest(chain).partition
    assert partition is not None
    local = load_ar(bundle.local) if bundle.local else None
    return Models(Sampler(load_chain(chain), partition, local), load_ar(bundle.ar), local)


def _writer(model: ArModel, study: SamplerStudy) -> Callable[[torch.Tensor, Sequence[int]], Written]:
    temperature = study.variants[UNCHANGED].temperature

    def write(prompts: torch.Tensor, seeds: Sequence[int]) -> Written:
        streams = Streams(tuple(seeds), (0,) * len(seeds))
        return Written(_texts(continue_text(model, prompts, study.max_bytes, temperature, streams)), 0, 0)

    return write


def _in_turns(
    write: Callable[[torch.Tensor, Sequence[int]], Written], prompts: torch.Tensor, seeds: Sequence[int]
) -> Written:
    return _together([write(prompts[at : at + ROWS], seeds[at : at + ROWS]) for at in range(0, len(prompts), ROWS)])


def _together(parts: Sequence[Written]) -> Written:
    return Written([text for part in parts for text in part.texts], parts[0].sweeps, parts[0].evaluated)


def _bits(judge: ArModel, prompts: torch.Tensor, texts: Sequence[bytes]) -> list[float]:
    """Of each text."""
    whole = torch.cat([prompts, _tensor(texts)], 1)
    nats = [byte_nats(judge, whole[at : at + ROWS], len(texts[0])).sum(1) for at in range(0, len(whole), ROWS)]
    return [float(value) for value in torch.cat(nats) / np.log(2)]


def _row(
    name: str,
    written: Written,
    priced: bool,
    bits: dict[str, list[float]],
    passages: Passages,
    study: SamplerStudy,
) -> SamplerRow:
    texts, sizes = written.texts, [float(len(text)) for text in written.texts]
    scored = ratio_of_sums(bits[name], sizes, study.seed)
    assert scored is not None, "texts have bytes"
    default, less = bits.get(UNCHANGED), None
    if default is not None and name != UNCHANGED:
        less = difference_of_ratios((bits[name], sizes), (default, sizes), study.seed)
    unseen = None
    if passages.training is not None:
        unseen = ratio_of_sums(*passages.training.unseen_words(_texts(passages.prompts), texts), study.seed)
    return SamplerRow(
        name,
        written.sweeps if priced else None,
        written.evaluated / len(texts[0]) if priced else None,
        scored,
        less,
        _entropy(texts, symbol_counts),
        _entropy(texts, gram_counts),
        unseen,
        texts[0].decode(errors="replace"),
    )


def _entropy(texts: Sequence[bytes], counts: Callable[[bytes], Counts]) -> Estimate:
    pooled = pooled_entropy(texts, counts)
    return around(*pooled) if pooled else Estimate(0.0)


def _texts(rows: torch.Tensor) -> list[bytes]:
    return [bytes(row) for row in rows.tolist()]


def _tensor(texts: Sequence[bytes]) -> torch.Tensor:
    return torch.tensor([list(text) for text in texts], dtype=torch.int64)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {name: None if value == float("inf") else value for name, value in settings.items()}


def _cells(row: SamplerRow) -> tuple[str, ...]:
    return (
        row.name,
        "-" if row.sweeps is None else str(row.sweeps),
        "-" if row.work is None else f"{row.work:.0f}",
        *_with_error(row.bits, 2),
        *_with_error(row.less_default, 2),
        f"{row.byte_entropy.value:.2f}",
        *_with_error(row.gram_entropy, 2),
        "-" if row.unseen_words is None else f"{100 * row.unseen_words.value:.0f} %",
    )


def _with_error(estimate: Estimate | None, digits: int) -> tuple[str, str]:
    """A figure and half of its interval."""
    if estimate is None:
        return "-", "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}", "-"
    return f"{estimate.value:.{digits}f}", f"{(estimate.high - estimate.low) / 2:.{digits}f}"
