from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from stages.checkpoint.manifest import read_manifest
from tests.trainer.small import corpus, tiny
from trainer.blocks.checkpoint_dir import add_metrics, identity, new_chain, open_checkpoint_dir


def test_results_and_log_settings_are_not_part_of_the_identity() -> None:
    manifest = new_chain(tiny, corpus)
    assert identity(manifest) == identity(replace(manifest, metrics={"chain": {}}))
    assert identity(manifest) == identity(new_chain(replace(tiny, log_every=7, save_every_s=1.0), corpus))


def test_measurements_of_concurrent_workers_are_all_kept(tmp_path: Path) -> None:
    open_checkpoint_dir(tmp_path, new_chain(tiny, corpus))
    measured = {f"block-{i}": {"nats": float(i)} for i in range(8)}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: add_metrics(tmp_path, {name: measured[name]}), measured))
    assert read_manifest(tmp_path).metrics == measured
