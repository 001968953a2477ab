"""Graphs of AR models. Parity: test_llama.py."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from stages.backends import Backend, onnx
from stages.backends.base import CleanPiece
from stages.backends.onnx import OnnxSession
from stages.backends.onnx_graphs import Graph, product_graph
from stages.model.architecture import GROUP, Architecture
from stages.model.few_bits import Int8Linear, QuantLinear
from stages.model.pipeline import ArModel
from tests.stages.backends.conftest import clean_piece


@pytest.mark.parametrize("width", [32, 36])
def test_draft_tokens_give_the_results_of_single_steps(width: int) -> None:
    torch.manual_seed(width)
    for stage in ArModel(Architecture(2, 1, width, 2, context_length=96)).eval().requires_grad_(False).stages:
        runner = Backend().stage(stage)
        together, alone, company = (clean_piece(stage, 5, 9), clean_piece(stage, 5, 9), clean_piece(stage, 1, 20))
        hidden, _ = runner.read([replace(together, one_by_one=5), company])
        one_by_one = [runner.read([CleanPiece(x, alone.caches)])[0] for x in alone.source.split(1)]
        assert torch.equal(hidden, torch.cat(one_by_one))


def test_a_large_graph_has_its_own_threads_and_torch_has_one() -> None:
    model = ArModel(Architecture(1, 1, 512, 2, context_length=96)).eval().requires_grad_(False)
    piece = clean_piece(model.stages[0], 90, 0)
    runners = [Backend(threads=count).stage(copy.deepcopy(model.stages[0])) for count in (1, 3)]
    threads = [x.reader.others[0].session.get_session_options().intra_op_num_threads for x in runners]
    assert (threads, [x.threads for x in runners]) == ([1, 3], [1, 1])
    (one,), (many,) = (runner.read([copy.deepcopy(piece)]) for runner in runners)
    assert torch.allclose(one, many, rtol=1e-4, atol=1e-4)


def added(width: int) -> Graph:
    """A graph whose kernel has no layout of its own, and reads the matrix each time."""
    graph = Graph()
    graph.output(graph.op("Add", graph.input("x", 1, "rows", width), graph.matrix(torch.randn(1, width))), "out")
    return graph


@pytest.mark.parametrize("kind", [QuantLinear, Int8Linear, nn.Linear, None])
def test_a_session_keeps_no_reference_to_its_source_matrices(kind: type[nn.Linear] | None) -> None:
    """For any number of rows, which may have another kernel: the memory is freed, and others write to it."""
    torch.manual_seed(0)
    linear, x = kind and kind(96, 200, bias=False), torch.randn(1, 40, 96)
    for tensor in linear.state_dict().values() if linear else ():
        tensor.random_(1, 100)
    session = OnnxSession(graph := product_graph(linear) if linear else added(96))
    before = [session(x[:, :rows])[0] for rows in range(1, 41)]
    for matrix in graph.matrices.values():
        matrix.fill_(1)
    assert all(torch.equal(session(x[:, : y.shape[1]])[0], y) for y in before)


def test_memory_of_unused_weights_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's kernels that read them keep them: results are the same either way."""
    given, x = list[int](), torch.randn(1, 3, 512)
    linear = Int8Linear(512, 64, bias=False)
    linear.codes.random_(-100, 100)
    linear.scales.uniform_(0.5, 1)
    expected = linear(x)
    monkeypatch.setattr(onnx, "give_back", lambda numbers: given.append(len(numbers)))
    for is_read, taken in ((True, []), (False, [64, 64 * 512 // GROUP])):
        monkeypatch.setattr(onnx, "reads_few_bits", lambda is_read=is_read: is_read)
        assert torch.allclose(OnnxSession(product_graph(linear))(x)[0], expected, rtol=0.02, atol=50)
        assert given == taken


def test_a_large_8_bit_matrix_is_split_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = Int8Linear(64, 3000, bias=True), torch.randn(9, 64)
    linear.codes.random_(-100, 100)
    linear.scales.uniform_(0.5, 1)
    linear.bias.data.copy_(torch.arange(3000))
    whole = onnx.OnnxProduct(copy.deepcopy(linear))(x)
    monkeypatch.setattr(onnx, "BLOCK_BYTES", 1 << 16)
    product = onnx.OnnxProduct(linear)
    assert len(product.sessions) == 3
    assert product(x).equal(whole)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_large_matrix_is_split_into_blocks(monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """The result is the same to the last bit. Memory that others hold stays; the rest is released on the way."""
    torch.manual_seed(0)
    x, weight, given = torch.randn(9, 64), torch.randn(3000, 64), list[int]()

    def linear() -> nn.Linear:
        made = nn.Linear(64, 3000).requires_grad_(False)
        made.bias.copy_(torch.arange(3000) / 1000)
        made.weight = nn.Parameter(weight if is_shared else weight.clone(), requires_grad=False)
        return made

    whole, before = onnx.OnnxProduct(linear())(x), weight.clone()
    monkeypatch.setattr(onnx, "BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr(onnx, "give_back", lambda block: given.append(len(block)))
    assert onnx.OnnxProduct(linear())(x).equal(whole)
    assert given == ([] if is_shared else [1024, 1024, 952])
    assert weight.equal(before)
