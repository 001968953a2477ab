"""A ring that draws, asked for as much as a message holds."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.router.topology import local_topology
from tests.conftest import Run
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

pytestmark = pytest.mark.slow


def test_an_answer_may_fill_a_message(tmp_path: Path, onesweep: Run) -> None:
    """As many pictures as a hop may have: nearly the 4 MiB of a message to a client."""
    large = replace(TINY, height=128, width=128, channels=3, patch=16)
    bundle = tiny_picture_bundle(tmp_path / "large", ("chain",), large)
    out, count = tmp_path / "sheet.png", 83
    with temporary_deployment(local_topology(3, 3, bundle, free_port_block(4) + 1), bundle) as deployment:
        asked = ("--pictures", count, "--guidance", 1, "--levels", 3, "--router", deployment.topology.router)
        code, printed, err = onesweep("draw", "two", *asked, "--previews", "--out", out)
    assert code == 0, err
    assert printed == f"{out}: {count} pictures\n"
    with Image.open(out) as sheet:
        # a row for each preview that came in time
        assert sheet.size in [(129 * count - 1, 129 * rows - 1) for rows in (1, 2, 3)]
    code, _, err = onesweep("run", bundle)
    assert code != 0
    assert "draws pictures: `onesweep up --checkpoint" in err
