"""Clients of OpenAI's API run their own examples unchanged, each in a process of its own, in pinned versions."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving.gateway.conftest import run
from tests.serving.gateway.test_tools import TAGGED
from tests.serving.pretrained import ARCHITECTURE, SPECIALS, ids, write_model

HERE = Path(__file__).parent
INSTALL_S, RUN_S = 900, 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the clients."""
    directory = tmp_path_factory.mktemp("clients")
    made = directory / "bin" / "python"
    install = [made, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"]
    try:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, capture_output=True)
        subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("the clients cannot be installed here: no package index has them")
    return made


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[str]:
    """A gateway before a small random model whose template takes tools."""
    directory = tmp_path_factory.mktemp("model")
    ends = ids(SPECIALS[1])
    write_model(directory, ends=ends, template=TAGGED, architecture=replace(ARCHITECTURE, positions=4096))
    with (
        local_ring(directory, 2) as client,
        run(tmp_path_factory.mktemp("http"), "--router", client.address) as gateway,
    ):
        yield f"{gateway.url}/v1"


@pytest.mark.parametrize("example", sorted(path.stem for path in (HERE / "examples").glob("*.py")))
def test_a_client_runs_its_examples(python: Path, url: str, example: str) -> None:
    # isolated: nothing of this folder is taken for the client
    command = [python, "-I", HERE / "examples" / f"{example}.py", url]
    environment = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
