"""The pipeline in this process: what the stages say themselves, and texts in the symbols of their model."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from onesweep.loadtest.workload.pipeline import Pipeline
from onesweep.loadtest.workload.texts import continued, symbols_of
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.checkpoint.checkpoint import load_ar
from tests.serving.pretrained import ARCHITECTURE, tokenizer, write_model


@torch.inference_mode()
def test_a_token_model_s_nats_are_those_of_its_stages(tmp_path: Path) -> None:
    stages = write_model(tmp_path)
    before, text = [5, 290, 7], [11, 299, 0, 42]
    x = torch.tensor([[*before, *text]])
    for stage in stages:
        x = stage.read(x)
    logits = stages[-1].next_byte(x)[0, len(before) - 1 : -1]
    pipeline = Pipeline(tmp_path)
    nats = float(F.cross_entropy(logits, torch.tensor(text))) * 4
    assert pipeline.surprise(before, text) == pytest.approx(nats, 1e-4)
    assert pipeline.surprise(before, []) == 0.0


@torch.inference_mode()
def test_read_in_pieces_or_at_once_a_byte_model_says_the_same(bundle: Path) -> None:
    model, text = load_ar(bundle / "ar"), list(b"the sea and the ship")
    expected = model(torch.tensor([text]))[0]
    pipeline = Pipeline(bundle / "ar")
    caches = pipeline.open(len(text))
    pieces = [pipeline.logits(piece, caches) for piece in (text[:12], text[12:13], text[13:])]
    assert torch.cat(pieces) == pytest.approx(expected, abs=1e-4)


def test_what_was_written_is_spelled_with_its_prompt_as_the_model_had_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    spelling, encode = tokenizer_of(tmp_path), tokenizer()
    assert spelling.alphabet.size == ARCHITECTURE.vocabulary
    assert symbols_of(spelling, b"the sea") == encode.encode("the sea").ids
    before, after = continued(spelling, b"the sea", b" and the ship")
    assert before == encode.encode("the sea").ids
    assert before + after == encode.encode("the sea and the ship").ids
    # together they would share a token, which the model did not write
    before, after = continued(spelling, b"the se", b"a and")
    assert (before, after) == (encode.encode("the se").ids, encode.encode("a and").ids)


def test_bytes_spell_themselves(bundle: Path) -> None:
    assert continued(tokenizer_of(bundle / "ar"), b"ab", b"\xff") == ([97, 98], [255])
