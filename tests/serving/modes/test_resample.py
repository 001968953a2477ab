"""`resample`: a fixed number of sweeps, and what they cost.

That the text is the one of a single process is shown in tests/e2e/test_lossless.py, its law in test_candidates.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client.client import Client, RequestRefused, Result
from serving.modes import resample
from serving.modes.resample import read_scores
from serving.router.own_models import LocalModel
from stages.wire.status import StatusError

PROMPT = b"The sea was calm. The sea was "


@pytest.fixture(scope="module")
def ring(bundles: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(bundles / "scored", 3) as client:
        yield client


def write(client: Client, prompt: bytes = PROMPT, **settings: Any) -> Result:
    result = client.generate(prompt, mode="resample", **{"max_bytes": 40, "codec": "fp32", **settings})
    assert result.output_bytes == len(result.output)
    assert 1 <= result.effective_samples <= result.candidates
    return result


@pytest.mark.parametrize(("max_bytes", "chunk"), [(40, 40), (40, 13), (41, 8), (1, 8), (5, 1), (3, 300)])
def test_each_chunk_takes_one_trip(ring: Client, max_bytes: int, chunk: int) -> None:
    result = write(ring, max_bytes=max_bytes, chunk=chunk, candidates=4)
    assert result.sweeps == -(-max_bytes // chunk), "the prompt travels with the first candidates"
    assert (result.output_bytes, result.chunk, result.candidates) == (max_bytes, min(chunk, max_bytes), 4)


def test_a_close_drafter_gives_a_small_distance_bound(ring: Client) -> None:
    result = write(ring, max_bytes=256, temperature=20.0)
    assert result.divergence_bits < 0.02
    assert 2 < result.effective_samples < 16
    assert 0 < result.distance_bound < 0.5


def test_candidates_that_do_not_fit_are_refused_before_drafting(ring: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that fits, and that number does fit."""
    monkeypatch.setattr(LocalModel, "max_draft_bytes", 100 * 2 * 32 * 4 * 30)
    assert write(ring, max_bytes=100, candidates=30).candidates == 30
    assert write(ring, max_bytes=400, candidates=30, chunk=100).sweeps == 4, "a chunk's candidates alone take room"
    assert write(ring, max_bytes=400).candidates == 7, "the default is the number that fits"
    monkeypatch.setattr(LocalModel, "draft", None)
    with pytest.raises(RequestRefused, match="are too many: the drafter has memory for at most 30; give"):
        write(ring, max_bytes=100, candidates=31)
    with pytest.raises(RequestRefused, match="memory for at most 7; give fewer candidates"):
        write(ring, max_bytes=400, candidates=1024)
    monkeypatch.setattr(LocalModel, "max_draft_bytes", 1000)
    with pytest.raises(RequestRefused, match="drafter has no memory for a chunk of 400 bytes: give a smaller one"):
        write(ring, max_bytes=400)
    monkeypatch.setattr(resample, "max_scored", lambda width: 399)
    with pytest.raises(RequestRefused, match=r"400 bytes does not fit a message to the hosts \(at most 399 bytes\)"):
        write(ring, max_bytes=400)


def test_invalid_scores_are_refused() -> None:
    assert read_scores(np.zeros(2, "<f8").tobytes(), 2).shape == (2,)
    with pytest.raises(StatusError, match="scores of 2 candidates have 20 bytes"):
        read_scores(bytes(20), 2)
    with pytest.raises(StatusError, match="not numbers"):
        read_scores(np.full(2, math.nan, "<f8").tobytes(), 2)
