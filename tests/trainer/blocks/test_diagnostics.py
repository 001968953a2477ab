import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from onesweep.stages.backends import DEFAULT_BACKEND, backend_named
from onesweep.stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from onesweep.stages.model.block import Block
from onesweep.stages.model.codec import Fp32
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import ArModel, new_caches
from onesweep.stages.model.vocabulary import BYTES
from onesweep.trainer.blocks import diagnostics
from onesweep.trainer.blocks.diagnostics import (
    Memory,
    PathPoint,
    bayes_denoiser,
    bits,
    block_diagnostics,
    chain_denoiser,
    chain_diagnostics,
    clean_features,
    from_noise_path,
    next_byte_nats,
    noise_floors,
    scrambled,
    sigma_max_nats,
)
from onesweep.trainer.blocks.task import BlockTask
from tests.trainer.small import corpus, make_blocks, partition, tiny


def chain_path(
    blocks: list[Block], memories: list[Memory], known: torch.Tensor, steps: int, row: int = 0
) -> list[PathPoint]:
    denoise, ranges = (
        chain_denoiser(blocks, memories, known.shape[1]),
        [partition.range(block.index) for block in blocks],
    )
    return from_noise_path(denoise, ranges, blocks[0].codes, known, steps, row=row)


@pytest.fixture
def text() -> torch.Tensor:
    return corpus.valid_batch(6, 17)


def test_scrambled_prefixes_are_other_windows_backwards() -> None:
    known = torch.arange(6).view(2, 3)
    assert scrambled(known).tolist() == [[5, 4, 3], [2, 1, 0]]
    assert scrambled(known[:1]).tolist() == [[2, 1, 0]]


@pytest.mark.parametrize("context", ["own", "chained"])
def test_figures_are_those_of_the_path(text: torch.Tensor, context: str) -> None:
    blocks, known = make_blocks(context=context), text[:, :-1]
    losses = chain_diagnostics(blocks, partition, text, 3)
    with torch.inference_mode():
        true = [memory for _, memory in clean_features(blocks, known)]
        wrong = [memory for _, memory in clean_features(blocks, scrambled(known))]
        path = chain_path(blocks, true, known, 3)
        other = chain_path(blocks, wrong, known, 3)
        alone = chain_path(blocks[1:], true[1:], known, 3)
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


def test_rows_at_a_time_do_not_matter(text: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks()
    by_four = chain_diagnostics(blocks, partition, text, 2)
    monkeypatch.setattr(diagnostics, "ROWS", 5)
    assert chain_diagnostics(blocks, partition, text, 2) == pytest.approx(by_four, rel=1e-5)


def test_on_the_papers_range_both_readings_are_one(text: torch.Tensor) -> None:
    losses = chain_diagnostics(make_blocks(), NoisePartition("uniform", (10.0, 3.0, 1.0)), text, 2)
    assert losses["from_noise_sigma1_nats"] == losses["from_noise_nats"]
    low = chain_diagnostics(make_blocks(), NoisePartition("uniform", (0.9, 0.5, 0.2)), text, 2)
    assert "from_noise_sigma1_nats" not in low


def test_a_block_alone_starts_at_its_own_sigma_max(text: torch.Tensor) -> None:
    blocks = make_blocks(context="chained")
    alone = block_diagnostics(blocks[:1], blocks[1], partition, text, 2)
    whole = chain_diagnostics(blocks, partition, text, 2)
    assert alone["from_noise_nats"] == pytest.approx(whole["last_block_from_noise_nats"])
    assert alone.keys() == {"sigma_max_nats", "from_noise_nats", "from_noise_scrambled_nats"}


def test_a_trained_chain_uses_its_context_and_a_broken_one_is_caught() -> None:
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


def two_symbols(share: float, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Odds of the symbols -1 and 1 at each of `count` places, their codes, and a text that is all ones."""
    prior = torch.tensor([1 - share, share]).log().expand(1, count, 2)
    return prior, torch.tensor([[-1.0], [1.0]]), torch.ones(1, count, dtype=torch.long)


def test_a_bayes_floor_is_what_one_draw_of_noise_costs() -> None:
    prior, codes, known = two_symbols(0.8, 20_000)
    first = from_noise_path(bayes_denoiser(prior, codes), [(1.0, 0.5)], codes, known, 1)[0]
    # z = eps at sigma 1, and the odds of 1 to -1 are 4 exp(2 eps): integrated over eps with Gauss and Hermite
    eps, weights = np.polynomial.hermite_e.hermegauss(60)
    expected = (weights * np.log1p(np.exp(-2 * eps) / 4)).sum() / weights.sum()
    assert first.sigma == 1
    assert first.nats == pytest.approx(expected, abs=0.02)
    assert expected > -math.log(0.8) + 0.1


def test_odds_of_the_exact_denoiser_averaged_over_noise_are_those_without_noise() -> None:
    prior, codes, known = two_symbols(0.8, 40)
    path = from_noise_path(bayes_denoiser(prior, codes), [(20.0, 2.0), (2.0, 0.3)], codes, known, 32, draws=400)
    assert len(path) == 65
    assert [point.nats for point in path] == pytest.approx([-math.log(0.8)] * 65, abs=0.02)


def test_floors_stand_beside_the_figures_of_the_same_noise(text: torch.Tensor) -> None:
    blocks, reference = make_blocks(), ArModel(replace(tiny.architecture, parts=1))
    floors = noise_floors(blocks, partition, reference, text, 2)
    assert {name: windows for name, (_, windows) in floors.items()} == {
        "bayes_nats": 6,
        "sigma1_bayes_nats": 6,
        "averaged_nats": 3,
        "averaged_bayes_nats": 3,
        "averaged_reference_nats": 3,
    }
    few, alone = text[::2], {name: nats for name, (nats, _) in floors.items()}
    with torch.inference_mode():
        ends = next_byte_nats(reference(few[:, :-2]), few[:, :-1])
    assert alone["averaged_reference_nats"] == pytest.approx(ends)
    assert ends - 0.1 < alone["averaged_bayes_nats"] < alone["sigma1_bayes_nats"] < alone["bayes_nats"]
    one = chain_diagnostics(blocks, partition, few, 2)["from_noise_sigma1_nats"]
    assert alone["averaged_nats"] < one


LENGTH = 9


@pytest.fixture
def known() -> torch.Tensor:
    return torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def memories(blocks: list[Block], known: torch.Tensor) -> list:
    return [memory for _, memory in clean_features(blocks, known)]


def test_bits() -> None:
    assert bits(math.log(2)) == 1


def test_skipped_bytes_are_read_but_not_scored() -> None:
    text = torch.tensor([[5, 6, 7, 8]])
    logits = torch.zeros(1, 3, 256)
    logits[0, 0, 6] = -50.0
    assert next_byte_nats(logits, text, skip=2) == pytest.approx(math.log(256))
    assert next_byte_nats(logits, text) > math.log(256)


@torch.inference_mode()
@pytest.mark.parametrize("context", ["own", "chained"])
def test_from_noise_is_what_a_sweep_does_at_each_position(known: torch.Tensor, context: str) -> None:
    """Against the served code: one slot at a time, after its true prefix, through every block's own KV cache."""
    blocks, steps = make_blocks(context=context), 3
    path = chain_path(blocks, memories(blocks, known[:1]), known[:1], steps)
    losses = []
    for position in range(1, LENGTH):
        plan = SweepPlan(seed=0, start=position, slots=1, steps=steps, temperature=0.0)
        before: Boundary | bytes | None = None
        for block in blocks:
            a, caches = block.architecture, new_caches(block.architecture.layers, block.architecture, LENGTH)
            clean = bytes(known[0, :position].tolist())
            work = BlockWork(a, block.index, partition, caches, plan, Fp32(), BYTES.decode(clean), before)
            before = run_unbatched(work, backend_named(DEFAULT_BACKEND).block(block))
        losses.append(float(F.cross_entropy(work._logits, known[0, position : position + 1])))
    assert path[-1].nats == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@torch.inference_mode()
def test_the_path_falls_from_sigma_max_to_sigma_min(known: torch.Tensor) -> None:
    blocks = make_blocks()
    path = chain_path(blocks, memories(blocks, known), known, 3)
    sigmas = [point.sigma for point in path]
    assert len(path) == 2 * 3 + 1
    assert sigmas == sorted(sigmas, reverse=True)
    assert (sigmas[0], sigmas[3], sigmas[-1]) == partition.boundaries
    alone = chain_path(blocks[1:], memories(blocks, known)[1:], known, 3)
    assert [point.sigma for point in alone] == sigmas[3:]


@torch.inference_mode()
def test_the_noise_of_a_row_does_not_depend_on_its_batch(known: torch.Tensor) -> None:
    blocks = make_blocks()
    both = chain_path(blocks, memories(blocks, known), known, 2)[-1].nats
    rows = [
        chain_path(blocks, memories(blocks, known[i : i + 1]), known[i : i + 1], 2, row=i)[-1].nats for i in range(2)
    ]
    assert both == pytest.approx(sum(rows) / 2, rel=1e-5)
    assert rows[1] != chain_path(blocks, memories(blocks, known[1:]), known[1:], 2)[-1].nats


@torch.inference_mode()
def test_at_great_noise_only_the_context_counts(known: torch.Tensor) -> None:
    block = make_blocks()[0]
    whole = sigma_max_nats(block, memories([block], known)[0], partition, known)
    rows = [
        sigma_max_nats(block, memories([block], known[i : i + 1])[0], partition, known[i : i + 1], row=i)
        for i in range(2)
    ]
    assert whole == pytest.approx(sum(rows) / 2, rel=1e-5)
    block.noisy_head.weight.data.zero_()
    block.noisy_head.bias.data.zero_()
    far = NoisePartition("uniform", (1000.0, 10.0, 0.1))
    assert sigma_max_nats(block, memories([block], known)[0], far, known) == pytest.approx(math.log(256), abs=0.02)
