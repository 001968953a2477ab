"""EDM's input scale, loss weight and noise levels, against forms that the code does not use."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.model.samplers import input_scale, step_sigmas

SIGMAS = st.floats(1e-3, 1e3)
DATA_STDS = st.floats(0.05, 2.0)


@given(SIGMAS, DATA_STDS)
def test_the_networks_input_has_unit_variance(sigma: float, sd: float) -> None:
    scale = float(input_scale(torch.tensor(sigma, dtype=torch.float64), sd))
    assert scale**2 * (sigma**2 + sd**2) == pytest.approx(1)


@given(SIGMAS, st.floats(0.01, 0.99), st.integers(1, 40))
def test_steps_are_equal_in_log_sigma(high: float, share: float, steps: int) -> None:
    sigmas = step_sigmas(high, high * share, steps)
    assert len(sigmas) == steps + 1
    assert (sigmas[0], sigmas[-1]) == (high, high * share)
    ratios = [low / high for high, low in pairwise(sigmas)]
    assert ratios == pytest.approx([share ** (1 / steps)] * steps)
