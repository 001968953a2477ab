"""One (prompt, seed, settings) gives one text, wherever and however often it is made."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.cli.deployment import Deployment
from serving.client.client import Client, Result
from serving.modes.drafters.base import SYMBOLS_PER_TURN
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from stages.checkpoint.checkpoint import load_ar, load_chain
from stages.checkpoint.manifest import read_manifest
from stages.model.codec import FEATURE_LIMIT, codec_named, hidden_codec
from stages.model.pipeline import new_caches
from stages.model.randomness import sample_symbols
from stages.model.samplers import DEFAULT_SAMPLER
from stages.model.vocabulary import BYTES

PROMPT = "The ship had no "
CHAIN_SETTINGS = [
    {"codec": "fp32", "steps": 1, "temperature": 0.0},
    {"codec": "int8", "steps": 4, "temperature": 0.8},
    {"codec": "int4", "steps": 4, "temperature": 0.0},
    {"codec": "int4", "steps": 1, "temperature": 0.8},
    {"codec": "int8", "steps": 4, "temperature": 0.8, "sampler": "ode"},
]
REQUESTS: list[dict[str, Any]] = [
    *({"mode": "sweep", "max_bytes": 24, "seed": 3, **settings} for settings in CHAIN_SETTINGS),
    *({"mode": "chunked", "max_bytes": 24, "seed": 4, "chunk": 10, **settings} for settings in CHAIN_SETTINGS),
    *(
        {"mode": mode, "max_bytes": 20, "seed": 5, "temperature": temperature}
        for mode in ("ar", "local")
        for temperature in (0.0, 0.8)
    ),
    {"mode": "ar", "max_bytes": 20, "seed": 6, "codec": "int8"},
    *(
        {"mode": "ar-speculative", "max_bytes": 20, "seed": 7 + i, "drafter": drafter, "draft": draft}
        for i, (drafter, draft) in enumerate((("model", 4), ("lookup", 8), ("both", None)))
    ),
]


# The same sums without any server


def chain_text(directory: Path, request: dict[str, Any]) -> bytes:
    partition, backend = read_manifest(directory / "chain").partition, backend_named(DEFAULT_BACKEND)
    assert partition is not None
    chain = load_chain(directory / "chain")
    runners, a = [backend.block(block) for block in chain], chain[0].architecture
    caches = [new_caches(a.layers, a, 512) for _ in chain]
    codec, clean, start, text = codec_named(request["codec"]), PROMPT.encode(), 0, b""
    while left := request["max_bytes"] - len(text):
        slots = min(request.get("chunk", left), left)
        sampler = request.get("sampler", DEFAULT_SAMPLER)
        plan = SweepPlan(request["seed"], start + len(clean), slots, request["steps"], request["temperature"], sampler)
        outcome: Boundary | bytes | None = None
        for index, runner in enumerate(runners):
            before = outcome if isinstance(outcome, Boundary) else None
            outcome = run_unbatched(
                BlockWork(a, index, partition, caches[index], plan, codec, BYTES.decode(clean), before), runner
            )
        assert isinstance(outcome, bytes)
        start, clean, text = start + len(clean), outcome, text + outcome
    return text


def ar_text(directory: Path, request: dict[str, Any]) -> bytes:
    """Byte by byte: guesses have no part in it."""
    model, backend = (
        load_ar(directory / ("local" if request["mode"] == "local" else "ar")),
        backend_named(DEFAULT_BACKEND),
    )
    stages, a = [backend.stage(stage) for stage in model.stages], model.architecture
    caches = [new_caches(a.layers, a, a.context_bytes) for _ in stages]
    codec, pending, position, text = hidden_codec(request.get("codec", "fp32")), PROMPT.encode(), 0, b""
    while len(text) < request["max_bytes"]:
        x = torch.tensor(list(pending))
        for stage, held in zip(stages, caches, strict=True):
            x = stage.read([CleanPiece(x if stage is stages[0] else codec.round_trip(x, FEATURE_LIMIT), held)])[0]
        position += len(pending)
        pending = sample_symbols(
            stages[-1].next_byte([x[-1:]])[0], request.get("temperature", 0.8), request["seed"], position
        )
        text += pending
    return text


def reference(directory: Path, request: dict[str, Any]) -> bytes:
    return (chain_text if request["mode"] in ("sweep", "chunked") else ar_text)(directory, request)


def outputs(client: Client) -> list[bytes]:
    return [client.generate(PROMPT, **request).output for request in REQUESTS]


@pytest.fixture(scope="module")
def references(bundles: Path) -> dict[str, list[bytes]]:
    return {name: [reference(bundles / name, request) for request in REQUESTS] for name in ("own", "chained")}


def test_hosts_write_what_the_model_writes_without_them(client: Client, references: dict[str, list[bytes]]) -> None:
    assert outputs(client) == references["own"]
    assert outputs(client) == references["own"], "the second time"


@pytest.mark.parametrize(("bundle", "hosts"), [("own", 1), ("own", 2), ("chained", 1), ("chained", 3)])
def test_any_mapping_writes_the_same(
    bundles: Path, local_ring: Callable[..., Any], references: dict[str, list[bytes]], bundle: str, hosts: int
) -> None:
    with local_ring(bundles / bundle, hosts) as client:
        assert outputs(client) == references[bundle]


def test_settings_and_seed_matter(references: dict[str, list[bytes]]) -> None:
    for texts in references.values():
        assert len(set(texts)) == len(texts)
    assert references["own"][:8] != references["chained"][:8]


def test_other_requests_change_nothing(
    client: Client,
    references: dict[str, list[bytes]],
    deployment: Deployment,
    sessions: Callable[[Deployment], int],
    until: Callable[..., Any],
) -> None:
    """All of them at once, twice over; and nothing of them is left on any host."""
    found: dict[int, bytes] = {}

    def ask(index: int) -> None:
        found[index] = client.generate(PROMPT, **REQUESTS[index % len(REQUESTS)]).output

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2 * len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: sessions(deployment) == 0)
    assert [found[index] for index in range(2 * len(REQUESTS))] == 2 * references["own"]


@pytest.mark.parametrize("mode", ["sweep", "chunked", "resample", "verified", "ar", "ar-speculative", "local"])
def test_a_stream_adds_up_to_the_text(client: Client, mode: str) -> None:
    whole = client.generate(PROMPT, mode=mode, max_bytes=70, seed=9)
    *pieces, last = client.stream(PROMPT, mode=mode, max_bytes=70, seed=9)
    assert isinstance(last, Result)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == last.output == whole.output
    a_piece_a_sweep = dict.fromkeys(("chunked", "resample", "verified", "ar", "ar-speculative"), last.sweeps)
    assert len(pieces) == {"sweep": 1, "local": math.ceil(70 / SYMBOLS_PER_TURN), **a_piece_a_sweep}[mode]
    assert whole.text == whole.output.decode(errors="replace")


@pytest.mark.parametrize("mode", ["sweep", "chunked", "resample", "verified", "ar", "ar-speculative", "local"])
def test_the_whole_text_comes_in_one_piece_if_it_is_wanted_so(client: Client, mode: str) -> None:
    request = {"mode": mode, "max_bytes": 70, "seed": 9}
    pieces = list(client.stream(PROMPT, **request, whole=True))  # type: ignore[misc]
    assert len(pieces) == 2
    assert isinstance(pieces[1], Result)
    assert pieces[0] == pieces[1].output == client.generate(PROMPT, **request).output


def test_sweep_is_chunked_with_one_chunk(client: Client) -> None:
    sweep = client.generate(PROMPT, mode="sweep", max_bytes=50, seed=2)
    assert client.generate(PROMPT, mode="chunked", chunk=50, max_bytes=50, seed=2).output == sweep.output
    assert client.generate(PROMPT, mode="chunked", chunk=500, max_bytes=50, seed=2).output == sweep.output


def test_a_seed_of_64_bits_arrives_whole(client: Client) -> None:
    top = (1 << 64) - 1
    texts = [client.generate(PROMPT, max_bytes=20, seed=seed) for seed in (top, top - 1)]
    assert texts[0].seed == top
    assert texts[0].output != texts[1].output
