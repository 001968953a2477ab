"""Local training: the blocks of a chain one at a time, or an AR model, on one machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from stages.checkpoint.checkpoint import load_chain, save_part, save_parts
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import ConfigError, Interrupted
from stages.model.block import Block
from stages.model.pipeline import ArModel
from trainer.blocks.checkpoint_dir import RUN_FOLDER, add_metrics, identity, new_ar, new_chain, open_checkpoint_dir
from trainer.blocks.config import RunConfig, TrainingConfig, in_tokens_of
from trainer.blocks.data import Corpus
from trainer.blocks.losses import chain_diagnostics
from trainer.blocks.run import Run, Task, state_path
from trainer.blocks.task import STEPS_PER_BLOCK, ArTask, BlockTask, ScorerTask, StagesInOneProcess


def train_blocks(config: TrainingConfig, corpus: Corpus, out: Path, only: int | None = None) -> Manifest:
    """Train the blocks of a chain into the checkpoint `out`, in order, skipping those that are done.

    Only the block in training has gradients and optimizer state. `only` selects one block. Raises OnesweepError with
    a remedy.
    """
    config = in_tokens_of(config, corpus)
    architecture = config.architecture
    if only is not None and not 0 <= only < architecture.parts:
        raise ConfigError(f"block {only} does not exist: this chain has blocks 0 to {architecture.parts - 1}")
    corpus.require(architecture.context_length + 1)
    manifest = open_checkpoint_dir(out, new_chain(config, corpus), corpus.tokenizer)
    for index in range(architecture.parts) if only is None else [only]:
        if is_trained(out, manifest, index, f"block-{index}"):
            continue
        assert manifest.codes is not None
        assert manifest.partition is not None
        # The same start whether one command trains all blocks or one each.
        torch.manual_seed(config.seed + index)
        block = Block(architecture, index, manifest.codes)
        task = BlockTask(block, manifest.partition, corpus, config)
        manifest = train_part(task, config, out, manifest, task.name, partial(save_part, out, block))
    if manifest.complete and "chain" not in manifest.metrics:
        manifest = diagnose(config, corpus, out, manifest)
    return manifest


def train_ar(config: TrainingConfig, corpus: Corpus, out: Path, stages: int) -> Manifest:
    """Train an AR model end to end, and store it as `stages` stages of `architecture.layers` layers each."""
    config = in_tokens_of(config, corpus)
    torch.manual_seed(config.seed)
    task = ArTask(ArModel(replace(config.architecture, parts=stages)), corpus, config)
    return _train_pipeline(config, corpus, out, task, "end to end")


def train_scorer(config: TrainingConfig, corpus: Corpus, out: Path) -> Manifest:
    """Train an AR pipeline stage by stage, like workers with one stage each; see trainer/blocks/task.py."""
    config = in_tokens_of(config, corpus)
    torch.manual_seed(config.seed)
    task = ScorerTask(StagesInOneProcess(config.architecture), corpus, config)
    return _train_pipeline(config, corpus, out, task, "block by block")


def _train_pipeline(config: TrainingConfig, corpus: Corpus, out: Path, task: ArTask, objective: str) -> Manifest:
    architecture = task.module.architecture
    corpus.require(architecture.context_length + 1)
    manifest = open_checkpoint_dir(out, new_ar(architecture, config, corpus, objective), corpus.tokenizer)
    if is_trained(out, manifest, 0, task.name):
        return manifest
    return train_part(task, config, out, manifest, "ar", partial(save_parts, out, task.module.stages))


def is_trained(out: Path, manifest: Manifest, part: int, name: str) -> bool:
    """True if a part is already in the checkpoint; then removes the rest of its run `name`."""
    if manifest.parts[part] is None:
        return False
    print(f"{name}: already trained in {out}")
    state_path(out / RUN_FOLDER, name).unlink(missing_ok=True)
    return True


def train_part(
    task: Task, config: RunConfig, out: Path, manifest: Manifest, name: str, save: Callable[[], object]
) -> Manifest:
    """Run to the end, and put weights and, under this name, measurements into the checkpoint; returns its manifest.

    Raises Interrupted, with everything stored, for a signal at the last step.
    """
    run = Run(task, config, out / RUN_FOLDER, identity(manifest))
    losses = run.train()
    task.module.cpu()  # the checkpoint measures its parts on the CPU
    # Measurements first: after a kill in between, a part without them would otherwise count as done.
    add_metrics(out, {name: losses})
    save()
    run.finish()
    if run.stop.is_set():
        raise Interrupted(f"{task.name} is trained and saved; stopped on request, run again to resume")
    return read_manifest(out)


def diagnose(config: TrainingConfig, corpus: Corpus, out: Path, manifest: Manifest) -> Manifest:
    """Measure a whole chain on validation text; returns the manifest with the results."""
    assert manifest.partition is not None
    text = corpus.valid_batch(config.valid_windows, config.architecture.context_length + 1).cpu()
    losses = chain_diagnostics(load_chain(out), manifest.partition, text, STEPS_PER_BLOCK)
    return add_metrics(out, {"chain": {**losses, "steps_per_block": STEPS_PER_BLOCK}})
