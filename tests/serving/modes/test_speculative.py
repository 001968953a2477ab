"""`ar-speculative` writes the text of `ar`, whatever the drafter."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client, Result
from stages.host.drafter import Drafter, DraftState, Tokens
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


def compare(client: Client, prompt: bytes, draft: int | None = None, **settings: Any) -> Result:
    """One request in both modes: the texts are equal, and so is what was booked."""
    settings = {"max_bytes": OUTPUT, **settings}
    plain = plain_text(client, prompt, tuple(settings.items()))
    guessed = client.generate(prompt, mode="ar-speculative", draft=draft, **settings)
    assert guessed.output == plain, (prompt, draft, settings)
    assert guessed.output_bytes == settings["max_bytes"] == guessed.accepted + guessed.sweeps
    assert 0 <= guessed.accepted <= guessed.reached <= guessed.drafted <= guessed.sweeps * (draft or 64)
    return guessed


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("right", [True, False], ids=["all right", "all wrong"])
def test_right_and_wrong_drafts_give_the_text_of_ar(
    ring: Client, monkeypatch: pytest.MonkeyPatch, right: bool, codec: str
) -> None:
    prompt = b"The road went "
    text = ring.generate(prompt, mode="ar", max_bytes=40, seed=3, codec=codec).output

    def drafted(_: Drafter, state: DraftState, known: Tokens, plan: DraftPlan, *others: object) -> Draft:
        after = text[len(known) - len(prompt) :][: plan.total]
        tokens = tuple(after if right else (byte ^ 255 for byte in after))
        return Draft(tokens, tuple(range(len(tokens))), (0.5,) * len(tokens))

    monkeypatch.setattr(Drafter, "drafted", drafted)
    result = compare(ring, prompt, 7, max_bytes=40, seed=3, codec=codec)
    if right:
        # the first token is not drafted: the hosts draft once they have the text
        assert (result.sweeps, result.drafted, result.reached, result.accepted) == (6, 34, 34, 34)
    else:
        assert (result.sweeps, result.reached, result.accepted) == (40, 38, 0)
        assert result.drafted == 32 * 7 + sum(range(7)), "never more than is left"


def test_without_draft_model_hosts_draft_by_lookup(bundles: Path, tmp_path: Path, local_ring: Any, caplog: Any) -> None:
    bare = Path(shutil.copytree(bundles / "own", tmp_path / "bare"))
    next((bare / "local").glob("*.safetensors")).unlink()
    with local_ring(bare, 2) as client:
        assert "has no weights: drafting without it" in caplog.text
        assert "ar-speculative" in client.status().modes
        assert compare(client, b"The sea was calm. The sea was ", temperature=0.0).drafted > 0
