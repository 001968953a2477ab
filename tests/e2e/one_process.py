"""The model in one process, mode by mode: the sums that hosts do between them, without any host."""

import asyncio
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.modes.resample import ROUND
from serving.router.own_models import LocalModel
from serving.router.request import SHAPES
from stages.backends import Backend
from stages.backends.base import BlockRunner, CleanPiece, StageRunner
from stages.backends.whole_model import Continuations
from stages.checkpoint.checkpoint import load_ar, load_chain
from stages.checkpoint.manifest import read_manifest
from stages.host.work.sweep import BlockWork, SweepPlan
from stages.model.architecture import Architecture
from stages.model.codec import FEATURE_LIMIT, codec_named, hidden_codec
from stages.model.pipeline import new_caches
from stages.model.randomness import sample_tokens
from stages.model.resampling import Floats, weigh
from stages.model.samplers import DEFAULT_SAMPLER
from stages.model.scoring import Shaping, log_probabilities
from stages.model.vocabulary import BYTES


def run_unbatched(work: BlockWork, runner: BlockRunner) -> bytes:
    """One block's work from beginning to end, in no company."""
    while not work.done:
        piece = work.piece
        if isinstance(piece, CleanPiece):
            work.supply(runner.read([piece])[0])
        else:
            work.supply(runner.denoise([piece])[0])
    return work.outcome()


@cache
def stages_of(directory: Path) -> tuple[list[StageRunner], Architecture]:
    model, backend = load_ar(directory), Backend()
    return [backend.stage(stage) for stage in model.stages], model.architecture


class Pipeline:
    """An AR model whose stages are all in this process: it reads a text, and more of it at the next call."""

    def __init__(self, directory: Path, codec: str) -> None:
        self.stages, a = stages_of(directory)
        self.caches, self.codec, self.read = [new_caches(a.layers, a, 512) for _ in self.stages], hidden_codec(codec), 0

    def logits(self, text: bytes) -> torch.Tensor:
        """Logits after each byte that was not read before: (new bytes, 256)."""
        x, self.read = torch.tensor(list(text[self.read :])), len(text)
        for index, (stage, held) in enumerate(zip(self.stages, self.caches, strict=True)):
            x = stage.read([CleanPiece(self.codec.round_trip(x, FEATURE_LIMIT) if index else x, held)])[0]
        return self.stages[-1].next_byte([x])[0]


def chain_text(directory: Path, prompt: bytes, request: dict[str, Any], count: int) -> bytes:
    """Block after block, chunk after chunk."""
    partition, backend = read_manifest(directory / "chain").partition, Backend()
    chain = load_chain(directory / "chain")
    runners, a = [backend.block(block) for block in chain], chain[0].architecture
    caches = [new_caches(a.layers, a, 512) for _ in chain]
    codec, clean, start, text = codec_named(request["codec"]), prompt, 0, b""
    while left := count - len(text):
        slots, sampler = min(request.get("chunk", left), left), request.get("sampler", DEFAULT_SAMPLER)
        plan = SweepPlan(request["seed"], start + len(clean), slots, request["steps"], request["temperature"], sampler)
        outcome: bytes | None = None
        for index, runner in enumerate(runners):
            work = BlockWork(a, index, partition, caches[index], plan, codec, BYTES.decode(clean), outcome)
            outcome = run_unbatched(work, runner)
        assert isinstance(outcome, bytes)
        start, clean, text = start + len(clean), outcome, text + outcome
    return text


def shaping_of(request: dict[str, Any], prompt: int) -> Shaping:
    given = {name: request[name] for name in (*SHAPES, "logit_bias") if name in request}
    return Shaping(**given, prompt=prompt)


def ar_text(directory: Path, prompt: bytes, request: dict[str, Any], count: int) -> bytes:
    """Byte by byte: drafts have no part in it."""
    folder = "local" if request["mode"] == "local" else "ar"
    pipeline, text = Pipeline(directory / folder, request.get("codec", "fp32")), prompt
    shaping = shaping_of(request, len(prompt))
    for position in range(len(prompt), len(prompt) + count):
        row = shaping.adjusted(pipeline.logits(text)[-1:], np.array(list(text)))
        text += sample_tokens(row, request["temperature"], request["seed"], position, shaping)
    return text[len(prompt) :]


def scores(directory: Path, text: bytes, candidates: list[bytes], temperature: float) -> Floats:
    """ln p of every byte of continuations of one length: (candidates, bytes)."""
    rows = []
    for candidate in candidates:
        logits = Pipeline(directory / "ar", "fp32").logits(text + candidate)[len(text) - 1 : -1]
        rows.append(log_probabilities(logits, temperature)[np.arange(len(candidate)), list(candidate)])
    return np.stack(rows)


def resampled_text(directory: Path, prompt: bytes, request: dict[str, Any], count: int) -> bytes:
    """The small model proposes, the large one weighs, without a host."""
    text, limit, temperature, seed = prompt, len(prompt) + count, request["temperature"], request["seed"]
    drafter = LocalModel(directory / "local")
    known = drafter.open(512)
    for number in range(count):
        if (left := limit - len(text)) == 0:
            break
        chunk, most = min(request["chunk"], left), request["candidates"]
        written = Continuations(known, text, temperature, seed, chunk, most, number * ROUND)
        drafted = asyncio.run(drafter.draft(written, math.inf))
        weights = weigh(
            scores(directory, text, drafted.texts, temperature).sum(axis=1), drafted.nats.sum(axis=1), chunk
        )
        text += drafted.texts[weights.choose(seed, len(text))]
    return text[len(prompt) :]


def text_of(directory: Path, prompt: bytes, request: dict[str, Any], count: int) -> bytes:
    """The text of a bundle's model after `prompt`, in the request's mode."""
    modes = {**dict.fromkeys(("sweep", "chunked"), chain_text), "resample": resampled_text}
    return modes.get(request["mode"], ar_text)(directory, prompt, request, count)
