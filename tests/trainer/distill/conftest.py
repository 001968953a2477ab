"""A small teacher whose tokens are bytes, and the settings of a short distillation of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stages.model.tiny_llama import write_tiny
from trainer.blocks.data import Corpus
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import Teacher, tokens_corpus


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three stages with four layers; never written to."""
    directory = tmp_path_factory.mktemp("pipeline") / "ar"
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def teacher(pipeline: Path) -> Teacher:
    return Teacher(pipeline, "cpu", bfloat16=False)


@pytest.fixture(scope="session")
def tokens(pipeline: Path, text_file: Path) -> Corpus:
    return tokens_corpus([text_file], pipeline, 24)


@pytest.fixture
def short(pipeline: Path, text_file: Path, tmp_path: Path) -> Callable[..., DistillSettings]:
    """Settings of a few steps in float32."""

    def make(**changes: object) -> DistillSettings:
        usual = {"steps": 4, "window": 16, "sequences": 4, "layers": (0, 1), "bfloat16": False}
        given = {"checkpoint": pipeline, "texts": (text_file,), "out": tmp_path / "local"}
        return DistillSettings(**given, **{**usual, **changes})

    return make
