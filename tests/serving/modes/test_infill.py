"""`infill`: the middle of a text whose end is given, with one sweep for each piece."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.client.client import Client, RequestRefused, Result
from onesweep.serving.modes.drafters.base import LocalModel
from onesweep.serving.modes.infill import OF_BYTES

PROMPT, SUFFIX = b"The sea was calm. The ", b" was calm, and the sea was wide."
REQUESTS: list[dict[str, Any]] = [
    {"seed": 0, "max_bytes": 8},
    {"seed": 1, "max_bytes": 8, "scorer": "ar", "candidates": 5},
    {"seed": 2, "max_bytes": 20, "chunk": 8, "temperature": 2.0},
    {"seed": 3, "max_bytes": 1, "candidates": 200},
]


@pytest.fixture(scope="module")
def lone(bundles: Path, local_ring: Any) -> Iterator[Client]:
    """One host."""
    with local_ring(bundles / "scored", 1) as client:
        yield client


def fill(client: Client, prompt: bytes = PROMPT, suffix: bytes = SUFFIX, **settings: Any) -> Result:
    result = client.generate(prompt, mode="infill", suffix=suffix, **{"max_bytes": 8, "codec": "fp32", **settings})
    assert len(result.output) == result.output_bytes == settings.get("max_bytes", 8)
    assert 1 <= result.effective_samples <= result.candidates
    return result


# One text


def test_what_follows_matters(lone: Client) -> None:
    outputs = [fill(lone, **request).output for request in REQUESTS]
    assert fill(lone, seed=10).output != outputs[0]
    assert fill(lone, seed=0, suffix=b"!?").output != outputs[0]


def test_what_is_far_behind_the_gap_is_not_looked_at(lone: Client) -> None:
    head = SUFFIX[: OF_BYTES.ahead]
    assert fill(lone, suffix=head + b"!" * 600).output == fill(lone, suffix=head).output
    assert fill(lone, suffix=head[:-1] + b"!").output_bytes == 8


# What it costs


@pytest.mark.parametrize(
    ("max_bytes", "chunk", "sweeps", "longest"),
    [(1, None, 1, 1), (32, None, 1, 32), (33, None, 2, 32), (10, 4, 3, 4), (3, 100, 1, 3)],
)
def test_a_piece_is_a_trip(lone: Client, max_bytes: int, chunk: int | None, sweeps: int, longest: int) -> None:
    result = fill(lone, max_bytes=max_bytes, chunk=chunk, candidates=4)
    assert (result.sweeps, result.chunk, result.candidates) == (sweeps, longest, 4)
    assert result.scorer == "scorer"


def test_a_gap_of_one_chunk_comes_in_one_piece(lone: Client) -> None:
    *pieces, last = lone.stream(PROMPT, mode="infill", suffix=SUFFIX, max_bytes=16)
    assert isinstance(last, Result)
    assert pieces == [last.output]
    assert last.candidates == 16
    assert last.compute_ms > sum(host.compute_ms for host in last.hosts), "the drafter's own share"


def test_a_text_up_to_the_end_of_the_context(lone: Client) -> None:
    prompt = bytes(range(1, 100)) * 4
    assert fill(lone, prompt, max_bytes=512 - 396 - OF_BYTES.ahead, candidates=4).sweeps == 4
    with pytest.raises(RequestRefused, match=r"prompt \(396 bytes\) and output \(101\) need a context of 513"):
        fill(lone, prompt, max_bytes=512 - 396 - OF_BYTES.ahead + 1)


# What a user can get wrong


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"suffix": b""}, r"give one \(--suffix\)"),
        ({"mode": "ar"}, "mode ar does not look at a suffix: leave it out, or use mode infill"),
        ({"suffix": b"caf\xe9"}, r"the suffix is not UTF-8 \(byte 3\)"),
        ({"temperature": 0.0}, "temperature above 0"),
    ],
)
def test_a_wrong_field_is_refused(lone: Client, changes: dict[str, Any], says: str) -> None:
    request = {"prompt": PROMPT, "mode": "infill", "suffix": SUFFIX, "max_bytes": 8, **changes}
    with pytest.raises(RequestRefused, match=says):
        lone.generate(**request)


def test_more_than_the_drafter_has_memory_for_is_refused(lone: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalModel, "max_draft_bytes", 1 << 16)
    with pytest.raises(
        RequestRefused, match="64 candidates of 8 bytes with 16 of the suffix are more than the drafter"
    ):
        fill(lone, PROMPT, max_bytes=8, candidates=64)
