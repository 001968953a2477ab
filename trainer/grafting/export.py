"""A graft as a checkpoint that hosts serve: each block with its pretrained weights, codes and head in a file."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from stages.checkpoint import save_graft, write_manifest
from stages.errors import InputError
from stages.manifest import Manifest, read_manifest
from stages.new_directory import new_directory, require_new
from trainer.grafting.model import GraftModel
from trainer.grafting.training import Graft


def export_chain(graft: Graft, out: Path) -> Manifest:
    """Write a checkpoint of kind `chain` of the blocks that are trained. Raises OnesweepError with what to do."""
    missing = [str(i) for i in range(len(graft.stages)) if i not in graft.record.blocks]
    if missing:
        raise InputError(f"block {', '.join(missing)} is not trained yet: hosts serve a whole chain")
    require_new(out)
    model, features = graft.model(), None
    with new_directory(out) as directory:
        for name in graft.manifest.files:
            shutil.copyfile(graft.checkpoint / name, directory / name)
        write_manifest(directory, _manifest(graft, model))
        for part in model.parts():
            features = save_graft(directory, part.cpu(), features)
    return read_manifest(out)


def _manifest(graft: Graft, model: GraftModel) -> Manifest:
    """Without parts."""
    source, record = graft.manifest, graft.record
    blocks = [block for _, block in sorted(record.blocks.items())]
    settings = [asdict(block.settings) for block in blocks]
    return Manifest(
        "chain",
        model.architecture,
        (None,) * len(blocks),
        partition=record.partition,
        probe_text=source.probe_text,
        probe_tokens=source.probe_tokens,
        tokenizer=source.tokenizer,
        files=source.files,
        data=record.data,
        training={"objective": "grafted", "base": record.base, "blocks": settings},
        metrics={f"block-{block.settings.block}": block.metrics for block in blocks},
    )
