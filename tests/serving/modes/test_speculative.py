"""`ar-speculative` writes the text of `ar`, whoever guesses and however badly."""

import shutil
from collections.abc import Iterator
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.client.client import Client, RequestRefused, Result
from onesweep.serving.modes import speculative
from onesweep.stages.model.draft_tree import Draft, DraftPlan, SweepTime

PROMPTS = (b"x", b"The sea was calm. The sea was ", bytes((7 * i) % 128 for i in range(200)))
DRAFTERS = ("model", "lookup", "both")
LENGTHS = (1, 2, 3, 8, 31, 32, None)
OUTPUT = 33


@pytest.fixture(scope="module")
def bundle(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes, with a small model."""
    made = tmp_path_factory.mktemp("drafters")
    for folder in ("ar", "local"):
        (made / folder).symlink_to(bundles / "own" / folder)
    return made


@pytest.fixture(scope="module")
def ring(bundle: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(bundle, 3) as client:
        yield client


@cache
def plain_text(client: Client, prompt: bytes, settings: tuple[tuple[str, Any], ...]) -> bytes:
    """That of `ar`, asked for once."""
    return client.generate(prompt, mode="ar", **dict(settings)).output


def compare(client: Client, prompt: bytes, drafter: str | None, draft: int | None, **settings: Any) -> Result:
    """One request in both modes: the texts are equal, and so is what was booked."""
    settings = {"max_bytes": OUTPUT, **settings}
    plain = plain_text(client, prompt, tuple(settings.items()))
    guessed = client.generate(prompt, mode="ar-speculative", drafter=drafter, draft=draft, **settings)
    assert guessed.output == plain, (prompt, drafter, draft, settings)
    assert guessed.output_bytes == settings["max_bytes"] == guessed.accepted + guessed.sweeps
    assert 0 <= guessed.accepted <= guessed.reached <= guessed.drafted <= guessed.sweeps * (draft or 64)
    return guessed


CASES = list(product(PROMPTS, (1,), (0.0, 0.8)))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_of_ar(ring: Client, drafter: str) -> None:
    lengths, codecs = cycle(LENGTHS), cycle(("fp32", "fp32", "int8"))
    for prompt, seed, temperature in CASES:
        compare(ring, prompt, drafter, next(lengths), seed=seed, temperature=temperature, codec=next(codecs))


def test_texts_of_any_length(ring: Client) -> None:
    for max_bytes, drafter in product((1, 2), DRAFTERS):
        result = compare(ring, b"The sea was calm. The sea ", drafter, 8, max_bytes=max_bytes)
        assert result.drafted <= max_bytes - 1, "the last byte needs no guess"
    compare(ring, bytes(range(1, 100)) * 4, "both", 32, max_bytes=512 - 396)  # to the end of the context


# Who guesses


class Oracle:
    """Guesses from a text that is known, right or wrong."""

    def __init__(self, prompt: bytes, text: bytes, right: bool) -> None:
        self.prompt, self.text, self.right = prompt, text, right

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        start = len(text) - len(self.prompt)
        guesses = self.text[start : start + (plan.guesses or 0)]
        symbols = tuple(guesses if self.right else (byte ^ 255 for byte in guesses))
        return Draft(symbols, tuple(range(len(symbols))), (0.5,) * len(symbols))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("right", [True, False], ids=["all right", "all wrong"])
def test_a_drafter_that_knows_and_one_that_is_against_us(
    ring: Client, monkeypatch: pytest.MonkeyPatch, right: bool, codec: str
) -> None:
    prompt = b"The road went "
    plain = ring.generate(prompt, mode="ar", max_bytes=40, seed=3, codec=codec)
    monkeypatch.setattr(speculative, "LookupDrafter", lambda *_: Oracle(prompt, plain.output, right))
    result = compare(ring, prompt, "lookup", 7, max_bytes=40, seed=3, codec=codec)
    if right:
        assert (result.sweeps, result.drafted, result.reached, result.accepted) == (5, 35, 35, 35)
    else:
        assert (result.sweeps, result.reached, result.accepted) == (40, 39, 0)
        assert result.drafted == 33 * 7 + sum(range(7)), "never more than is left"


def test_a_small_model_with_the_same_odds_guesses_everything_right(
    bundles: Path, tmp_path: Path, local_ring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any temperature, for both draw with the same random numbers."""
    monkeypatch.setattr(SweepTime, "ms", lambda *_: 1e6)  # drafting is the quicker, however busy this machine is
    twin = Path(shutil.copytree(bundles / "own", tmp_path / "twin"))
    shutil.rmtree(twin / "local")
    shutil.copytree(twin / "ar", twin / "local")
    with local_ring(twin, 2) as client:
        for seed, temperature in ((0, 0.0), (1, 0.8), (2, 3.0)):
            result = compare(client, b"The sea ", "model", 9, max_bytes=50, seed=seed, temperature=temperature)
            assert (result.sweeps, result.drafted, result.accepted) == (5, 45, 45)
        # all that is sent stands: so what comes after it is drafted while it is under way
        ahead = compare(client, b"The sea ", "model", 2, max_bytes=50)
        assert ahead.accepted == ahead.drafted
        assert 0 < ahead.ahead_ms < ahead.compute_ms
        assert 0 < ahead.ahead_used < ahead.sweeps


def test_who_guesses_if_nobody_says(bundles: Path, tmp_path: Path, local_ring: Any, ring: Client) -> None:
    """Both where the router has a model; what is looked up needs none."""
    result = compare(ring, b"x", None, None)
    assert result.drafted > 0
    bare = Path(shutil.copytree(bundles / "own", tmp_path / "bare"))
    shutil.rmtree(bare / "local")
    with local_ring(bare, 1) as client:
        assert "ar-speculative" in client.status().modes
        assert compare(client, PROMPTS[1], None, None).output == compare(client, PROMPTS[1], "lookup", 4).output
        with pytest.raises(RequestRefused, match=r"no drafter that writes bytes.*drafter 'lookup' needs none"):
            client.generate(b"x", mode="ar-speculative", drafter="model")
