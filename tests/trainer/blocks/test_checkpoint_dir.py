import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.checkpoint.checkpoint import load_chain
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from tests.trainer.small import corpus, tiny
from trainer.blocks.checkpoint_dir import (
    add_metrics,
    create_untrained,
    identity,
    new_ar,
    new_chain,
    open_checkpoint_dir,
)


def test_an_identity_names_settings_and_data_but_not_results() -> None:
    manifest = new_chain(tiny, corpus)
    assert identity(manifest) == identity(replace(manifest, metrics={"chain": {}}))
    assert identity(manifest) == identity(new_chain(replace(tiny, log_every=7, save_every_s=1.0), corpus))
    for other in (replace(tiny, seed=9), replace(tiny, anchor=0.1), replace(tiny, chunks=(1,))):
        assert identity(manifest) != identity(new_chain(other, corpus))
    assert identity(manifest) != identity(new_ar(tiny.architecture, tiny, corpus, "end to end"))


def test_measurements_of_workers_side_by_side_are_all_kept(tmp_path: Path) -> None:
    open_checkpoint_dir(tmp_path, new_chain(tiny, corpus))
    threads = [
        threading.Thread(target=add_metrics, args=(tmp_path, {f"block-{i}": {"nats": float(i)}})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_manifest(tmp_path).metrics == {f"block-{i}": {"nats": float(i)} for i in range(8)}


TINY = Architecture(parts=3, layers=1, width=16, heads=2, context_length=32, code_dim=8, condition_dim=8)

PEAK = """
import sys
from pathlib import Path
import torch
from stages.model.architecture import Architecture
from trainer.blocks.checkpoint_dir import create_untrained

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

torch.set_num_threads(1)
small = Architecture(parts=4, layers=1, width=16, heads=2)
create_untrained(Path(sys.argv[1]) / "warm", sys.argv[2], small)
before = peak()
large = Architecture(parts=4, layers=1, width=1024, heads=8)
manifest = create_untrained(Path(sys.argv[1]) / "large", sys.argv[2], large)
print((peak() - before) / max(part.bytes for part in manifest.parts))
"""


def test_a_chain_is_loaded_and_gated_like_any_other(tmp_path: Path) -> None:
    manifest = create_untrained(tmp_path, "chain", TINY, seed=3)
    assert manifest.complete
    assert manifest.training == {"steps": 0, "seed": 3}
    blocks = load_chain(tmp_path)
    assert [block.index for block in blocks] == [0, 1, 2]
    assert not torch.equal(blocks[1].state_in.weight, blocks[2].state_in.weight)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    create_untrained(tmp_path, "ar", TINY)
    before = read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="holds a checkpoint already; give another directory"):
        create_untrained(tmp_path, "chain", TINY)
    assert read_manifest(tmp_path) == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_one_part_at_a_time_is_in_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PEAK, str(tmp_path), "chain"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(made.stdout) < 2, "parts of four; the rest is what the probe needs"
