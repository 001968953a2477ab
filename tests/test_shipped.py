"""The weights that ship: they load, they are small, and the chain uses its context."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loadtest.workload.texts import tokens_of
from serving.modes.pretrained_tokenizer import tokenizer_of
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_ar, load_chain
from stages.checkpoint.inspect import verify
from stages.checkpoint.manifest import read_manifest
from trainer.blocks.data import load_corpus
from trainer.blocks.losses import chain_diagnostics

UNSEEN = (
    "When the rain had stopped, they walked down to the river, and the younger of the two sisters told a story that "
    "she had heard from her mother. It was about a house with many doors, and about a man who would not open them. "
    "Nobody knew how it ended, but everybody in the village had an opinion about it."
)

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"


def test_every_part_passes_its_probe() -> None:
    checks = verify(WEIGHTS)
    assert len(checks) >= 7
    assert [str(check) for check in checks if not check.ok] == []


def test_the_weights_are_small() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*.safetensors")) < 39 << 20


def test_the_chain_uses_the_order_of_its_context() -> None:
    """Mixed up, text that the weights were not trained on is half a nat worse: the documentation that ships with
    Python."""
    directory = find_bundle(WEIGHTS).chain
    partition = read_manifest(directory).partition
    corpus = load_corpus(None)
    tokens = torch.tensor(tokens_of(tokenizer_of(directory), corpus.valid.numpy().tobytes()))
    text = replace(corpus, valid=tokens).valid_batch(2, 257)
    mixed = text[:, torch.randperm(text.shape[1], generator=torch.Generator().manual_seed(0))]
    ordered, other = (chain_diagnostics(load_chain(directory), partition, each, steps=2) for each in (text, mixed))
    assert other["from_noise_sigma1_nats"] > ordered["from_noise_sigma1_nats"] + 0.5


def bits_of_unseen(name: str) -> float:
    """Bits a byte."""
    text = tokens_of(tokenizer_of(WEIGHTS / name), UNSEEN.encode())
    with torch.inference_mode():
        (logits,) = load_ar(WEIGHTS / name)(torch.tensor([text[:-1]]))
    nats = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(text[1:]), reduction="sum")
    return float(nats) / math.log(2) / len(UNSEEN)


@pytest.mark.parametrize("name", ["ar", "scorer", "local"])
def test_the_ar_models_predict_english_text(name: str) -> None:
    """Frequencies of bytes alone give over 4 bits a byte on such text."""
    assert bits_of_unseen(name) < 3


@pytest.mark.parametrize(("scorer", "margin"), [("ar", 0.02), ("scorer", 0.0)])
def test_scorers_predict_text_better_than_the_drafter(scorer: str, margin: float) -> None:
    """Else a trip to the hosts is worth nothing. The drafter learned the probabilities of `scorer`, so that is near."""
    assert bits_of_unseen(scorer) < bits_of_unseen("local") - margin
