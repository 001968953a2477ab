"""The text is the model's own: hosts write, in every mode, the very bytes that the model writes in one process.

How many hosts share the model, how often a text is asked for and who else asks at the same time change no byte. (`auto`
runs one of these modes: tests/serving/modes/test_auto.py.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serving.client.client import Client
from serving.modes.candidates import Branches, Floats, weigh
from serving.modes.drafters.base import LocalSequence
from serving.modes.drafters.neural import NeuralModel
from serving.modes.infill import OF_BYTES, InfillDrafter, choose_by_share
from serving.modes.verified import residual_sample
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece, StageRunner
from stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from stages.checkpoint.checkpoint import load_ar, load_chain
from stages.checkpoint.manifest import read_manifest
from stages.model.architecture import Architecture
from stages.model.codec import FEATURE_LIMIT, codec_named, hidden_codec
from stages.model.pipeline import new_caches
from stages.model.randomness import Purpose, sample_symbols, uniforms
from stages.model.samplers import DEFAULT_SAMPLER
from stages.model.scoring import log_probabilities
from stages.model.speculation import verify_drafts
from stages.model.vocabulary import BYTES

PROMPT, SUFFIX, COUNT = b"The ship had no ", b" and went home.", 24
CHAIN = [
    {"codec": "fp32", "steps": 1, "temperature": 0.0},
    {"codec": "int8", "steps": 4, "temperature": 0.8},
    {"codec": "int4", "steps": 1, "temperature": 0.8},
    {"codec": "int8", "steps": 4, "temperature": 0.8, "sampler": "ode"},
]
SETTINGS: list[dict[str, Any]] = [
    *({"mode": "sweep", **settings} for settings in CHAIN),
    *({"mode": "chunked", "chunk": 10, **settings} for settings in CHAIN),
    {"mode": "ar", "temperature": 0.0},
    {"mode": "ar", "temperature": 0.8},
    {"mode": "ar", "temperature": 0.8, "codec": "int8"},
    {"mode": "ar-speculative", "temperature": 0.8, "drafter": "model", "draft": 4},
    {"mode": "ar-speculative", "temperature": 0.0, "drafter": "lookup", "draft": 8},
    {"mode": "ar-speculative", "temperature": 0.8, "branches": 3, "codec": "int8"},
    {"mode": "local", "temperature": 0.8},
    {"mode": "resample", "temperature": 0.8, "scorer": "ar", "chunk": 7, "candidates": 5, "codec": "fp32"},
    {"mode": "verified", "temperature": 1.5, "scorer": "ar", "draft": 4},
    {"mode": "verified", "temperature": 0.0, "scorer": "ar", "draft": 9},
    {"mode": "infill", "temperature": 0.8, "scorer": "ar", "candidates": 5, "codec": "fp32"},
]
REQUESTS = [{**settings, "seed": seed} for seed, settings in enumerate(SETTINGS)]
NAMES = [" ".join(map(str, settings.values())) for settings in SETTINGS]


@cache
def stages_of(directory: Path) -> tuple[list[StageRunner], Architecture]:
    model, backend = load_ar(directory), backend_named(DEFAULT_BACKEND)
    return [backend.stage(stage) for stage in model.stages], model.architecture


class Pipeline:
    """An AR model whose stages are all in this process: it reads a text, and more of it at the next call."""

    def __init__(self, directory: Path, codec: str) -> None:
        self.stages, a = stages_of(directory)
        self.caches, self.codec, self.read = [new_caches(a.layers, a, 512) for _ in self.stages], hidden_codec(codec), 0

    def logits(self, text: bytes) -> torch.Tensor:
        """What follows each byte that was not read before: (new bytes, 256)."""
        x, self.read = torch.tensor(list(text[self.read :])), len(text)
        for index, (stage, held) in enumerate(zip(self.stages, self.caches, strict=True)):
            x = stage.read([CleanPiece(self.codec.round_trip(x, FEATURE_LIMIT) if index else x, held)])[0]
        return self.stages[-1].next_byte([x])[0]


def chain_text(directory: Path, request: dict[str, Any], count: int) -> bytes:
    """Block after block, chunk after chunk."""
    partition, backend = read_manifest(directory / "chain").partition, backend_named(DEFAULT_BACKEND)
    assert partition is not None
    chain = load_chain(directory / "chain")
    runners, a = [backend.block(block) for block in chain], chain[0].architecture
    caches = [new_caches(a.layers, a, 512) for _ in chain]
    codec, clean, start, text = codec_named(request["codec"]), PROMPT, 0, b""
    while left := count - len(text):
        slots, sampler = min(request.get("chunk", left), left), request.get("sampler", DEFAULT_SAMPLER)
        plan = SweepPlan(request["seed"], start + len(clean), slots, request["steps"], request["temperature"], sampler)
        outcome: Boundary | bytes | None = None
        for index, runner in enumerate(runners):
            before = outcome if isinstance(outcome, Boundary) else None
            work = BlockWork(a, index, partition, caches[index], plan, codec, BYTES.decode(clean), before)
            outcome = run_unbatched(work, runner)
        assert isinstance(outcome, bytes)
        start, clean, text = start + len(clean), outcome, text + outcome
    return text


def ar_text(directory: Path, request: dict[str, Any], count: int) -> bytes:
    """Byte by byte: guesses have no part in it."""
    folder = "local" if request["mode"] == "local" else "ar"
    pipeline, text = Pipeline(directory / folder, request.get("codec", "fp32")), PROMPT
    for position in range(len(PROMPT), len(PROMPT) + count):
        text += sample_symbols(pipeline.logits(text)[-1:], request["temperature"], request["seed"], position)
    return text[len(PROMPT) :]


def scores(directory: Path, text: bytes, candidates: list[bytes], temperature: float) -> Floats:
    """ln p of every byte of continuations of one length: (candidates, bytes)."""
    rows = []
    for candidate in candidates:
        logits = Pipeline(directory / "ar", "fp32").logits(text + candidate)[len(text) - 1 : -1]
        rows.append(log_probabilities(logits, temperature)[np.arange(len(candidate)), list(candidate)])
    return np.stack(rows)


def drafted_text(directory: Path, request: dict[str, Any], count: int) -> bytes:
    """The small model proposes, the large one weighs: `resample`, `infill` and `verified`, without a host."""
    text, limit, temperature, seed = PROMPT, len(PROMPT) + count, request["temperature"], request["seed"]
    sequence = LocalSequence(NeuralModel(directory / "local"), 512, temperature, seed)
    scorer = Pipeline(directory / "ar", "fp32")
    for number in range(count):
        if (left := limit - len(text)) == 0:
            break
        if request["mode"] == "verified":
            guess = asyncio.run(sequence.guess(text, 1))
            logits, draws = scorer.logits(text)[-1:], 1
            verdict = verify_drafts(logits, [guess.text[0]], guess.odds, temperature, seed, len(text))
            symbol: int | None = guess.text[0] if verdict.accepted else None
            while symbol is None:
                symbol = residual_sample(verdict, guess.odds_at(0), seed, len(text), draws)
                draws += 1
                verdict = verify_drafts(logits, [], guess.odds[:0], temperature, seed, len(text), draws)
            text += bytes([symbol])
        elif request["mode"] == "resample":
            chunk, most = min(request["chunk"], left), request["candidates"]
            drafted = asyncio.run(Branches(sequence).write(text, chunk, most, number))
            weights = weigh(drafted, scores(directory, text, drafted.texts, temperature))
            text += drafted.texts[weights.choose(seed, len(text))]
        else:
            head, most = SUFFIX[: OF_BYTES.ahead], request["candidates"]
            filler = InfillDrafter(sequence, OF_BYTES.peek)
            fillings = asyncio.run(filler.write(text, left, head, OF_BYTES.drafts, most))
            nats = scores(directory, text, [each + head for each in fillings.texts], temperature).sum(axis=1)
            u = uniforms(seed, Purpose.CHOICE, len(text), 1, 1)[0, 0]
            text += fillings.texts[choose_by_share(fillings.shares(nats), u)]
    return text[len(PROMPT) :]


@cache
def model_text(directory: Path, index: int) -> bytes:
    """What the model writes in one process."""
    how = {
        **dict.fromkeys(("sweep", "chunked"), chain_text),
        **dict.fromkeys(("ar", "ar-speculative", "local"), ar_text),
    }
    return how.get(REQUESTS[index]["mode"], drafted_text)(directory, REQUESTS[index], COUNT)


def hosts_text(client: Client, index: int) -> bytes:
    """What hosts write."""
    suffix = SUFFIX if REQUESTS[index]["mode"] == "infill" else b""
    return client.generate(PROMPT, max_bytes=COUNT, suffix=suffix, **REQUESTS[index]).output


RINGS = [("own", 3), ("own", 1), ("own", 2), ("chained", 3)]


@pytest.fixture(scope="module", params=RINGS, ids=lambda ring: f"{ring[0]} blocks on {ring[1]} hosts")
def ring(
    request: pytest.FixtureRequest, bundles: Path, local_ring: Callable[..., Any]
) -> Iterator[tuple[Path, Client]]:
    """A bundle, and hosts that share it."""
    bundle, hosts = request.param
    with local_ring(bundles / bundle, hosts) as client:
        yield bundles / bundle, client


@pytest.mark.parametrize("index", range(len(REQUESTS)), ids=NAMES)
def test_hosts_write_what_the_model_writes_in_one_process(ring: tuple[Path, Client], index: int) -> None:
    directory, client = ring
    assert hosts_text(client, index) == model_text(directory, index)


def test_other_requests_at_the_same_time_change_nothing(ring: tuple[Path, Client]) -> None:
    directory, client = ring
    asked = [*range(len(REQUESTS))] * 2
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda index: hosts_text(client, index), asked))
    assert found == [model_text(directory, index) for index in asked]


def test_every_seed_and_setting_shows_in_the_text(bundles: Path) -> None:
    """So that equal texts say something."""
    drawn = [index for index, request in enumerate(REQUESTS) if request["temperature"]]
    texts = [model_text(bundles / "own", index) for index in drawn]
    assert len(set(texts)) == len(texts)
    assert texts[0] != model_text(bundles / "chained", 0)
