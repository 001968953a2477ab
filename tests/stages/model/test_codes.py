"""Codes: fixed for ever, of unit norm, and as telling under noise as the design counts on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.limits import MAX_SEED
from stages.model.architecture import VOCABULARY
from stages.model.randomness import Codes


@settings(max_examples=20)
@given(st.integers(0, MAX_SEED), st.integers(1, 64))
def test_codes_have_unit_norm(seed: int, dim: int) -> None:
    norms = Codes(seed, dim).table().double().norm(dim=1)
    assert norms.numpy() == pytest.approx(1.0, abs=1e-6)


def test_codes_are_frozen() -> None:
    """Every checkpoint's weights are worth nothing with other codes."""
    assert Codes(0, 32).digest() == "3ff4d7a0826194eda1953d17752caa1175af445ec72e49ec6bf814efad0e9960"
    assert Codes(1, 8).digest() == "62b55d50329e4d4c33243e3c5db02b4eb8806373f7c5e4bf8127b8724931450f"


def test_seeds_and_widths_give_other_codes() -> None:
    digests = {Codes(seed, dim).digest() for seed in (0, 1, MAX_SEED) for dim in (8, 32)}
    assert len(digests) == 6


@pytest.mark.parametrize(("sigma", "nats"), [(0.3, 4.4), (0.5, 2.0), (0.7, 0.95), (1.0, 0.52), (2.0, 0.12)])
def test_what_a_noisy_state_tells_about_its_byte(sigma: float, nats: float) -> None:
    """Mutual information of z and y for uniform bytes, by Monte Carlo: ln 256 less the mean posterior entropy."""
    table, draws = Codes(0, 32).table(), 12_000
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(VOCABULARY, (draws,), generator=generator)
    z = table[truth] + sigma * torch.randn(draws, 32, generator=generator)
    posterior = (-(torch.cdist(z, table) ** 2) / (2 * sigma**2)).log_softmax(dim=1)
    entropy = -(posterior.exp() * posterior).sum(dim=1).mean()
    assert math.log(VOCABULARY) - float(entropy) == pytest.approx(nats, rel=0.1)
