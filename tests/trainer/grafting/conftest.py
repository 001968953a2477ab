"""Small random models of both families, and grafts of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onesweep.stages.grafting.block import SlotShape
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.partition import NoisePartition, equal_probability
from onesweep.trainer.blocks.checkpoint_dir import create_untrained
from onesweep.trainer.blocks.config import PROFILES, TrainingConfig
from onesweep.trainer.grafting.model import EmbeddingCodes, GraftModel, load_stages, new_model
from onesweep.trainer.grafting.training import Graft, open_graft
from tests.stages.model.tiny_llama import TINY, random_stages, write_tiny
from tests.trainer.small import corpus

SHAPE = SlotShape(code_dim=8, condition_dim=8, rank=2)


@pytest.fixture(scope="session")
def graft_config() -> TrainingConfig:
    small = Architecture(context_length=12, code_dim=SHAPE.code_dim, condition_dim=SHAPE.condition_dim)
    return replace(
        PROFILES["graft"],
        architecture=small,
        steps=4,
        valid_windows=2,
        warmup_steps=1,
        chunks=(1, 4),
        bfloat16=False,
        log_every=1,
        save_every_s=0.0,
    )


@pytest.fixture
def ranges() -> NoisePartition:
    return equal_probability(3, 0.15, 3.0)


@pytest.fixture(params=["tokens", "bytes"])
def model(request: pytest.FixtureRequest, tmp_path: Path, ranges: NoisePartition) -> GraftModel:
    """Of which nothing is trained."""
    if request.param == "tokens":
        stages = random_stages()
    else:
        create_untrained(tmp_path / "ar", "ar", Architecture(3, 1, 16, 2, 32), 0)
        stages = load_stages(tmp_path / "ar")
    embedding = stages[0].embedding
    assert embedding is not None
    codes = EmbeddingCodes.of_embedding(embedding.weight, SHAPE.code_dim).table()
    width = stages[0].architecture.width
    return new_model(stages, SHAPE, codes, ranges, torch.zeros(3, width, width + 1), 0, bfloat16=False)


@pytest.fixture
def shaken(model: GraftModel) -> GraftModel:
    """The same, where what is added is far from its start, so that nothing is silent by being zero."""
    generator = torch.Generator().manual_seed(7)
    for block in model.blocks:
        for parameter in block.added.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "pretrained", TINY)
    return tmp_path / "pretrained"


@pytest.fixture
def opened(checkpoint: Path, tmp_path: Path, graft_config: TrainingConfig) -> Callable[..., Graft]:
    """A graft of tokens, anew or again."""

    def run(name: str = "graft", rank: int = 2, device: str = "cpu", **changes: object) -> Graft:
        return open_graft(checkpoint, tmp_path / name, rank, replace(graft_config, **changes), corpus, device)

    return run
