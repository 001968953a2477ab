"""Random numbers as a pure function of (seed, purpose, position, step).

Every host and device computes the same noise, so any replica can take over a sweep. Philox is counter-based:
the numbers of one position do not depend on how many other numbers are drawn. Only numpy's raw Philox bits are used,
which its stream policy (NEP 19) keeps stable; the normal transform is our own.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from stages.device import Tensor, tensor_of
from stages.limits import MAX_SEED
from stages.model.architecture import VOCABULARY
from stages.model.scoring import PLAIN, Shaping
from stages.model.vocabulary import Vocabulary

_WORDS_PER_COUNTER = 4
# Random numbers that sampling holds at a time: they stay in a processor's cache, however large the vocabulary is.
_DRAWN_AT_ONCE = 1 << 16


class Purpose(IntEnum):
    """Separates streams that share a seed."""

    INITIAL_NOISE = 1
    SAMPLE = 2
    CODES = 3
    WINDOWS = 4
    TRAINING = 5
    CANDIDATE = 8
    CHOICE = 9


@dataclass
class _Key(ISeedSequence):
    """A key used directly: `Philox(key=...)` would first ask the system for entropy that it does not use."""

    words: NDArray[np.uint64]

    def generate_state(self, *_: object) -> NDArray[np.uint64]:
        return self.words


def raw_words(seed: int, purpose: Purpose, position: int, count: int, width: int, step: int = 0) -> NDArray[np.uint64]:
    """`width` 64-bit words for each of `count` positions from `position` on: (count, width) uint64."""
    counters = -(-width // _WORDS_PER_COUNTER)
    start = position * counters
    # as uint64: a list of Python numbers on both sides of 2^63 would pass through float64 and lose low bits
    key = np.array([seed & MAX_SEED, int(purpose)], dtype=np.uint64)
    counter = np.array([start, step, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(_Key(key), counter=counter)  # type: ignore[arg-type] # stubs know of one kind only
    words = bits.random_raw(count * counters * _WORDS_PER_COUNTER)
    return np.asarray(words).reshape(count, counters * _WORDS_PER_COUNTER)[:, :width]


# Codes are 16-bit integers divided by an integer norm: only IEEE arithmetic, so every machine computes the digest in
# the manifest. Noise uses raw Philox words for the same reason: numpy keeps those stable, but not its normal numbers.
@dataclass(frozen=True)
class Codes:
    """A table of unit-norm codes made from a seed: the vectors that stand for tokens in the noisy state."""

    seed: int
    dim: int
    size: int = VOCABULARY

    def table(self) -> Tensor:
        """(size, dim) float32, each row of norm 1."""
        return tensor_of(self._vectors())

    def _vectors(self) -> NDArray[np.float32]:
        words = raw_words(self.seed, Purpose.CODES, 0, self.size, self.dim)
        integers = (words >> np.uint64(48)).astype(np.int64) * 2 - 65535
        norms = np.sqrt((integers * integers).sum(axis=1, dtype=np.int64).astype(np.float64))
        return np.asarray((integers / norms[:, None]).astype(np.float32))

    def digest(self) -> str:
        """SHA-256 of the table's little-endian float32 bytes."""
        return hashlib.sha256(self._vectors().astype("<f4").tobytes()).hexdigest()


def uniforms(seed: int, purpose: Purpose, position: int, count: int, width: int, step: int = 0) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1]: (count, width) float64."""
    words = raw_words(seed, purpose, position, count, width, step)
    return ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def normals(seed: int, purpose: Purpose, position: int, count: int, width: int, step: int = 0) -> Tensor:
    """Standard normal numbers: (count, width) float32, by the Box-Muller transform in float64."""
    half = -(-width // 2)
    u = uniforms(seed, purpose, position, count, 2 * half, step)
    radius, angle = np.sqrt(-2 * np.log(u[:, :half])), 2 * np.pi * u[:, half:]
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return tensor_of(pairs[:, :width].astype(np.float32))


def gumbels(seed: int, position: int, count: int, width: int) -> NDArray[np.float64]:
    """Standard Gumbel numbers for sampling by argmax: (count, width) float64."""
    u = uniforms(seed, Purpose.SAMPLE, position, count, width)
    return np.asarray(-np.log(-np.log(u * (1 - 2.0**-53))))


def sample_tokens(logits: Tensor, temperature: float, seed: int, position: int, shaping: Shaping = PLAIN) -> bytes:
    """One token for each row of `logits` (count, vocabulary): a draw at `temperature` from the tokens that the filters
    of `shaping` leave, or the argmax at 0.

    Token i uses the Gumbel numbers of `position + i`, so the same (seed, position, logits) give the same token on every
    host and in every mode. Returns the tokens, encoded for a vocabulary of that size.
    """
    scores = logits.detach().cpu().numpy()
    count, vocabulary = scores.shape
    if temperature <= 0:
        chosen: list[int] = scores.argmax(axis=1).tolist()
    else:
        rows = max(_DRAWN_AT_ONCE // vocabulary, 1)
        parts = range(0, count, rows)
        chosen = [x for at in parts for x in _drawn(scores[at : at + rows], temperature, seed, position + at, shaping)]
    return Vocabulary(vocabulary).encode(chosen)


def _drawn(logits: NDArray[np.floating], temperature: float, seed: int, position: int, shaping: Shaping) -> list[int]:
    scores = logits.astype(np.float64)
    # relative to the best, so a tiny temperature gives -inf and the argmax, instead of inf for many
    with np.errstate(over="ignore"):
        scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return (shaping.filtered(scores) + gumbels(seed, position, *scores.shape)).argmax(axis=1).tolist()
