"""One small model that knows the probe text, for every test of imports."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from stages.checkpoint.manifest import Manifest
from stages.importing.importing import ImportSettings, import_model
from tests.stages.importing.published import fitted


@pytest.fixture(scope="session")
def weights() -> dict[str, Tensor]:
    return fitted()


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., Manifest]:
    """Import a source in `blocks` stages into tmp_path / "out"."""

    def run(source: Path, blocks: int = 2, **settings: object) -> Manifest:
        return import_model(ImportSettings(source, tmp_path / "out", blocks, **settings))

    return run
