"""One (prompt, seed, settings) gives one text, wherever and however often it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.client import Client, Result
from stages.ar import new_caches
from stages.checkpoint import load_ar, load_chain
from stages.codec import codec_named
from stages.manifest import read_manifest
from stages.randomness import sample_bytes
from stages.sweep import BlockSequence, Boundary, SweepPlan, run_block

PROMPT = "The ship had no "
CHAIN_SETTINGS = [
    {"codec": "fp32", "steps": 1, "temperature": 0.0},
    {"codec": "int8", "steps": 4, "temperature": 0.8},
    {"codec": "int4", "steps": 4, "temperature": 0.0},
    {"codec": "int4", "steps": 1, "temperature": 0.8},
]
REQUESTS: list[dict[str, Any]] = [
    *({"mode": "sweep", "max_bytes": 40, "seed": 3, **settings} for settings in CHAIN_SETTINGS),
    *({"mode": "chunked", "max_bytes": 40, "seed": 4, "chunk": 16, **settings} for settings in CHAIN_SETTINGS),
    *(
        {"mode": mode, "max_bytes": 20, "seed": 5, "temperature": temperature}
        for mode in ("ar", "local")
        for temperature in (0.0, 0.8)
    ),
]


# The same sums without any server


def chain_text(directory: Path, request: dict[str, Any]) -> bytes:
    partition = read_manifest(directory / "chain").partition
    assert partition is not None
    chain = [BlockSequence(block, partition, 512) for block in load_chain(directory / "chain")]
    codec, clean, start, text = codec_named(request["codec"]), PROMPT.encode(), 0, b""
    while left := request["max_bytes"] - len(text):
        slots = min(request.get("chunk", left), left)
        plan = SweepPlan(request["seed"], start + len(clean), slots, request["steps"], request["temperature"])
        outcome: Boundary | bytes | None = None
        for sequence in chain:
            outcome = run_block(sequence, plan, codec, clean, outcome if isinstance(outcome, Boundary) else None)
        assert isinstance(outcome, bytes)
        start, clean, text = start + len(clean), outcome, text + outcome
    return text


@torch.inference_mode()
def ar_text(directory: Path, request: dict[str, Any]) -> bytes:
    model = load_ar(directory / request["mode"])
    a = model.architecture
    caches = [new_caches(a.layers, a, a.context_bytes) for _ in range(a.parts)]
    pending, position, text = PROMPT.encode(), 0, b""
    while len(text) < request["max_bytes"]:
        logits = model(torch.tensor([list(pending)]), caches)[0, -1:]
        position += len(pending)
        pending = sample_bytes(logits, request["temperature"], request["seed"], position)
        text += pending
    return text


def reference(directory: Path, request: dict[str, Any]) -> bytes:
    return (ar_text if request["mode"] in ("ar", "local") else chain_text)(directory, request)


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


def test_other_requests_change_nothing(client: Client, references: dict[str, list[bytes]]) -> None:
    found: dict[int, bytes] = {}

    def ask(index: int) -> None:
        found[index] = client.generate(PROMPT, **REQUESTS[index % len(REQUESTS)]).output

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2 * len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(2 * len(REQUESTS))] == 2 * references["own"]


@pytest.mark.parametrize("mode", ["sweep", "chunked", "ar", "local"])
def test_a_stream_adds_up_to_the_text(client: Client, mode: str) -> None:
    whole = client.generate(PROMPT, mode=mode, max_bytes=70, seed=9)
    *pieces, last = client.stream(PROMPT, mode=mode, max_bytes=70, seed=9)
    assert isinstance(last, Result)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == last.output == whole.output
    assert len(pieces) == {"sweep": 1, "chunked": 3, "ar": 70, "local": 5}[mode]
    assert whole.text == whole.output.decode(errors="replace")


def test_sweep_is_chunked_with_one_chunk(client: Client) -> None:
    sweep = client.generate(PROMPT, mode="sweep", max_bytes=50, seed=2)
    assert client.generate(PROMPT, mode="chunked", chunk=50, max_bytes=50, seed=2).output == sweep.output
    assert client.generate(PROMPT, mode="chunked", chunk=500, max_bytes=50, seed=2).output == sweep.output


def test_a_seed_of_64_bits_arrives_whole(client: Client) -> None:
    top = (1 << 64) - 1
    texts = [client.generate(PROMPT, max_bytes=20, seed=seed) for seed in (top, top - 1)]
    assert texts[0].seed == top
    assert texts[0].output != texts[1].output
