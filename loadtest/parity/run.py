"""`onesweep bench parity`: an imported model over real hosts writes, greedily, what `transformers` writes.

Hosts send text, not logits. So the pipeline runs a second time, in this process, beside the reference: there, at every
place of the reference's own text, both say what follows.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.machine import commit, this_machine
from loadtest.parity.reference import Reference, check_transformers
from loadtest.pipeline import Pipeline
from loadtest.spelt import spelled, spelling_of
from loadtest.wan_bench.prompts import NOVEL
from serving.client import AsyncClient, Result
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.spelling import Spelling
from serving.topology import local_topology
from stages.bundle import find_bundle
from stages.errors import InputError
from stages.llama.architecture import LlamaArchitecture
from stages.manifest import read_manifest

HOSTS = 3
TOLERANCE = 1e-3
"""Most that a logit may differ: float32 has some 1e-6 of the largest, and layers add up."""
TIMEOUT_S = 3600.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ParitySettings:
    """What `onesweep bench parity` is told."""

    checkpoint: Path
    source: Path
    prompts: int = 20
    tokens: int = 64

    @property
    def texts(self) -> tuple[str, ...]:
        return NOVEL.texts[: self.prompts]


@dataclass(frozen=True)
class PromptFigures:
    """One prompt, and the text that the reference writes after it."""

    prompt: str
    text: str
    hosts_text: str
    same_text: bool
    """Whether the hosts wrote the same bytes, in as many tokens."""
    tokens: int
    same_tokens: int
    """Places at which the pipeline finds the reference's token the likeliest."""
    largest_difference: float
    """Of a logit, over all places."""
    ours_ms: list[float]
    """Processor time of each step of one token, milliseconds."""
    theirs_ms: list[float]

    @property
    def holds(self) -> bool:
        return self.same_text and self.same_tokens == self.tokens and self.largest_difference <= TOLERANCE


def check_parity(settings: ParitySettings) -> Path:
    """Everything that can be refused before a host is started; returns where the AR model is. Raises OnesweepError."""
    check_transformers()
    directory = find_bundle(settings.checkpoint).ar
    architecture = read_manifest(directory).architecture if directory else None
    if directory is None or not isinstance(architecture, LlamaArchitecture):
        raise InputError(
            f"{settings.checkpoint} has no imported model: bench parity is for what `onesweep import` makes"
        )
    if not settings.source.exists():
        raise InputError(f"no model at {settings.source}: --source is what was imported, a folder or a .gguf file")
    if not 1 <= settings.prompts <= len(NOVEL.texts):
        raise InputError(f"--prompts must be 1 to {len(NOVEL.texts)}, not {settings.prompts}")
    spelling = spelling_of(directory)
    room = architecture.positions - max(len(spelled(spelling, text.encode())) for text in settings.texts)
    if not 1 <= settings.tokens <= room:
        raise InputError(f"--tokens must be 1 to {room}, what the context leaves after the prompt")
    return directory


def measure_parity(settings: ParitySettings, tell: Tell) -> list[PromptFigures]:
    """Raises OnesweepError."""
    directory = check_parity(settings)
    torch.set_num_threads(1)  # as a host
    reference, spelling = Reference(settings.source), spelling_of(directory)
    if reference.vocabulary != spelling.alphabet.size:
        raise InputError(
            f"{settings.source} has {reference.vocabulary} tokens, {directory} {spelling.alphabet.size}: "
            "the checkpoint was not imported from it"
        )
    parts = read_manifest(directory).architecture.parts
    hosts = min(HOSTS, parts)
    topology = local_topology(hosts, parts, settings.checkpoint, free_port_block(hosts + 1) + 1)
    tell(f"{hosts} hosts write {settings.tokens} tokens after each of {settings.prompts} prompts ...")
    with temporary_deployment(topology, settings.checkpoint):
        written = asyncio.run(_written(topology.router, settings))
    tell("transformers writes, and the pipeline says what it would have written ...")
    pipeline = Pipeline(directory)
    return [
        _compare(text, result, settings.tokens, reference, pipeline, spelling)
        for text, result in zip(settings.texts, written, strict=True)
    ]


def parity_sentence(figures: Sequence[PromptFigures]) -> str:
    """What was found, and where the two differ."""
    tokens, same = sum(f.tokens for f in figures), sum(f.same_tokens for f in figures)
    lines = [
        f"{same} of {tokens} tokens are the same, largest difference of a logit "
        f"{max(f.largest_difference for f in figures):.1e} (at most {TOLERANCE:.0e}); "
        f"{sum(f.same_text for f in figures)} of {len(figures)} texts of the hosts are those of transformers"
    ]
    ours, theirs = (_median(figures, lambda f: f.ours_ms), _median(figures, lambda f: f.theirs_ms))
    if ours is not None and theirs is not None:
        lines.append(f"processor time for a token, median: {ours:.1f} ms, transformers {theirs:.1f} ms")
    for f in figures:
        if not f.holds:
            lines.append(f"not the same: {f.prompt!r}: {f.hosts_text!r}, transformers {f.text!r}")
    return "\n".join(lines)


def parity_record(settings: ParitySettings, figures: Sequence[PromptFigures]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    return {
        "bench": "parity",
        "commit": commit(),
        "machine": asdict(this_machine()),
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()},
        "holds": all(f.holds for f in figures),
        "prompts": [asdict(f) for f in figures],
    }


async def _written(router: str, settings: ParitySettings) -> list[Result]:
    """All at once: what a request writes does not depend on its company."""
    async with AsyncClient(router) as client:
        requests = [
            client.generate(text, mode="ar", max_tokens=settings.tokens, temperature=0.0, timeout_s=TIMEOUT_S)
            for text in settings.texts
        ]
        return list(await asyncio.gather(*requests))


def _compare(
    prompt: str, result: Result, most: int, reference: Reference, pipeline: Pipeline, spelling: Spelling
) -> PromptFigures:
    """The reference writes greedily; the pipeline reads along."""
    before = spelled(spelling, prompt.encode())
    caches = pipeline.open(len(before) + most)
    reference.begin()
    tokens, new, same, largest = list[int](), before, 0, 0.0
    ours_ms, theirs_ms = list[float](), list[float]()
    while len(tokens) < most and not spelling.ends.intersection(tokens):
        their_logits, their_ms = _timed(lambda new=new: reference.read(new))  # type: ignore[misc]
        our_logits, our_ms = _timed(lambda new=new: pipeline.logits(new, caches)[-1])  # type: ignore[misc]
        if tokens:  # what the prompt took is another matter
            ours_ms.append(our_ms)
            theirs_ms.append(their_ms)
        tokens.append(int(their_logits.argmax()))
        same += int(our_logits.argmax()) == tokens[-1]
        largest = max(largest, float((our_logits - their_logits).abs().max()))
        new = tokens[-1:]
    reader = spelling.reader(spelling.alphabet.encode(before))
    text = reader.feed(spelling.alphabet.encode(tokens)) + reader.end()
    return PromptFigures(
        prompt,
        text.decode(errors="replace"),
        result.text,
        result.output == text and result.output_tokens == len(tokens),
        len(tokens),
        same,
        largest,
        ours_ms,
        theirs_ms,
    )


def _timed(read: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its logits, and milliseconds of processor time."""
    begin = time.process_time()
    logits = read()
    return logits, (time.process_time() - begin) * 1000


def _median(figures: Sequence[PromptFigures], times: Callable[[PromptFigures], list[float]]) -> float | None:
    every = [ms for f in figures for ms in times(f)]
    return statistics.median(every) if every else None
