"""Models of tokens that are trained here: their text, bits a byte and checkpoints, and hosts that serve them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.checkpoint.checkpoint import halve, load_ar, load_chain
from stages.checkpoint.manifest import TOKENIZER_NAME, read_manifest
from stages.errors import CheckpointError, DataError
from tests.trainer.small import TEXT, corpus, tiny
from trainer.blocks.data import Corpus, TextTokenizer, load_corpus, token_bytes, train_tokenizer
from trainer.blocks.evaluate import Scorer
from trainer.blocks.train import train_ar, train_blocks, train_scorer

TOKENS = 290
THREE = replace(tiny, architecture=replace(tiny.architecture, parts=3, layers=1))


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(corpus.train, TOKENS)


@pytest.fixture(scope="module")
def spelled(tokenizer: TextTokenizer) -> Corpus:
    return corpus.in_tokens(tokenizer, cut=True)


@pytest.fixture(scope="module")
def bundle(spelled: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models of a bundle, of tokens."""
    directory: Path = tmp_path_factory.mktemp("tokens")
    train_blocks(THREE, spelled, directory / "chain")
    train_scorer(THREE, spelled, directory / "scorer")
    train_ar(THREE, spelled, directory / "ar", 3)
    train_ar(THREE, spelled, directory / "local", 1)
    return directory


@given(text=st.text(min_size=1, max_size=200), cut=st.booleans())
def test_tokens_encode_every_byte(tokenizer: TextTokenizer, text: str, cut: bool) -> None:
    tokens = tokenizer.encode(torch.tensor(list(text.encode()), dtype=torch.uint8), cut)
    assert tokenizer.encoding.decode(tokens.tolist()) == text
    assert int(token_bytes(tokenizer)[tokens.long()].sum()) == len(text.encode())


def test_training_text_is_tokenized_in_the_same_pieces_every_time(tokenizer: TextTokenizer, spelled: Corpus) -> None:
    whole = tokenizer.encode(corpus.train)
    assert torch.equal(spelled.train, tokenizer.encode(corpus.train, cut=True))
    assert len(whole) < len(spelled.train) < 1.1 * len(whole)
    assert torch.equal(spelled.valid, tokenizer.encode(corpus.valid))


def test_bits_per_byte_of_a_uniform_model(spelled: Corpus) -> None:
    text = spelled.valid[:50]
    bits = spelled.bits(math.log(TOKENS), text)
    assert bits == pytest.approx(math.log2(TOKENS) * 50 / spelled.bytes_in(text))
    assert corpus.bits(math.log(256), corpus.valid[:50]) == pytest.approx(8)


EMPTY = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}', '{"model": null}', EMPTY])
def test_an_invalid_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"cannot read|is not a tokenizer\.json"):
        TextTokenizer.read(path)


def test_a_checkpoint_names_its_tokenizer(bundle: Path, tokenizer: TextTokenizer) -> None:
    for name in ("chain", "scorer", "ar", "local"):
        manifest = read_manifest(bundle / name)
        assert manifest.tokenizer == "tokens"
        assert manifest.architecture.vocabulary == TOKENS
        assert manifest.files == {TOKENIZER_NAME: tokenizer.digest}
        assert manifest.data["train_bytes"] == len(corpus.train)
        assert (bundle / name / TOKENIZER_NAME).read_text() == tokenizer.json
    assert load_ar(bundle / "ar").stages[-1].next_byte(torch.zeros(1, 1, 16)).shape == (1, 1, TOKENS)
    assert load_chain(bundle / "chain")[0].codes.shape == (TOKENS, 8)


def test_another_tokenizer_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ar"
    halve(bundle / "ar", copy)
    (copy / TOKENIZER_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="does not match its manifest's SHA-256"):
        Scorer(corpus, windows=2, min_context=8).score(copy)


def test_scores_are_bits_per_byte(bundle: Path, tokenizer: TextTokenizer) -> None:
    result = Scorer(corpus, windows=4, min_context=8).score(bundle / "ar")
    (score,) = result.scores
    assert result.trained_on_this_text
    spelled, model = corpus.in_tokens(tokenizer), load_ar(bundle / "ar")
    text = spelled.valid_batch(4, 33)
    with torch.inference_mode():
        nats = model(text[:, :-1])[:, 7:].log_softmax(-1).gather(-1, text[:, 8:, None]).sum()
    assert score.bytes == spelled.bytes_in(text[:, 8:])
    assert score.bits_per_byte == pytest.approx(-float(nats) / math.log(2) / score.bytes, rel=1e-5)


@pytest.mark.parametrize("name", ["chain", "scorer"])
def test_a_16_bit_copy_is_smaller_and_nearly_as_good(bundle: Path, tmp_path: Path, name: str) -> None:
    manifest = halve(bundle / name, tmp_path / name)
    before, after = (
        sum(part.bytes for part in each.parts if part) for each in (read_manifest(bundle / name), manifest)
    )
    assert after < 0.7 * before  # the header and the probe stay as they are
    score = Scorer(corpus, windows=2, min_context=8)
    pairs = zip(score.score(bundle / name).scores, score.score(tmp_path / name).scores, strict=True)
    assert all(whole.bits_per_byte == pytest.approx(half.bits_per_byte, abs=0.01) for whole, half in pairs)


@pytest.mark.parametrize("mode", ["sweep", "resample"])
def test_a_token_model_writes_within_a_byte_limit(served: Any, mode: str) -> None:
    result = served.generate("the ship sailed", mode=mode, max_bytes=20, seed=3)
    assert result.output_tokens >= 8 * result.sweeps - 7
    assert result.sweeps == 1 if mode == "sweep" else result.output_bytes >= 17


@pytest.fixture(scope="module")
def served(bundle: Path, local_ring: Callable[..., Any]) -> Any:
    with local_ring(bundle, 2) as client:
        yield client


def test_text_and_tokenizer_are_read_from_files(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    found = load_corpus(tmp_path / "words.txt", tmp_path / "tokenizer.json")
    assert found.noun == "tokens"
    assert found.vocabulary == TOKENS
    assert torch.equal(found.train, corpus.in_tokens(tokenizer, cut=True).train)
