from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stages.ar import ArModel
from stages.architecture import Architecture
from trainer.data import Corpus
from trainer.divergence import bundle_divergences, divergence

SIZES = Architecture(parts=1, layers=1, width=16, heads=2, context_bytes=32)


def constant(odds: dict[int, float]) -> ArModel:
    """A model that always gives the same odds."""
    model = ArModel(SIZES)
    head = model.stages[-1].head
    assert head is not None
    rest = (1 - sum(odds.values())) / (256 - len(odds))
    row = torch.full((256,), rest)
    for byte, share in odds.items():
        row[byte] = share
    head.weight.data.zero_()
    head.bias.data = row.log()
    return model


def test_odds_known_in_closed_form(corpus: Corpus) -> None:
    q, p = constant({0: 0.5, 1: 0.25}), constant({0: 0.25, 1: 0.5})
    found = divergence(q, p, "ar", corpus, 4, 8, 1.0)
    assert found.total_variation == pytest.approx(0.25, abs=1e-6)
    assert found.kl_bits == pytest.approx(0.25, abs=1e-5)  # 0.5 log2(2) - 0.25 log2(2)
    assert found.reverse_kl_bits == pytest.approx(0.25, abs=1e-5)
    assert found.verified_sweeps == pytest.approx(1 + 256 * 0.25, abs=1e-3)


def test_temperature_sharpens_both(corpus: Corpus) -> None:
    q, p = constant({0: 0.5, 1: 0.25}), constant({0: 0.25, 1: 0.5})
    cold = divergence(q, p, "ar", corpus, 4, 8, 0.5)
    # squares of the odds, normalised; the other 254 bytes share what is left
    rest = 254 * (0.25 / 254) ** 2
    total = 0.5**2 + 0.25**2 + rest
    assert cold.total_variation == pytest.approx((0.5**2 - 0.25**2) / total, abs=1e-5)
    assert cold.kl_bits == pytest.approx((0.5**2 - 0.25**2) / total * 2 * math.log2(2), abs=1e-4)


def test_a_model_does_not_differ_from_itself(corpus: Corpus) -> None:
    model = ArModel(SIZES)
    found = divergence(model, model, "ar", corpus, 4, 8, 1.0)
    assert found.total_variation == found.kl_bits == found.reverse_kl_bits == 0
    assert found.verified_sweeps == 1


def test_a_bundle_without_a_local_model_has_nothing_to_compare(tmp_path: Path, corpus: Corpus) -> None:
    from dataclasses import replace

    from trainer.untrained import create_untrained

    create_untrained(tmp_path / "ar", "ar", replace(SIZES, parts=2), 0)
    assert bundle_divergences(tmp_path, corpus, 4, 8, 1.0) == []
    create_untrained(tmp_path / "local", "ar", SIZES, 1)
    create_untrained(tmp_path / "scorer", "ar", replace(SIZES, parts=2), 2)
    assert [found.scorer for found in bundle_divergences(tmp_path, corpus, 4, 8, 1.0)] == ["ar", "chain"]
