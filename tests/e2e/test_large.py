"""A model whose embedding alone is larger than a stage: imported within a stage's memory, and served by three hosts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.modes.pretrained_tokenizer import tokenizer_of
from serving.router.topology import local_topology
from stages.backends.whole_model import WholeModel
from stages.checkpoint.manifest import read_manifest
from stages.importing.gate import one_thread_each
from tests.stages.importing.large import SHAPES, write_large

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'onesweep[pretrained]'")
WIDE = replace(SHAPES["1.1B"], layers=(3,), vocabulary=100_000)
PROMPT, COUNT = b"The letter left the coast", 6
IMPORT = """
import sys
from serving.cli.__main__ import main

assert main(sys.argv[1:]) == 0
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_an_import_takes_a_stage_and_hosts_write_what_the_model_writes_in_one_process(tmp_path: Path) -> None:
    source, out = write_large(tmp_path / "model.gguf", WIDE), tmp_path / "model"
    options = ["--blocks", "3", "--weights", "q4", "--untrained", "--drafter", "none"]
    command = [sys.executable, "-c", IMPORT, "import", source, "--out", out, *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    largest = max(part.bytes for part in read_manifest(out).parts if part)
    assert 1024 * int(said.splitlines()[-1]) < largest + 1e9
    model, tokenizer = WholeModel(out), tokenizer_of(out)
    text, reader = tokenizer.encode_text(PROMPT), model.open(64)
    prompt = text
    with one_thread_each():  # as hosts have one
        for _ in range(COUNT):
            text += model.vocabulary.encode([int(reader.logits_after(text).argmax())])
    expected = [tokenizer.token_text(token) for token in model.vocabulary.tokens(text[len(prompt) :])]
    topology = local_topology(3, 3, out, free_port_block(4) + 1)
    with temporary_deployment(topology, out), Client(topology.router) as client:
        found = client.generate(PROMPT, mode="ar", temperature=0.0, max_tokens=COUNT)
    assert found.output == b"".join(expected)
