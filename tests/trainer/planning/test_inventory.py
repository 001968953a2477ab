"""What is counted without being made is what real parts, optimizers and copies have."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from stages.errors import ConfigError
from stages.model.architecture import Architecture
from tests.trainer.small import corpus, tiny
from trainer.blocks.config import TrainingConfig
from trainer.planning.cost import fit_width, numbers_of, take_inventory
from trainer.rounds.codecs import shapes, trainable
from trainer.rounds.parts import Learner, StagePart
from trainer.rounds.spec import RunSpec


def state_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


MODELS = ["chain", "scorer", "ar"]


def model(name: str) -> TrainingConfig:
    architecture = replace(tiny.architecture, parts=3, layers=1)
    return replace(tiny, architecture=architecture, rounds=replace(tiny.rounds, model=name, context_by="copies"))


@pytest.mark.parametrize("name", MODELS)
def test_the_inventory_is_that_of_real_workers(name: str) -> None:
    config = model(name)
    frame = RunSpec.of(config, corpus)
    for index, part in enumerate(take_inventory(config)):
        task = frame.task(index, corpus, 0)
        assert part.name == frame.parts[index]
        assert part.shapes == shapes(trainable(task.module))
        assert tuple(part.copied) == tuple(task.copies)
        modules = sum(state_bytes(module.parameters()) for module in task.copies.values())
        fetched = sum(state_bytes(trainable(frame.module(frame.parts.index(other))).values()) for other in task.copies)
        assert part.copied_bytes == modules + fetched
        assert isinstance(task, StagePart) or part.copied_bytes == 2 * fetched


def test_what_a_step_leaves_is_what_was_counted() -> None:
    config = model("chain")
    part = take_inventory(config)[1]
    learner = Learner(RunSpec.of(config, corpus).task(1, corpus, 0), replace(config, steps=1))
    learner.train(0, 1)
    assert part.weight_bytes == state_bytes(learner.weights().values())
    steps = [tensor for name, tensor in learner.optimizers.tensors().items() if name.endswith(".step")]
    assert part.optimizer_bytes == state_bytes(learner.optimizers.tensors().values()) - state_bytes(steps)


@pytest.mark.parametrize(
    ("name", "passes"),
    [("chain", [3, 3, 3]), ("scorer", [3 + 4, 1 + 3 + 2, 2 + 3]), ("ar", [9])],
)
def test_passes_are_counted_by_hand(name: str, passes: list[int]) -> None:
    """One for what is read, two for what a gradient goes through, three for what is trained; parts have one layer."""
    assert [part.passes for part in take_inventory(model(name))] == passes


@pytest.mark.parametrize("params", [3e5, 2.5e6, 1.3e9])
def test_the_width_is_the_nearest_that_there_is(params: float) -> None:
    config = fit_width(TrainingConfig(architecture=Architecture(parts=3, layers=2, width=64, heads=2)), params)
    width = config.architecture.width
    assert width % 32 == 0

    def miss(heads: int) -> float:
        other = replace(config.architecture, width=32 * heads, heads=heads)
        return abs(numbers_of(take_inventory(replace(config, architecture=other))) - params)

    heads = width // 32
    assert miss(heads) <= min(miss(heads + 1), miss(max(heads - 1, 1)))


@pytest.mark.parametrize(("params", "words"), [(1000.0, "are too few for 3 blocks"), (1e15, "are too many for layers")])
def test_what_no_width_gives_is_told(params: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fit_width(TrainingConfig(), params)
