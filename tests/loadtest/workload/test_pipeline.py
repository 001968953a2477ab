"""The pipeline in this process: what the stages say themselves, and texts in the tokens of their model."""

from pathlib import Path

import pytest
import torch

from loadtest.workload.pipeline import Pipeline
from stages.checkpoint.checkpoint import load_ar


@torch.inference_mode()
def test_read_in_pieces_or_at_once_a_byte_model_says_the_same(bundle: Path) -> None:
    model, text = load_ar(bundle / "ar"), list(b"the sea and the ship")
    expected = model(torch.tensor([text]))[0]
    pipeline = Pipeline(bundle / "ar")
    caches = pipeline.open(len(text))
    pieces = [pipeline.logits(piece, caches) for piece in (text[:12], text[12:13], text[13:])]
    assert torch.cat(pieces) == pytest.approx(expected, abs=1e-4)
