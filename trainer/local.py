"""Local training: the blocks of a chain one at a time, or an AR model, on one machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stages.ar import ArModel
from stages.architecture import Architecture
from stages.block import Block
from stages.checkpoint import load_block, save_ar, save_block, write_manifest
from stages.codes import Codes
from stages.errors import CheckpointError
from stages.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.partition import NoisePartition, equal_entropy, equal_probability, uniform
from stages.probe import PROBE_TEXT, probe_block
from trainer.config import TrainingConfig
from trainer.curves import draw_curves
from trainer.data import Corpus
from trainer.entropy import entropy_curve
from trainer.run import Run
from trainer.tasks import ArTask, BlockTask, chain_diagnostics

RUN_FOLDER = "training"
DIAGNOSTIC_STEPS = 4


def train_blocks(config: TrainingConfig, corpus: Corpus, out: Path, only: int | None = None) -> Manifest:
    """Train the blocks of a chain into the checkpoint `out`, in order, skipping those that are done.

    Only the block being trained has gradients and optimizer state. `only` picks one block; a `chained` one needs
    those before it in `out`. Raises CheckpointError or ResumeError with what to do.
    """
    manifest = _open(out, _new_chain(config, corpus))
    assert manifest.codes is not None and manifest.partition is not None
    for index in range(config.architecture.parts) if only is None else [only]:
        if manifest.parts[index] is not None:
            print(f"block {index}: already trained in {out}")
            continue
        torch.manual_seed(config.seed + index)
        block = Block(config.architecture, index, manifest.codes)
        before = [load_block(out, i) for i in range(index)] if config.architecture.context == "chained" else []
        task = BlockTask(block, before, manifest.partition, corpus, config)
        run = Run(task, config, out / RUN_FOLDER, _identity(manifest))
        losses = run.train()
        save_block(out, block.eval(), _probe_features(before, manifest))
        manifest = _add_metrics(out, {f"block-{index}": losses})
        run.finish()
        draw_curves(out / RUN_FOLDER)
    if manifest.complete and "chain" not in manifest.metrics:
        blocks = [load_block(out, i) for i in range(config.architecture.parts)]
        steps = DIAGNOSTIC_STEPS
        losses = chain_diagnostics(blocks, manifest.partition, corpus, steps)
        manifest = _add_metrics(out, {"chain": {**losses, "steps_per_block": steps}})
    return manifest


def train_ar(config: TrainingConfig, corpus: Corpus, out: Path, layers: int, stages: int) -> Manifest:
    """Train an AR model of `layers` layers end to end, and store it cut into `stages` equal stages."""
    if layers < 1 or stages < 1 or layers % stages:
        raise CheckpointError(f"{layers} layers cannot be cut into {stages} equal stages")
    architecture = replace(config.architecture, parts=stages, layers=layers // stages, context="own")
    manifest = _open(out, _new_ar(architecture, config, corpus))
    if manifest.complete:
        print(f"AR model: already trained in {out}")
        return manifest
    torch.manual_seed(config.seed)
    model = ArModel(architecture)
    run = Run(ArTask("ar", model, corpus, config), config, out / RUN_FOLDER, _identity(manifest))
    losses = run.train()
    save_ar(out, model.eval())
    manifest = _add_metrics(out, {"ar": losses})
    run.finish()
    draw_curves(out / RUN_FOLDER)
    return manifest


def make_partition(config: TrainingConfig, codes: Codes, corpus: Corpus) -> NoisePartition:
    """The noise partition that a config asks for; `equal_entropy` is measured on the corpus."""
    noise, blocks = config.noise, config.architecture.parts
    if noise.partition == "equal_probability":
        return equal_probability(blocks, noise.sigma_min, noise.sigma_max, overlap=noise.overlap)
    if noise.partition == "uniform":
        return uniform(blocks, noise.sigma_min, noise.sigma_max, noise.overlap)
    sigmas, nats = entropy_curve(codes, corpus.train, noise.sigma_min, noise.sigma_max)
    return equal_entropy(blocks, sigmas, nats, noise.overlap)


def _new_chain(config: TrainingConfig, corpus: Corpus) -> Manifest:
    codes = Codes(config.noise.code_seed, config.architecture.code_dim)
    return Manifest(
        kind="chain",
        architecture=config.architecture,
        parts=(None,) * config.architecture.parts,
        codes=codes,
        partition=make_partition(config, codes, corpus),
        probe_text=PROBE_TEXT,
        data=_data(corpus),
        training=_training(config),
    )


def _new_ar(architecture: Architecture, config: TrainingConfig, corpus: Corpus) -> Manifest:
    return Manifest(
        kind="ar",
        architecture=architecture,
        parts=(None,) * architecture.parts,
        probe_text=PROBE_TEXT,
        data=_data(corpus),
        training=_training(config),
    )


def _open(out: Path, new: Manifest) -> Manifest:
    """The checkpoint in `out` if it is of the same run, else a new one; another run's is refused."""
    if not (out / MANIFEST_NAME).exists():
        write_manifest(out, new)
        return new
    old = read_manifest(out)
    if _identity(old) != _identity(new):
        raise CheckpointError(
            f"{out} holds a checkpoint of other settings or data; give another --out, or the same settings to go on"
        )
    return old


def _identity(manifest: Manifest) -> str:
    """Names a run: everything that decides its weights."""
    record = asdict(replace(manifest, parts=(), metrics={}))
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _data(corpus: Corpus) -> dict[str, Any]:
    return {"name": corpus.name, "train_bytes": len(corpus.train), "train_sha256": corpus.digest()}


def _training(config: TrainingConfig) -> dict[str, Any]:
    """What decides the weights; how often to log or save does not."""
    record = asdict(config)
    for name in ("architecture", "log_every", "evaluate_every", "save_every_s"):
        record.pop(name)
    return json.loads(json.dumps(record))  # tuples become lists, as after a reading


def _probe_features(before: list[Block], manifest: Manifest) -> torch.Tensor | None:
    features = None
    for block in before:
        assert manifest.partition is not None
        _, features = probe_block(block, manifest.partition, manifest.probe_text, features)
    return features


def _add_metrics(out: Path, metrics: dict[str, Any]) -> Manifest:
    manifest = read_manifest(out)
    manifest = replace(manifest, metrics={**manifest.metrics, **metrics})
    write_manifest(out, manifest)
    return manifest
