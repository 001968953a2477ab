"""`verified`: the same text however much is guessed, in as many sweeps as there are refused guesses.

That the text is the scorer's is shown in tests/e2e/test_lossless.py and tests/serving/modes/test_residual.py.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.client.client import Client, Result

PROMPT = b"The sea was calm. The sea was "
OUTPUT = 33


@pytest.fixture(scope="module")
def ring(bundles: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(bundles / "scored", 3) as client:
        yield client


def write(client: Client, prompt: bytes = PROMPT, **settings: Any) -> Result:
    result = client.generate(prompt, mode="verified", **{"max_bytes": OUTPUT, "temperature": 1.5, **settings})
    assert result.output_bytes == result.reached, "every byte is a guess that was tried, or what came in its place"
    refused = result.reached - result.accepted
    assert refused <= result.output_bytes
    assert 1 <= result.sweeps <= result.output_bytes
    assert result.drafted <= result.sweeps * result.output_bytes
    if (settings.get("draft") or 0) >= result.output_bytes:
        assert refused <= result.sweeps <= refused + 1, "a sweep ends at a refused guess, or at the end"
    return result


@pytest.mark.parametrize(("scorer", "temperature"), [("scorer", 0.8), ("ar", 4.0), ("scorer", 0.0)])
def test_the_text_is_the_same_however_much_is_guessed(ring: Client, scorer: str, temperature: float) -> None:
    results = [write(ring, draft=draft, scorer=scorer, temperature=temperature) for draft in (1, 4, 40, 64, None)]
    assert len({result.output for result in results}) == 1
    assert {result.scorer for result in results} == {scorer}
    assert len({result.accepted for result in results}) == 1, "what is refused does not depend on it either"


def test_texts_of_any_length(ring: Client) -> None:
    for max_bytes in (1, 2):
        write(ring, b"The sea ", max_bytes=max_bytes, draft=8)
    prompt = bytes(range(1, 100)) * 4
    texts = {write(ring, prompt, max_bytes=512 - 396, draft=draft).output for draft in (5, 64)}
    assert len(texts) == 1, "up to the end of the context"


def test_int8_hidden_states_are_a_fair_choice(ring: Client) -> None:
    exact, small = (write(ring, PROMPT * 6, codec=codec, draft=8) for codec in ("fp32", "int8"))
    assert small.wire_bytes[1] < exact.wire_bytes[1] / 2, "the hop between two hosts"


def test_a_drafter_that_is_the_scorer_is_never_refused(bundles: Path, tmp_path: Path, local_ring: Any) -> None:
    for name in ("ar", "local"):
        shutil.copytree(bundles / "scored" / "ar", tmp_path / name)
    with local_ring(tmp_path, 1) as client:
        result = write(client, max_bytes=60, temperature=0.8, draft=20)
        assert (result.scorer, result.accepted, result.sweeps) == ("ar", 60, 3)
        local = client.generate(PROMPT, mode="local", max_bytes=60, temperature=0.8)
        assert result.output == local.output, "its guesses are drawn with the numbers that it always draws with"
