"""Continuations that a whole model writes: those of several texts share passes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.backends.whole_model import Continuations, WholeModel
from stages.checkpoint.checkpoint import load_ar
from stages.model.resampling import Candidates
from tests.serving.pretrained import write_model

# For each job: its text, temperature, seed, length and number.
JOBS = [
    (b"The sea was calm.", 0.8, 0, 20, 5),
    (b"It", 0.7, 1, 1, 9),
    (b"He said that ", 1.0, 2, 33, 1),
    (b"The sea was calm." * 6, 0.1, 3, 12, 16),
]


@pytest.fixture(scope="module", params=["bytes", "tokens"])
def model(request: pytest.FixtureRequest, bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    if request.param == "bytes":
        return WholeModel(bundles / "own" / "local")
    directory = tmp_path_factory.mktemp("written")
    write_model(directory)  # in three stages, with heads that share keys
    return WholeModel(directory)


def job(model: WholeModel, number: int) -> Continuations:
    text, *more = JOBS[number]
    return Continuations(model.open(200), model.vocabulary.encode([t % model.vocabulary.size for t in text]), *more)


def written(model: WholeModel, *jobs: Continuations) -> list[Candidates]:
    """Results of jobs, each of which starts two passes after the one before."""
    begun = 0
    while not all(each.is_done for each in jobs):
        begun += 1
        model.write([each for each in jobs[: 1 + begun // 2] if not each.is_done])
    return [each.candidates() for each in jobs]


@pytest.mark.parametrize("fails", [False, True])
def test_candidates_are_batch_invariant(model: WholeModel, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Also if a pass fails: its texts start again."""
    alone = [written(model, job(model, number))[0] for number in range(len(JOBS))]
    jobs, read, calls = [job(model, number) for number in range(len(JOBS))], model.read, list[int]()

    def failing(pieces: Sequence[Any]) -> Any:
        calls.append(len(pieces))
        return read(pieces if len(calls) != 9 else [])

    if fails:
        monkeypatch.setattr(model, "read", failing)
        with pytest.raises(ValueError, match="zip"):
            written(model, *jobs)
        assert calls[-1] > 1
    for one, other in zip(alone, written(model, *jobs), strict=True):
        assert other.texts == one.texts
        assert np.array_equal(other.nats, one.nats), "to the last bit"


@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 9), (17, 1), (20, 12)])
def test_candidates_have_the_probabilities_of_the_model(bundles: Path, length: int, count: int) -> None:
    directory, text = bundles / "scored" / "local", b"The sea was calm. The sea was "
    model = WholeModel(directory)
    (drafted,) = written(model, Continuations(model.open(400), text, 0.8, 3, length, count))
    tokens = torch.tensor([list(text + each) for each in drafted.texts])
    with torch.inference_mode():
        logits = load_ar(directory)(tokens[:, :-1])[:, len(text) - 1 :]
    nats = (logits.double() / 0.8).log_softmax(dim=-1).gather(2, tokens[:, len(text) :, None])[..., 0]
    assert drafted.nats == pytest.approx(nats.numpy(), abs=1e-3)
