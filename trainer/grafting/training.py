"""Grafting from beginning to end: one block trained into a directory, and the chain exported."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from onesweep.stages.checkpoint.checkpoint import new_directory, require_new, save_block, write_manifest
from onesweep.stages.checkpoint.manifest import Manifest, read_manifest
from onesweep.stages.errors import CheckpointError, ConfigError, InputError
from onesweep.stages.grafting.block import OutputProjection, SlotShape
from onesweep.stages.model.families import PipelineStage
from onesweep.trainer.blocks.checkpoint_dir import make_partition
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus, PlacedCorpus, precision, quick_bfloat16
from onesweep.trainer.blocks.optimizer import BETAS, OptimizerSet
from onesweep.trainer.blocks.run import Run, StepLoss
from onesweep.trainer.blocks.state import exclusive, json_digest
from onesweep.trainer.distill.samples import in_symbols
from onesweep.trainer.grafting.batch import SlotBatch, head_losses, next_nats, range_nats, read, slot_losses
from onesweep.trainer.grafting.model import (
    EmbeddingCodes,
    GraftModel,
    fit_tuned_lenses,
    load_stages,
    new_model,
    pretrained,
)
from onesweep.trainer.grafting.store import (
    CODES_NAME,
    LENSES_NAME,
    NAME,
    GraftRecord,
    GraftSettings,
    add_block,
    load_block_weights,
    read_record,
    read_table,
    write_record,
    write_table,
)

PRETRAINED = "pretrained"  # name of the pretrained parts in a graft's module


class GraftOptimizers(OptimizerSet):
    """AdamW for all: pretrained weights at the rate of matrices, added weights at the other."""

    def __init__(self, module: nn.Module, config: TrainingConfig) -> None:
        pretrained = [p for name, p in module.named_parameters() if name.startswith(f"{PRETRAINED}.")]
        known = {id(p) for p in pretrained}
        added = [p for p in module.parameters() if id(p) not in known]
        groups = [
            (group, rate)
            for group, rate in ((added, config.learning_rate), (pretrained, config.matrix_learning_rate))
            if group
        ]
        self.config, self.peaks = config, tuple(rate for _, rate in groups)
        self.optimizers = [
            torch.optim.AdamW(group, lr=rate, betas=BETAS, weight_decay=config.weight_decay) for group, rate in groups
        ]


class GraftTask:
    """`module` holds the trained weights only, so that neither a state nor a checkpoint has a frozen one."""

    def __init__(self, model: GraftModel, corpus: Corpus, config: TrainingConfig, settings: GraftSettings) -> None:
        self.model, self.corpus, self.config, self.settings = model, corpus, config, settings
        self.block = model.blocks[settings.block]
        self.name = f"graft-{settings.block}"
        self.length = config.architecture.context_length
        self.own_head = self._own_head()
        self.module = trained_module(model, settings, self.own_head)
        self.module.requires_grad_(True)
        self.trained = [self.module]

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        batch = SlotBatch.draw(self.block.index, self.model.partition, self.config, step, len(text), self.model.device)
        before = self.model.blocks[: self.block.index]
        reading = read(self.block, before, text[:, :-1])
        total = slot_losses(self.block, before, self.model.head, batch, reading, text[:, 1:]).mean()
        parts: dict[str, float | Tensor] = {"denoise_nats": total.detach(), "chunk": batch.chunk}
        if self.settings.trains == "block" and self.config.anchor:
            anchor = self._anchor(reading.clean, text[:, 1:])
            parts["next_nats"] = anchor.detach()
            total = total + self.config.anchor * anchor
        return StepLoss(total, parts)

    def evaluate(self) -> dict[str, float]:
        """On validation text: the next-token loss of the whole pipeline with this block in its place, and the loss of
        its slots at both ends and in the middle of its noise range."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        found = {"valid_next_nats": next_nats(self.model, text)}
        with precision(self.config.bfloat16, self.model.device.type):
            levels = range_nats(self.model, self.block.index, text)
        return found | {f"valid_{name}": nats for name, nats in levels.items()}

    def _anchor(self, clean: Tensor, target: Tensor) -> Tensor:
        if self.own_head is not None:
            hidden = self.own_head(clean)
        else:
            for stage in self.model.stages[self.block.index + 1 :]:
                clean = stage.read(clean)
            hidden = self.model.final_norm(clean)
        return head_losses(self.model.head, hidden.flatten(0, 1), target.flatten()).mean()

    def _own_head(self) -> OutputProjection | None:
        """A head for a block whose anchor is at its own end; None for the last block."""
        if self.settings.anchor_head == "last" or self.block.stage.is_last:
            return None
        norm = self.model.stages[-1].norm
        assert norm is not None
        own = OutputProjection(norm.normalized_shape[0], norm.eps)
        own.norm.load_state_dict(norm.state_dict())
        return own.to(self.model.device)


def trained_module(model: GraftModel, settings: GraftSettings, own_head: OutputProjection | None = None) -> nn.Module:
    """The contents of a block's file: the slots' weights, and the pretrained ones if those are trained."""
    block = model.blocks[settings.block]
    parts: dict[str, nn.Module] = {"slots": block.added}
    if settings.trains == "block":
        layers: Sequence[nn.Module] = block.stage.layers
        final = [block.stage.norm] if block.stage.norm is not None else []
        parts[PRETRAINED] = nn.ModuleList([*layers, *final])
    if own_head is not None:
        parts["own_head"] = own_head
    return nn.ModuleDict(parts)


RUN_FOLDER = "training"
LENS_WINDOWS = 64  # windows of training text that the lenses are fitted to


@dataclass(frozen=True)
class Graft:
    """A directory of grafted blocks and what it was opened with."""

    checkpoint: Path
    out: Path
    config: TrainingConfig
    manifest: Manifest
    stages: list[PipelineStage]
    record: GraftRecord
    corpus: PlacedCorpus  # in the model's symbols; its batches, and the stages, are on the device

    def model(self, but: int | None = None) -> GraftModel:
        """The model with all trained blocks, except `but`; the others are as they start."""
        record, config, a = self.record, self.config, self.stages[0].architecture
        codes = read_table(self.out, record.codes, a.vocabulary, record.shape.code_dim)
        lenses = read_table(self.out, record.lenses, a.parts, a.width, a.width + 1)
        start = (self.stages, record.shape, codes, record.partition, lenses, config.seed)
        bfloat16 = config.bfloat16 and quick_bfloat16(self.corpus.device)
        model = new_model(*start, bfloat16=bfloat16)
        for index, stored in record.blocks.items():
            if index != but:
                load_block_weights(self.out, stored, trained_module(model, stored.settings))
        return model


def open_graft(
    checkpoint: Path, out: Path, rank: int, config: TrainingConfig, corpus: Corpus, device: str = "cpu"
) -> Graft:
    """Read the pretrained model, and make `out` or continue it.

    corpus: in bytes; device: computes everything, and leaves no trace in what is stored. Raises OnesweepError.
    """
    manifest = pretrained(checkpoint)
    a = manifest.text_architecture
    length = config.architecture.context_length
    if length > a.positions:
        raise ConfigError(f"windows of {length} symbols: the model reads at most {a.positions}")
    stages = load_stages(checkpoint, device)
    spelled = in_symbols(corpus, checkpoint, manifest, length + 1)
    text = PlacedCorpus(spelled.name, spelled.train, spelled.valid, spelled.tokenizer, device)
    shape = SlotShape(config.architecture.code_dim, config.architecture.condition_dim, rank)
    try:
        (out / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot train into {out}: {error.strerror}; give another --out") from None
    # Blocks may be trained by several processes at once; the first one makes the record.
    with exclusive(out / RUN_FOLDER / "new.lock"):
        if not (out / NAME).exists():
            _create(out, manifest.digest(), shape, stages, config, text)
    record = read_record(out)
    if record.base != manifest.digest() or record.shape != shape:
        raise CheckpointError(f"{out} is grafted on another model, or with other sizes; give another --out")
    return Graft(checkpoint, out, config, manifest, stages, record, text)


def train_block(graft: Graft, settings: GraftSettings) -> dict[str, float]:
    """Train one block and store it; returns its figures. Raises OnesweepError."""
    config = graft.config
    if not 0 <= settings.block < len(graft.stages):
        raise ConfigError(f"there is no block {settings.block}: this model has blocks 0 to {len(graft.stages) - 1}")
    model = graft.model(but=settings.block)
    task = GraftTask(model, graft.corpus, config, settings)
    text = graft.corpus.valid_batch(config.valid_windows, task.length + 1)
    # The same windows as in the run's evaluations, so that before and after compare.
    before = next_nats(model, text)
    optimizers = GraftOptimizers(task.module, config)
    run = Run(task, config, graft.out / RUN_FOLDER, _identity(graft, settings), optimizers=optimizers)
    losses = {"before_next_nats": before, **run.train()}
    stored = trained_module(model, settings)  # its own head is training's alone
    add_block(graft.out, settings, stored, losses)
    run.finish()
    return losses


def _create(
    out: Path, base: str, shape: SlotShape, stages: list[PipelineStage], config: TrainingConfig, text: Corpus
) -> None:
    embedding = stages[0].embedding
    assert embedding is not None
    if shape.code_dim > embedding.weight.shape[1]:
        raise ConfigError(f"code_dim {shape.code_dim} is over the model's width {embedding.weight.shape[1]}")
    codes = EmbeddingCodes.of_embedding(embedding.weight, shape.code_dim)
    partition = make_partition(config.noise, len(stages), codes, text.train)
    data = {"name": text.name, "train_symbols": len(text.train), "train_sha256": text.digest()}
    windows = text.batch(config.seed, 0, LENS_WINDOWS, config.architecture.context_length)
    stored = (
        write_table(out, CODES_NAME, codes.table()),
        write_table(out, LENSES_NAME, fit_tuned_lenses(stages, windows)),
    )
    write_record(out, GraftRecord(base, shape, partition, *stored, data))


def _identity(graft: Graft, settings: GraftSettings) -> str:
    """Everything that decides a block's weights."""
    config = asdict(graft.config)
    # These do not change a block's weights.
    for name in ("rounds", "lookahead", "log_every", "evaluate_every", "save_every_s"):
        config.pop(name)
    before = [graft.record.blocks[i].weights.sha256 for i in range(settings.block) if i in graft.record.blocks]
    return json_digest(
        {
            "base": graft.record.base,
            "codes": graft.record.codes.sha256,
            "lenses": graft.record.lenses.sha256,
            "partition": asdict(graft.record.partition),
            "shape": asdict(graft.record.shape),
            "settings": asdict(settings),
            "text": graft.corpus.digest(),
            "before": before,
            "config": config,
        }
    )


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
            features = save_block(directory, part.cpu(), features)
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
