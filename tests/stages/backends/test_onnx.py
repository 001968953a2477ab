"""The onnxruntime backend: the same numbers and texts as torch's, or a sentence that says what is wrong."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch

from stages.backends import TorchBackend, backend_named
from stages.backends.base import Backend, CleanPiece
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from stages.model.pipeline import ArModel
from tests.stages.backends.conftest import clean_piece, noisy_piece
from tests.stages.conftest import make_ar, make_block


@pytest.fixture
def backend() -> Backend:
    return backend_named("onnxruntime")


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3)


# Parity
@pytest.mark.parametrize("index", [0, 1])
def test_blocks_compute_what_torch_computes(backend, index) -> None:
    block = make_block(index)
    runner, reference = backend.block(block), TorchBackend().block(block)
    for new, past in ((1, 0), (1, 9), (7, 0), (7, 9)):
        piece = clean_piece(block, new, past)
        expected = copy.deepcopy(piece)
        assert near(runner.read([piece])[0], reference.read([expected])[0])
        for one, other in zip(piece.caches, expected.caches, strict=True):
            assert one.length == other.length
            assert near(one.stored()[0], other.stored()[0])
            assert near(one.stored()[1], other.stored()[1])
    pieces = [noisy_piece(block, 5, 0.5, start=4), noisy_piece(block, 9, 3.0, temperature=0.6)]
    for one, other in zip(runner.denoise(pieces), reference.denoise(pieces), strict=True):
        assert near(one.logits, other.logits)
        assert near(one.point, other.point)


def test_company_changes_nothing(backend) -> None:
    block = make_block(1)
    runner = backend.block(block)
    pieces = [noisy_piece(block, slots, sigma, start=3) for slots, sigma in ((1, 0.4), (8, 2.0), (17, 0.4))]
    for piece, together in zip(pieces, runner.denoise(pieces), strict=True):
        assert torch.equal(runner.denoise([piece])[0].logits, together.logits)


@pytest.mark.parametrize("width", [32, 36])
def test_guesses_are_read_as_if_they_came_byte_by_byte(backend, width: int) -> None:
    torch.manual_seed(width)
    for stage in ArModel(Architecture(2, 1, width, 2, context_length=96)).eval().requires_grad_(False).stages:
        runner = backend.stage(stage)
        together, alone, company = (clean_piece(stage, 5, 9), clean_piece(stage, 5, 9), clean_piece(stage, 1, 20))
        hidden, _ = runner.read([replace(together, one_by_one=5), company])
        one_by_one = [runner.read([CleanPiece(x, alone.caches)])[0] for x in alone.source.split(1)]
        assert torch.equal(hidden, torch.cat(one_by_one))


# What can go wrong
def test_an_export_that_does_not_match_is_refused(backend, monkeypatch) -> None:
    graph = importlib.import_module("stages.backends.onnx_graphs")
    monkeypatch.setattr(graph.Graph, "norm", lambda self, x, norm, weight=None: x)
    for make in (lambda: backend.block(make_block()), lambda: backend.stage(make_ar().stages[1])):
        with pytest.raises(CheckpointError, match="an ONNX export that does not match") as caught:
            make()
        assert "torch backend" in str(caught.value)
