"""Large matrices, laid out anew."""

from __future__ import annotations

import pytest
import torch

from stages.backends.packed_llama import Product


@pytest.mark.parametrize("shared", [True, False])
def test_a_large_matrix_is_laid_out_in_blocks(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """To the last bit the same. What others hold of it stays; what nobody holds is given back on the way."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 64), torch.randn(3000, 64), torch.randn(3000)

    def linear(values: torch.Tensor) -> torch.nn.Linear:
        made = torch.nn.Linear(64, 3000).requires_grad_(False)
        made.weight, made.bias = torch.nn.Parameter(values, False), torch.nn.Parameter(bias, False)
        return made

    whole = Product(linear(weight.clone()))(x)
    monkeypatch.setattr("stages.backends.packed_llama.BLOCK_BYTES", 1 << 18)
    given, backs = list[int](), weight.clone()
    monkeypatch.setattr("stages.backends.packed_llama.give_back", lambda block: given.append(len(block)))
    product = Product(linear(backs if shared else weight.clone()))
    assert product(x).equal(whole)
    if Product.is_packed:
        assert [len(each) for each in product.biases if each is not None] == [1024, 1024, 952]
        assert given == ([] if shared else [1024, 1024, 952])
    assert backs.equal(weight)
