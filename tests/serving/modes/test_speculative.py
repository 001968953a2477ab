"""`ar-speculative` writes the text of `ar`, whoever guesses and however badly."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client, RequestRefused, Result
from serving.modes import speculative
from stages.model.draft_tree import Draft, DraftPlan

OUTPUT = 33


@pytest.fixture(scope="module")
def ring(bundles: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(bundles / "own", 3) as client:
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


# Who guesses


class Oracle:
    """Guesses from a text that is known, right or wrong."""

    def __init__(self, prompt: bytes, text: bytes, right: bool) -> None:
        self.prompt, self.text, self.right = prompt, text, right

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        start = len(text) - len(self.prompt)
        guesses = self.text[start : start + (plan.guesses or 0)]
        tokens = tuple(guesses if self.right else (byte ^ 255 for byte in guesses))
        return Draft(tokens, tuple(range(len(tokens))), (0.5,) * len(tokens))


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


def test_who_guesses_if_nobody_says(bundles: Path, tmp_path: Path, local_ring: Any, ring: Client) -> None:
    """Both where the router has a model; what is looked up needs none."""
    result = compare(ring, b"x", None, None)
    assert result.drafted > 0
    bare = Path(shutil.copytree(bundles / "own", tmp_path / "bare"))
    shutil.rmtree(bare / "local")
    with local_ring(bare, 1) as client:
        assert "ar-speculative" in client.status().modes
        prompt = b"The sea was calm. The sea was "
        assert compare(client, prompt, None, None).output == compare(client, prompt, "lookup", 4).output
        with pytest.raises(RequestRefused, match=r"no drafter that writes bytes.*drafter 'lookup' needs none"):
            client.generate(b"x", mode="ar-speculative", drafter="model")
