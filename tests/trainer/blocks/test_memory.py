from dataclasses import replace

import pytest
import torch
from torch import nn

from onesweep.stages.model.block import Block, Codes
from onesweep.trainer.blocks.memory import MemoryUse, _blocks, _Chain, measure, measure_training, saved_for_backward
from tests.trainer.small import corpus, tiny


def test_the_total_is_the_sum() -> None:
    use = MemoryUse(1, 2, 3, 4)
    assert use.total == 10
    assert use.to_record() == {"parameters": 1, "gradients": 2, "optimizer": 3, "activations": 4, "total": 10}


def test_what_the_graph_keeps_is_counted_once_and_without_parameters() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8)
    with saved_for_backward({weight.untyped_storage().data_ptr()}) as saved:
        y = (x @ weight).sin()  # keeps x and the product; the weight is a parameter
        z = y * y[:, :1]  # keeps y, once for both of its uses
        z.sum().backward()
    assert sum(saved.values()) == 3 * 4 * 8 * 4


def test_parameters_gradients_and_state_are_those_of_real_tensors() -> None:
    block = Block(tiny.architecture, 0, Codes(0, 8))
    size = sum(parameter.numel() * 4 for parameter in block.parameters())
    matrices = sum(
        p.numel() * 4
        for name, p in block.named_parameters()
        if "layers." in name and "modulation" not in name and p.dim() == 2
    )
    text = torch.zeros(1, 8, dtype=torch.long)

    def loss() -> torch.Tensor:
        features, memory = block.read(text)
        z = torch.zeros(1, 8, 8)
        return block.next_byte(features).sum() + block.denoise(z, z, torch.ones(1, 1), memory, 0).sum()

    use = measure(block, tiny, loss)
    assert (use.parameters, use.gradients) == (size, size)
    others = sum(1 for p in block.parameters()) - 8
    assert use.optimizer == matrices + 2 * (size - matrices) + 4 * others, "Muon one moment; AdamW two and a step count"
    assert use.activations > 0


@pytest.mark.parametrize("context", ["own", "chained"])
@pytest.mark.parametrize("parts", [2, 4])
def test_one_block_holds_its_share_of_training_end_to_end(context: str, parts: int) -> None:
    architecture = replace(tiny.architecture, parts=parts, width=64, context_length=64, context=context)
    uses = measure_training(replace(tiny, architecture=architecture, sequences=2), corpus)
    share = uses["block"].total / uses["end to end"].total
    assert share <= (1.15 / parts if context == "own" else 1 / parts + 0.15)
    assert uses["block"].gradients == pytest.approx(uses["end to end"].gradients / parts, rel=0.15)
    assert uses["block"].activations == pytest.approx(uses["end to end"].activations / parts, rel=0.15)
    assert uses["ar"].total < uses["end to end"].total
    if context == "chained":
        assert uses["block"].parameters == uses["end to end"].parameters, "the blocks before it run forward"


def test_end_to_end_gradients_go_through_the_whole_chain() -> None:
    """The first block learns from the last one's loss: that is what block-local training does without."""
    config = replace(tiny, architecture=replace(tiny.architecture, context="chained"))
    blocks = _blocks(config)
    for parameter in (p for block in blocks for p in block.parameters()):
        parameter.data += 0.2 * torch.randn_like(parameter)
    chain = _Chain(blocks, config, corpus, corpus.batch(0, 0, 2, 33))

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        nn.ModuleList(blocks).zero_grad()
        loss.backward()
        grad = blocks[0].state_in.weight.grad
        return torch.zeros(1) if grad is None else grad.clone()

    assert float(gradient(chain.last_loss()).norm()) == 0
    whole = gradient(chain.loss())
    chain.blocks, chain.corruptions = blocks[:1], chain.corruptions[:1]
    assert not torch.allclose(whole, gradient(chain.loss()))
