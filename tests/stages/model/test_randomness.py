"""Random numbers: the same everywhere, independent where they must be, and distributed as they say."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.limits import MAX_SEED
from stages.model.architecture import VOCABULARY
from stages.model.randomness import Codes, Purpose, gumbels, normals, raw_words, sample_tokens
from stages.model.vocabulary import Vocabulary

SEEDS = st.integers(0, MAX_SEED)


FROZEN_WORDS = [
    0xB2745A6A8B28F042,
    0x6B64FDE1E4416BC2,
    0x02D8A4C97AB3E736,
    0x76782DD7E13EC9EF,
    0xE1DEF061EBB65DF8,
    0x44979BE93481F201,
]
FROZEN_WORDS_OF_THE_LAST_SEED = [0x779326F7CBDF3F79, 0xA60D723B97E5DBE6]
FROZEN_NORMALS = [1.7033734, -0.8393951, 2.0919845, 0.5293458, -1.2559900, 0.4230506]
FROZEN_GUMBELS = [-0.568513327429, 3.649515928935, 0.333611221035, 0.827000588507]


def test_the_stream_is_frozen() -> None:
    """A change here makes every recorded result and every running mix of versions wrong."""
    words = raw_words(1234, Purpose.INITIAL_NOISE, 5, 1, 6, step=3)[0]
    assert [int(word) for word in words] == FROZEN_WORDS
    assert [int(word) for word in raw_words(MAX_SEED, Purpose.SAMPLE, 0, 1, 2)[0]] == FROZEN_WORDS_OF_THE_LAST_SEED
    assert normals(1234, Purpose.INITIAL_NOISE, 7, 1, 6)[0].tolist() == pytest.approx(FROZEN_NORMALS, abs=1e-6)
    assert gumbels(1234, 7, 1, 4)[0].tolist() == pytest.approx(FROZEN_GUMBELS, abs=1e-9)
    assert sample_tokens(torch.zeros(8, 256), 1.0, 99, 3).hex() == "83e258b50cd51817"


@given(SEEDS, st.integers(0, 1000), st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_a_position_does_not_depend_on_how_many_are_drawn(
    seed: int, position: int, count: int, width: int, step: int
) -> None:
    whole = normals(seed, Purpose.INITIAL_NOISE, position, count, width, step)
    for i in {0, count // 2, count - 1}:
        alone = normals(seed, Purpose.INITIAL_NOISE, position + i, 1, width, step)
        assert torch.equal(whole[i : i + 1], alone)


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63, MAX_SEED])
def test_large_seeds_keep_their_low_bits(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here, before = (raw_words(s, Purpose.CODES, 0, 1, 4) for s in (seed, seed - 1))
    assert not np.array_equal(here, before)


def test_normals_are_standard_normal() -> None:
    drawn = normals(5, Purpose.INITIAL_NOISE, 0, 2000, 50)
    flat = drawn.double().ravel().sort().values
    n = len(flat)
    assert float(flat.mean()) == pytest.approx(0, abs=4 / math.sqrt(n))
    assert float(flat.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / n))
    assert float((flat**3).mean()) == pytest.approx(0, abs=4 * math.sqrt(15 / n))
    assert float((flat**4).mean()) == pytest.approx(3, abs=4 * math.sqrt(96 / n))
    distance = (torch.special.ndtr(flat) - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov at 1 %
    correlation = torch.corrcoef(drawn.T.double()) - torch.eye(50)
    assert float(correlation.abs().max()) < 5 / math.sqrt(2000)


# Sampling
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-6])
def test_a_temperature_of_zero_or_nearly_is_the_argmax(temperature: float) -> None:
    logits = 10 * torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = {sample_tokens(logits, temperature, seed, 0) for seed in range(5)}
    assert drawn == {bytes(logits.argmax(dim=1).tolist())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    draws, tokens = 8000, torch.tensor([0, 10, 65, 97, 200, 255])
    logits = torch.full((256,), -1e4)
    logits[tokens] = torch.tensor([0.0, 0.5, 1.0, -0.5, 1.5, 0.2])
    counts = np.bincount(list(sample_tokens(logits.expand(draws, 256), temperature, 7, 0)), minlength=256)
    expected = draws * (logits[tokens] / temperature).softmax(0).numpy()
    assert counts.sum() == counts[tokens].sum()
    chi_square = float(((counts[tokens] - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, 0.1 %


def test_a_byte_depends_on_its_position_and_not_on_its_chunk() -> None:
    logits = torch.randn(20, 256, generator=torch.Generator().manual_seed(2))
    whole = sample_tokens(logits, 1.0, 11, 40)
    assert sample_tokens(logits[:7], 1.0, 11, 40) + sample_tokens(logits[7:], 1.0, 11, 47) == whole
    assert sample_tokens(logits, 1.0, 12, 40) != whole
    assert sample_tokens(logits, 1.0, 11, 41) != whole


@pytest.mark.parametrize("vocabulary", [49_152, 128_256])
def test_a_token_of_a_large_vocabulary_is_a_function_of_seed_and_position(vocabulary: int) -> None:
    logits = 3 * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3))
    whole = Vocabulary(vocabulary).tokens(sample_tokens(logits, 0.8, 11, 40))
    scores = logits.double().numpy() / 0.8 + gumbels(11, 40, 5, vocabulary)
    assert whole == scores.argmax(axis=1).tolist()
    each = [Vocabulary(vocabulary).tokens(sample_tokens(logits[i : i + 1], 0.8, 11, 40 + i)) for i in range(5)]
    assert [[token] for token in whole] == each
    assert Vocabulary(vocabulary).tokens(sample_tokens(logits, 0.0, 1, 0)) == logits.argmax(dim=1).tolist()


# Codes: fixed for ever, of unit norm, and as telling under noise as the design counts on.
@settings(max_examples=20)
@given(st.integers(0, MAX_SEED), st.integers(1, 64))
def test_codes_have_unit_norm(seed: int, dim: int) -> None:
    norms = Codes(seed, dim).table().double().norm(dim=1)
    assert norms.numpy() == pytest.approx(1.0, abs=1e-6)


def test_codes_are_frozen() -> None:
    """Every checkpoint's weights are worth nothing with other codes."""
    assert Codes(0, 32).digest() == "3ff4d7a0826194eda1953d17752caa1175af445ec72e49ec6bf814efad0e9960"
    assert Codes(1, 8).digest() == "62b55d50329e4d4c33243e3c5db02b4eb8806373f7c5e4bf8127b8724931450f"


@pytest.mark.parametrize(("sigma", "nats"), [(0.3, 4.4), (0.5, 2.0), (0.7, 0.95), (1.0, 0.52), (2.0, 0.12)])
def test_the_mutual_information_of_a_noisy_state_and_its_byte(sigma: float, nats: float) -> None:
    """Mutual information of z and y for uniform bytes, by Monte Carlo: ln 256 less the mean posterior entropy."""
    table, draws = Codes(0, 32).table(), 12_000
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(VOCABULARY, (draws,), generator=generator)
    z = table[truth] + sigma * torch.randn(draws, 32, generator=generator)
    posterior = (-(torch.cdist(z, table) ** 2) / (2 * sigma**2)).log_softmax(dim=1)
    entropy = -(posterior.exp() * posterior).sum(dim=1).mean()
    assert math.log(VOCABULARY) - float(entropy) == pytest.approx(nats, rel=0.1)
