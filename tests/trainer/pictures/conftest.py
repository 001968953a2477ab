from pathlib import Path

import pytest

from tests.trainer.pictures.test_data import write_npz
from trainer.pictures.data import PictureSet, load_pictures


@pytest.fixture
def pictures(tmp_path: Path) -> PictureSet:
    return load_pictures(write_npz(tmp_path / "pictures.npz"))
