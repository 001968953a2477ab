from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from stages.model.block import Block
from tests.trainer.small import make_blocks, tiny
from trainer.blocks.config import MatrixOptimizer
from trainer.blocks.run import FINAL_LEARNING_RATE, OptimizerSet, schedule


def test_schedule_warms_up_and_falls_to_its_floor() -> None:
    config = replace(tiny, steps=100, warmup_steps=10)
    shares = [schedule(step, config) for step in range(100)]
    assert shares[0] == pytest.approx(0.1, rel=0.01)
    assert all(low < high for low, high in pairwise(shares[:10]))
    assert all(high > low for high, low in pairwise(shares[10:]))
    assert max(shares) <= 1
    assert schedule(100, config) == pytest.approx(FINAL_LEARNING_RATE)
    assert schedule(0, replace(tiny, warmup_steps=0)) == 1.0


def test_every_parameter_has_one_optimizer_and_matrices_of_layers_have_muon() -> None:
    block = make_blocks()[0]
    muon, adamw = OptimizerSet(block, tiny).optimizers
    groups = [{id(p) for group in o.param_groups for p in group["params"]} for o in (muon, adamw)]
    assert not groups[0] & groups[1]
    names = {name for name, p in block.named_parameters() if id(p) in groups[0]}
    assert {name.split(".")[2] for name in names} == {"qkv", "attention_out", "mlp_in", "mlp_out"}
    assert groups[0] | groups[1] == {id(p) for p in block.parameters()}


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_state_is_restored_from_plain_tensors_bit_for_bit(name: MatrixOptimizer) -> None:
    one, config = make_blocks()[0], replace(tiny, matrix_optimizer=name)
    optimizers = OptimizerSet(one, config)

    def step(block: Block, optimizers: OptimizerSet, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in block.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers.step(number)

    for number in range(3):
        step(one, optimizers, number)
    other = make_blocks()[0]
    other.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    restored = OptimizerSet(other, config)
    tensors = {name: tensor.clone() for name, tensor in optimizers.tensors().items()}
    restored.restore(tensors)
    for number in range(3, 6):
        step(one, optimizers, number)
        step(other, restored, number)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert optimizers.tensors().keys() == tensors.keys()


def test_a_step_frees_the_gradients() -> None:
    block = make_blocks()[0]
    optimizers = OptimizerSet(block, tiny)
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizers.step(0) == schedule(0, tiny)
    assert all(parameter.grad is None for parameter in block.parameters())
