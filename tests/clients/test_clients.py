"""Clients of OpenAI's API run their own examples unchanged, each in a process of its own, in pinned versions."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.cli.__main__ import main
from tests.serving.gateway.conftest import run
from tests.serving.gateway.test_tools import TAGGED
from tests.serving.pretrained import ARCHITECTURE, SPECIALS, tokenizer

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parent / "examples"
INSTALL_S, RUN_S = 900, 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + RUN_S)]


def installed(*commands: list[object]) -> None:
    """Run what installs clients; skips the test where no index has them."""
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the clients cannot be installed here: no package index has them: {error.stderr}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """An interpreter that has the clients, and torch and transformers of this one."""
    directory = tmp_path_factory.mktemp("clients")
    made = directory / "bin" / "python"
    installed([sys.executable, "-m", "venv", directory])
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    installed([made, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"])
    return [made, "-I"]  # isolated: nothing of this folder is taken for the client


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where node finds the clients."""
    if shutil.which("npm") is None:
        pytest.skip("there is no node with npm on this machine")
    directory = tmp_path_factory.mktemp("node")
    shutil.copy(HERE / "package.json", directory)
    installed(
        ["npm", "install", "--prefix", directory, "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1"]
    )
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model as Hugging Face has it, whose template takes tools."""
    made = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'onesweep[quality]'")
    directory, a = tmp_path_factory.mktemp("source"), ARCHITECTURE
    torch.manual_seed(0)
    config = made.LlamaConfig(
        vocab_size=a.vocabulary,
        hidden_size=a.width,
        intermediate_size=a.mlp_width,
        num_hidden_layers=3,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    made.LlamaForCausalLM(config).save_pretrained(directory)
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "chat_template": TAGGED}
    made.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **names).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def url(source: Path, tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[str]:
    """A gateway before that model."""
    directory = tmp_path_factory.mktemp("served")
    assert main(["import", str(source), "--out", str(directory / "model"), "--blocks", "3", "--untrained"]) == 0
    with local_ring(directory / "model", 2) as client, run(directory, "--router", client.address) as gateway:
        yield f"{gateway.url}/v1"


def check(command: list[object], home: Path, url: str, source: Path) -> None:
    """Run an example, with nothing of this machine's settings."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "OPENAI_API_KEY": "none"}
    # nothing is asked of a hub, and nothing but the clients themselves is loaded
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_LOAD_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    arguments = [*command, url, source]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=RUN_S, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_in_python_runs(python: list[object], url: str, source: Path, tmp_path: Path, example: str) -> None:
    check([*python, EXAMPLES / example], tmp_path, url, source)


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.mjs")))
def test_an_example_in_node_runs(node: Path, url: str, source: Path, tmp_path: Path, example: str) -> None:
    shutil.copy(EXAMPLES / example, node)  # a module is looked for beside the file that wants it
    check(["node", node / example], tmp_path, url, source)
