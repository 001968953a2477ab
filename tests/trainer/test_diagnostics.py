from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stages.block import Block
from stages.partition import NoisePartition
from trainer import diagnostics
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.diagnostics import block_diagnostics, chain_diagnostics, scrambled
from trainer.evaluation import clean_features, from_noise_path, sigma_max_nats
from trainer.tasks import BlockTask

MakeBlocks = Callable[..., list[Block]]


@pytest.fixture
def text(corpus: Corpus) -> torch.Tensor:
    return corpus.valid_batch(6, 17)


def test_scrambled_prefixes_are_other_windows_backwards() -> None:
    known = torch.arange(6).view(2, 3)
    assert scrambled(known).tolist() == [[5, 4, 3], [2, 1, 0]]
    assert scrambled(known[:1]).tolist() == [[2, 1, 0]]


@pytest.mark.parametrize("context", ["own", "chained"])
def test_figures_are_those_of_the_path(
    make_blocks: MakeBlocks, partition: NoisePartition, text: torch.Tensor, context: str
) -> None:
    blocks, known = make_blocks(context=context), text[:, :-1]
    losses = chain_diagnostics(blocks, partition, text, 3)
    with torch.inference_mode():
        true = [memory for _, memory in clean_features(blocks, known)]
        wrong = [memory for _, memory in clean_features(blocks, scrambled(known))]
        path = from_noise_path(blocks, true, partition, known, 3)
        other = from_noise_path(blocks, wrong, partition, known, 3)
        alone = from_noise_path(blocks[1:], true[1:], partition, known, 3)
        flat = sigma_max_nats(blocks[0], true[0], partition, known)
    above = [i for i, point in enumerate(path) if point.sigma >= 1][-1]
    assert 0 < above < len(path) - 1
    expected = {
        "sigma_max_nats": flat,
        "from_noise_nats": path[-1].nats,
        "from_noise_scrambled_nats": other[-1].nats,
        "last_block_from_noise_nats": alone[-1].nats,
        "from_noise_sigma1_nats": path[above].nats,
        "from_noise_sigma1_scrambled_nats": other[above].nats,
    }
    assert losses == pytest.approx(expected, rel=1e-4)


def test_rows_at_a_time_do_not_matter(
    make_blocks: MakeBlocks, partition: NoisePartition, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks()
    by_four = chain_diagnostics(blocks, partition, text, 2)
    monkeypatch.setattr(diagnostics, "ROWS", 5)
    assert chain_diagnostics(blocks, partition, text, 2) == pytest.approx(by_four, rel=1e-5)


def test_on_the_papers_range_both_readings_are_one(make_blocks: MakeBlocks, text: torch.Tensor) -> None:
    losses = chain_diagnostics(make_blocks(), NoisePartition("uniform", (10.0, 3.0, 1.0)), text, 2)
    assert losses["from_noise_sigma1_nats"] == losses["from_noise_nats"]
    low = chain_diagnostics(make_blocks(), NoisePartition("uniform", (0.9, 0.5, 0.2)), text, 2)
    assert "from_noise_sigma1_nats" not in low


def test_a_block_alone_starts_at_its_own_sigma_max(
    make_blocks: MakeBlocks, partition: NoisePartition, text: torch.Tensor
) -> None:
    blocks = make_blocks(context="chained")
    alone = block_diagnostics(blocks[:1], blocks[1], partition, text, 2)
    whole = chain_diagnostics(blocks, partition, text, 2)
    assert alone["from_noise_nats"] == pytest.approx(whole["last_block_from_noise_nats"])
    assert alone.keys() == {"sigma_max_nats", "from_noise_nats", "from_noise_scrambled_nats"}


def test_a_trained_chain_uses_its_context_and_a_broken_one_is_caught(
    make_blocks: MakeBlocks, tiny: TrainingConfig, corpus: Corpus
) -> None:
    """On text of words the true prefix helps; cut off from it, the scrambled figure is the same."""
    partition = NoisePartition("uniform", (10.0, 3.0, 1.0))
    config = replace(tiny, chunks=(1,), sequences=8)
    block = make_blocks(layers=1)[0]
    for parameter in block.parameters():
        parameter.data *= 0.3
    task = BlockTask(block, [], partition, corpus, config)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for step in range(150):
        optimizer.zero_grad()
        task.loss(step).total.backward()
        optimizer.step()
    text = corpus.valid_batch(16, 33)
    losses = block_diagnostics([], block, partition, text, 2)
    assert losses["from_noise_nats"] < losses["from_noise_scrambled_nats"] - 0.3
    for layer in block.layers:
        layer.attention_out.weight.data.zero_()
    blind = block_diagnostics([], block, partition, text, 2)
    assert blind["from_noise_nats"] == pytest.approx(blind["from_noise_scrambled_nats"], abs=0.02)
