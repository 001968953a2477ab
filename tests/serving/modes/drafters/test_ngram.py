"""N-grams against a plain reckoning of the formula, and their file against what may be wrong with it."""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from onesweep.serving.modes.drafters.ngram import MAX_ORDER, NgramModel, Ngrams, fit, read_ngrams, write_ngrams
from onesweep.stages.errors import CheckpointError, InputError
from tests.serving.pretrained import write_model

Run = Callable[..., tuple[int, str, str]]
SYMBOLS = 5
texts = st.lists(st.integers(0, SYMBOLS - 1), min_size=6, max_size=60)


def fitted(text: Sequence[int], order: int = 3, vocabulary: int = SYMBOLS) -> Ngrams:
    return fit(np.array(text, dtype=np.uint32), vocabulary, order)


def reckoned(text: Sequence[int], order: int, ending: Sequence[int]) -> list[float]:
    """Interpolated Kneser-Ney by its formula, with dictionaries."""
    grams = {n: [tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for n in range(1, order + 2)}
    p = [1 / SYMBOLS] * SYMBOLS
    for n in range(1, order + 1):
        counts = Counter(grams[n])
        if n < order:
            seen_after = Counter(gram[1:] for gram in set(grams[n + 1]))
            counts = Counter({gram: seen_after[gram] for gram in grams[n]})
        once, twice = (sum(count == times for count in counts.values()) for times in (1, 2))
        discount = min(max(once / max(once + 2 * twice, 1), 0.1), 0.95)
        after = defaultdict[tuple[int, ...], dict[int, int]](dict)
        for gram, count in counts.items():
            after[gram[:-1]][gram[-1]] = count
        context = tuple(ending[len(ending) - n + 1 :])
        total = sum(after[context].values()) if len(context) == n - 1 else 0
        if total:
            own = [max(after[context].get(w, 0) - discount, 0) / total for w in range(SYMBOLS)]
            p = [mine + (1 - sum(own)) * below for mine, below in zip(own, p, strict=True)]
    return p


@settings(max_examples=60, deadline=None)
@given(texts, st.lists(st.integers(0, SYMBOLS - 1), max_size=5), st.integers(2, 4))
def test_odds_are_those_of_the_formula(text: list[int], ending: list[int], order: int) -> None:
    odds = NgramModel(fitted(text, order)).probabilities(ending)
    np.testing.assert_allclose(odds, reckoned(text, order, ending), atol=1e-6)
    assert odds.sum() == pytest.approx(1, abs=1e-6)
    assert (odds > 0).all()


def test_entropy_is_that_of_the_odds() -> None:
    model, text = NgramModel(fitted([0, 1, 2, 0, 1, 3, 0, 1, 2, 4] * 3)), [3, 0, 1, 2, 2, 4]
    odds = [model.probabilities(text[:at])[symbol] for at, symbol in enumerate(text)]
    assert model.cross_entropy(text) == pytest.approx(-np.log(odds).mean(), rel=1e-5)


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(InputError, match="order of an n-gram model is 2 to 8, not 9"):
        fitted([0, 1] * 9, MAX_ORDER + 1)
    with pytest.raises(InputError, match="a text of 3 symbols; n-grams are fitted to more than 3"):
        fitted([0, 1, 2])


# The file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ngram.safetensors"
    write_ngrams(path, replace(fitted([0, 1, 2, 0, 1, 3, 0, 1, 2, 4] * 3), tokenizer="abc"))
    return path


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    ngrams = read_ngrams(path, SYMBOLS, "abc")
    assert (ngrams.order, ngrams.vocabulary, ngrams.tokenizer) == (3, SYMBOLS, "abc")
    expected = NgramModel(fitted([0, 1, 2, 0, 1, 3, 0, 1, 2, 4] * 3)).probabilities([0, 1])
    np.testing.assert_array_equal(NgramModel(ngrams).probabilities([0, 1]), expected)


@pytest.mark.parametrize(
    ("vocabulary", "tokenizer", "says"),
    [(6, "abc", "fitted to 5 different symbols, the model has 6"), (SYMBOLS, "abd", "with another tokenizer")],
)
def test_a_file_of_another_model(path: Path, vocabulary: int, tokenizer: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=f"ngram.safetensors cannot be used: .*{says}.*fit it again"):
        read_ngrams(path, vocabulary, tokenizer)


def damaged(path: Path, metadata: dict[str, str], **changes: Any) -> None:
    arrays = load(path.read_bytes())
    whole = {"format": "onesweep-ngram-1", "order": "3", "vocabulary": "5", "tokenizer": "abc"}
    path.write_bytes(
        save(arrays | {name.replace("_", "."): value for name, value in changes.items()}, whole | metadata)
    )


@pytest.mark.parametrize(
    ("metadata", "changes", "says"),
    [
        ({"order": "99"}, {}, "its order is none of 2, 3"),
        ({"order": "2"}, {}, "does not have the arrays of its order"),
        ({"format": "x"}, {}, "no n-gram model of the format"),
        ({}, {"shares_1": np.ones((1, 5), np.float32)}, "shares.1 is not a row"),
        ({}, {"symbols_1": np.zeros(5, np.int64)}, "symbols.1 is not a row of .* U32"),
        ({}, {"begins_2": np.zeros(3, np.uint32)}, "2-grams are damaged: its arrays do not fit"),
        ({}, {"begins_1": np.array([1, 5], np.uint32)}, "its contexts are not in order"),
        ({}, {"symbols_1": np.array([0, 1, 2, 3, 5], np.uint32)}, "not below 5"),
        ({}, {"symbols_1": np.array([0, 1, 1, 3, 4], np.uint32)}, "its symbols are not in order"),
        ({}, {"shares_1": np.full(5, np.nan, np.float32)}, "not between 0 and 1"),
        ({}, {"lefts_1": np.ones(1, np.float32)}, "do not add up to 1"),
    ],
)
def test_a_damaged_file(path: Path, metadata: dict[str, str], changes: dict[str, Any], says: str) -> None:
    damaged(path, metadata, **changes)
    with pytest.raises(CheckpointError, match=says):
        read_ngrams(path, SYMBOLS, "abc")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_with_any_bytes_changed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("ngram") / "ngram.safetensors"
    write_ngrams(path, fitted([0, 1, 2, 0, 1, 3, 0, 1, 2, 4] * 3))
    raw = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(CheckpointError):  # or what it says is used, and nothing breaks
        assert NgramModel(read_ngrams(path, SYMBOLS, "bytes")).probabilities([0, 1]).shape == (SYMBOLS,)


# The command


def test_the_command_fits_tokens_and_bytes(onesweep: Run, bundles: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the old man said that the sea was calm and the boat was old\n" * 20)
    model = tmp_path / "model"
    write_model(model)
    code, out, err = onesweep("ngram", "--checkpoint", model, "--text", text, text)
    assert (code, err) == (0, "")
    assert "n-grams of up to 4 tokens from" in out
    assert "which it was not fitted to" in out
    assert onesweep("ngram", "--checkpoint", model, "--text", text, "--text", text)[1] == out  # neither is forgotten
    own = tmp_path / "own"
    own.mkdir()
    (own / "ar").symlink_to(bundles / "own" / "ar")
    assert (
        "n-grams of up to 3 bytes from 1140" in onesweep("ngram", "--checkpoint", own, "--text", text, "--order", 3)[1]
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [(None, "cannot read .*: No such file"), (b"\xff\xfe" * 40, "is not UTF-8"), (b"short", "5 bytes are too few")],
)
def test_a_text_that_cannot_be_used(onesweep: Run, bundles: Path, tmp_path: Path, raw: bytes | None, says: str) -> None:
    text = tmp_path / "text.txt"
    if raw is not None:
        text.write_bytes(raw)
    code, out, err = onesweep("ngram", "--checkpoint", bundles / "own", "--text", text)
    assert (code, out) == (2, "")
    assert re.search(says, err)
