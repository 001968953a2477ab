import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.checkpoint.checkpoint import load_ar, load_block
from stages.errors import CheckpointError, DataError, InputError
from stages.model.architecture import Architecture
from tests.trainer.small import corpus
from trainer.blocks.config import NoiseConfig, TrainingConfig
from trainer.blocks.evaluate import Scorer, TextScore
from trainer.blocks.train import train_ar, train_blocks


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chain/, ar/ and local/, hardly trained."""
    architecture = Architecture(parts=2, layers=1, width=16, heads=2, context_length=32, code_dim=8, condition_dim=8)
    noise = NoiseConfig(partition="equal_probability")
    config = TrainingConfig(
        architecture=architecture, noise=noise, steps=2, sequences=2, bfloat16=False, valid_windows=2
    )
    directory = tmp_path_factory.mktemp("bundle")
    train_blocks(config, corpus, directory / "chain")
    train_ar(config, corpus, directory / "ar", 2)
    train_ar(config, corpus, directory / "local", 1)
    return directory


def by_name(scores: list[TextScore]) -> dict[str, float]:
    return {score.name: score.bits_per_byte for score in scores}


def naive_bits(logits_of: Callable[[torch.Tensor], torch.Tensor], text: torch.Tensor, skip: int) -> tuple[float, int]:
    """One byte at a time, in float64."""
    total, count = 0.0, 0
    for row in text:
        logits = logits_of(row[None, :-1])[0].double()
        for position in range(skip, len(row)):
            total -= float(torch.log_softmax(logits[position - 1], dim=-1)[row[position]])
            count += 1
    return total / count / math.log(2), count


@torch.inference_mode()
def test_scores_are_those_of_one_byte_at_a_time(bundle: Path) -> None:
    text = corpus.valid_batch(6, 33)
    (score,) = Scorer(corpus, windows=6, min_context=5).score(bundle / "ar").scores
    bits, count = naive_bits(load_ar(bundle / "ar"), text, 5)
    assert score.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert score.bytes == count == 6 * 28
    result = Scorer(corpus, windows=6, min_context=5).score(bundle / "chain")
    block = load_block(bundle / "chain", 1)
    bits, _ = naive_bits(block.predict, text, 5)
    assert by_name(result.scores)["next byte, block 1"] == pytest.approx(bits, rel=1e-5)


def test_a_chain_has_every_score(bundle: Path) -> None:
    result = Scorer(corpus, windows=4, min_context=8, steps=2).score(bundle / "chain")
    assert by_name(result.scores).keys() == {
        "next byte, block 0",
        "next byte, block 1",
        "from noise",
        "from noise, read at sigma 1",
    }
    assert [score.bytes for score in result.scores] == [4 * 25] * 2 + [4 * 24] * 2
    assert result.trained_on_this_text
    assert result.kind == "chain"


def test_a_short_text_or_a_damaged_checkpoint_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="min_context 32 leaves nothing to score"):
        Scorer(corpus, min_context=32).score(bundle / "ar")
    short = replace(corpus, valid=corpus.valid[:20])
    with pytest.raises(DataError, match="one window needs 33"):
        Scorer(short, min_context=8).score(bundle / "ar")
    copy = tmp_path / "damaged"
    shutil.copytree(bundle / "local", copy)
    (part,) = copy.glob("stage-0-*.safetensors")
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="fetch it again"):
        Scorer(corpus, min_context=8).score(copy)
