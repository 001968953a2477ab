"""Rings that draw, through trouble and change: hosts that die with a picture in hand, new weights, large answers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture_bundle(tmp_path_factory.mktemp("rings"), ("chain", "steps"))


def test_the_command_starts_hosts_of_its_own_and_an_answer_may_be_large(tmp_path: Path, onesweep: Run) -> None:
    """As many pictures as a hop may have: nearly the 4 MiB of a message to a client."""
    large = replace(TINY, height=128, width=128, channels=3, patch=16)
    bundle = tiny_picture_bundle(tmp_path / "large", ("chain",), large)
    out, count = tmp_path / "sheet.png", 83
    few = ("--pictures", count, "--guidance", 1, "--levels", 3)
    code, said, err = onesweep("draw", "two", "--checkpoint", bundle, *few, "--previews", "--out", out)
    assert code == 0, err
    assert said == f"{out}: {count} pictures\n"
    with Image.open(out) as sheet:
        # a row for each preview that came in time
        assert sheet.size in [(129 * count - 1, 129 * rows - 1) for rows in (1, 2, 3)]
    code, _, err = onesweep("run", bundle)
    assert code != 0
    assert "draws pictures: `onesweep draw CLASS --checkpoint" in err
    shutil.rmtree(bundle / "chain")
    code, _, err = onesweep("draw", "two", "--checkpoint", bundle, "--out", tmp_path / "none.png")
    assert code != 0
    assert "is no bundle of pictures: give a directory with chain/ or steps/" in err
