"""Models on the router's own machine: of bytes and of tokens, in one stage and in several."""

import asyncio
import math
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from serving.modes.local import drafter_problem, read_local_model
from serving.modes.pretrained_tokenizer import read_pretrained_tokenizer
from serving.modes.tokenizer import BYTE_TOKENIZER
from serving.router.own_models import LocalModel
from stages.backends.whole_model import Continuations
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import read_manifest
from tests.conftest import refused
from tests.serving.pretrained import DRAFTER, write_model

TEXT = [7, 40, 40, 201, 9]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same tokens: of three stages, with a drafter of one."""
    directory = tmp_path_factory.mktemp("local")
    write_model(directory)
    write_model(directory / "local", seed=1, architecture=DRAFTER)
    return directory


@pytest.fixture(scope="module", params=["bytes", "tokens", "stages"])
def directory(request: pytest.FixtureRequest, bundles: Path, tokens: Path) -> Path:
    return {"bytes": bundles / "own" / "local", "tokens": tokens / "local", "stages": tokens}[request.param]


@torch.inference_mode()
def logits_of(directory: Path, text: list[int]) -> torch.Tensor:
    """Logits after each token, by the plainest code: (tokens, vocabulary)."""
    x, parts = torch.tensor([text]), read_manifest(directory).architecture.parts
    stages = [load_stage(directory, i) for i in range(parts)]
    for stage in stages:
        x = stage.read(x)
    return stages[-1].next_byte(x)[0]


def test_a_local_model_computes_the_logits_of_its_stages(directory: Path) -> None:
    model = LocalModel(directory)
    text, encode = model.open(20), model.vocabulary.encode
    for known in ([7], TEXT, TEXT, TEXT[:3], [*TEXT[:3], 8, 9], TEXT[1:]):
        expected = logits_of(directory, known)[-1:]
        torch.testing.assert_close(text.logits_after(encode(known)), expected, rtol=1e-3, atol=1e-4)


def test_a_damaged_model_is_reported_when_it_is_used(tmp_path: Path) -> None:
    write_model(tmp_path, architecture=DRAFTER)
    model = LocalModel(tmp_path)
    next(tmp_path.glob("stage-*")).write_bytes(b"?")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, r"the router cannot load its own model: .* fetch it again"):
        model.open(20).logits_after(model.vocabulary.encode(TEXT))


def test_a_fork_computes_the_logits_it_computes_alone(directory: Path) -> None:
    model = LocalModel(directory)
    text = model.open(20)
    text.logits_after(model.vocabulary.encode(TEXT))
    forks, texts = text.fork(3, 4), [list(TEXT) for _ in range(3)]
    for tokens, chosen in (([1, 2, 3], [2, 0, 2, 1]), ([9, 9, 4, 0], [3, 1]), ([5, 6], [1])):
        logits = forks.read(np.array(tokens))
        texts = [[*each, token] for each, token in zip(texts, tokens, strict=True)]
        expected = torch.stack([logits_of(directory, each)[-1] for each in texts])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        forks.select(np.array(chosen))
        texts = [texts[i] for i in chosen]
    left = text.logits_after(model.vocabulary.encode(TEXT))
    torch.testing.assert_close(left, logits_of(directory, TEXT)[-1:], rtol=1e-3, atol=1e-4)


def test_a_drafter_with_other_tokens_is_refused(tokens: Path, bundles: Path) -> None:
    spelling = read_pretrained_tokenizer(tokens, read_manifest(tokens))
    model = read_local_model(tokens)
    assert drafter_problem(model, spelling) == ""
    assert "its model has 300 tokens and the hosts' model 256" in drafter_problem(model, BYTE_TOKENIZER)
    of_bytes = read_local_model(bundles / "own")
    assert drafter_problem(of_bytes, BYTE_TOKENIZER) == ""
    assert "256 tokens and the hosts' model 300" in drafter_problem(of_bytes, spelling)
    assert "--drafter copy:q8" in drafter_problem(None, spelling)
    other = LocalModel(tokens / "local")
    other.tokenizer_id = "0" * 64
    assert "(its model has another tokenizer than the hosts' model)" in drafter_problem(other, spelling)


async def test_candidates_end_with_their_request(directory: Path) -> None:
    """At its deadline, and after it was cancelled."""
    model, known = LocalModel(directory), bytes(4)
    written = Continuations(model.open(200), known, 0.8, 3, 150, 8)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed"):
        await model.draft(written, time.monotonic() - 1)
    left = asyncio.create_task(model.draft(written, math.inf))
    await asyncio.sleep(0)
    left.cancel()
    after = Continuations(model.open(200), known, 0.8, 3, 2, 1)
    assert len((await model.draft(after, math.inf)).texts) == 1
    assert not written.is_done
