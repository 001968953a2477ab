"""Grafting from beginning to end: one block trained into a directory, and the whole chain measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.errors import CheckpointError, ConfigError
from stages.families import PipelineStage
from stages.grafting.architecture import Shape
from stages.manifest import TOKENIZER_NAME, Manifest
from stages.pretrained.tokens import open_tokenizer
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.distill.text import in_symbols
from trainer.entropy import make_partition
from trainer.grafting.codes import EmbeddingCodes
from trainer.grafting.lens import fit_lenses
from trainer.grafting.measure import from_noise, next_nats
from trainer.grafting.model import GraftModel, load_stages, new_model, pretrained
from trainer.grafting.optimizers import GraftOptimizers
from trainer.grafting.samples import Row, Writing, panel
from trainer.grafting.settings import GraftSettings
from trainer.grafting.store import (
    CODES_NAME,
    LENSES_NAME,
    NAME,
    GraftRecord,
    add_block,
    load_block_weights,
    read_record,
    read_table,
    write_record,
    write_table,
)
from trainer.grafting.task import GraftTask, trained_module
from trainer.lock import exclusive
from trainer.progress import Progress
from trainer.rounds.device import PlacedCorpus
from trainer.run import Run

RUN_FOLDER = "training"
LENS_WINDOWS = 64
"""Of training text, for the start of the lenses."""


@dataclass(frozen=True)
class Graft:
    """A directory of grafted blocks and what it was opened with."""

    checkpoint: Path
    out: Path
    config: TrainingConfig
    manifest: Manifest
    stages: list[PipelineStage]
    record: GraftRecord
    corpus: PlacedCorpus
    """In the model's symbols; its batches, and the stages, are on the device."""

    def spell(self, symbols: list[int]) -> str:
        """Symbols as text."""
        if self.manifest.tokenizer == "bytes":
            return bytes(symbols).decode(errors="replace")
        tokenizer = open_tokenizer((self.checkpoint / TOKENIZER_NAME).read_text(encoding="utf-8"))
        return str(tokenizer.decode(symbols))

    def model(self, but: int | None = None) -> GraftModel:
        """With every block that is trained, and the others as they start. :param but: a block to leave as it starts."""
        record, config, a = self.record, self.config, self.stages[0].architecture
        codes = read_table(self.out, record.codes, a.vocabulary, record.shape.code_dim)
        lenses = read_table(self.out, record.lenses, a.parts, a.width, a.width + 1)
        start = (self.stages, record.shape, codes, record.partition, lenses, config.seed)
        model = new_model(*start, bfloat16=config.bfloat16)
        for index, stored in record.blocks.items():
            if index != but:
                load_block_weights(self.out, stored, trained_module(model, stored.settings))
        return model


def open_graft(
    checkpoint: Path, out: Path, rank: int, config: TrainingConfig, corpus: Corpus, device: str = "cpu"
) -> Graft:
    """Read the pretrained model, and make `out` or go on with it.

    corpus: in bytes. :param device: where all is computed; nothing that is stored says which. Raises OnesweepError with
        what to do.
    """
    manifest = pretrained(checkpoint)
    a = manifest.architecture
    length = config.architecture.context_bytes
    if length > a.positions:
        raise ConfigError(f"windows of {length} symbols: the model reads at most {a.positions}")
    stages = load_stages(checkpoint, device)
    spelled = in_symbols(corpus, checkpoint, manifest, length + 1)
    text = PlacedCorpus(spelled.name, spelled.train, spelled.valid, device)
    shape = Shape(config.architecture.code_dim, config.architecture.condition_dim, rank)
    try:
        (out / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot train into {out}: {error.strerror}; give another --out") from None
    with exclusive(out / RUN_FOLDER / "new.lock"):
        if not (out / NAME).exists():
            _create(out, manifest.digest(), shape, stages, config, text)
    record = read_record(out)
    if record.base != manifest.digest() or record.shape != shape:
        raise CheckpointError(f"{out} is grafted on another model, or with other sizes; give another --out")
    return Graft(checkpoint, out, config, manifest, stages, record, text)


def train_block(graft: Graft, settings: GraftSettings, progress: Progress | None = None) -> dict[str, float]:
    """Train one block and store it; returns its figures. Raises OnesweepError."""
    config = graft.config
    if not 0 <= settings.block < len(graft.stages):
        raise ConfigError(f"there is no block {settings.block}: this model has blocks 0 to {len(graft.stages) - 1}")
    model = graft.model(but=settings.block)
    task = GraftTask(model, graft.corpus, config, settings)
    text = graft.corpus.valid_batch(config.valid_windows, task.length + 1)
    before = next_nats(model, text)
    optimizers = GraftOptimizers(task.module, config)
    run = Run(task, config, graft.out / RUN_FOLDER, _identity(graft, settings), progress, optimizers=optimizers)
    losses = {"before_next_nats": before, **run.train()}
    stored = trained_module(model, settings)  # its own head is training's alone
    add_block(graft.out, settings, stored, losses)
    run.finish()
    return losses


def measure_chain(graft: Graft, steps: int, windows: int) -> dict[str, Any]:
    """The whole chain from noise: with the true prefix at every place and with a wrong one, and in chunks."""
    model = graft.model()
    text = graft.corpus.valid_batch(windows, graft.config.architecture.context_bytes + 1)
    asked = {"alone": (1, False), "alone_scrambled": (1, True), "chunks": (16, False), "chunks_scrambled": (16, True)}
    return {
        name: [point._asdict() for point in from_noise(model, text, steps, chunk, is_scrambled=is_scrambled)]
        for name, (chunk, is_scrambled) in asked.items()
    }


def write_samples(graft: Graft, writing: Writing) -> tuple[list[Row], list[str]]:
    """What the chain writes, in figures, and one line for the first prompt of each row."""
    if (length := writing.prompt_symbols + writing.symbols) > graft.stages[0].architecture.positions:
        raise ConfigError(f"{length} symbols of prompt and text are over the model's context")
    judge = load_stages(graft.checkpoint, graft.corpus.device)  # the graft's own may have been trained
    rows = panel(graft.model(), judge, graft.corpus, writing)
    return rows, [graft.spell(row.texts[0]) for row in rows]


def _create(
    out: Path, base: str, shape: Shape, stages: list[PipelineStage], config: TrainingConfig, text: Corpus
) -> None:
    embedding = stages[0].embedding
    assert embedding is not None
    if shape.code_dim > embedding.weight.shape[1]:
        raise ConfigError(f"code_dim {shape.code_dim} is over the model's width {embedding.weight.shape[1]}")
    codes = EmbeddingCodes.of_embedding(embedding.weight, shape.code_dim)
    partition = make_partition(config.noise, len(stages), codes, text.train)
    data = {"name": text.name, "train_symbols": len(text.train), "train_sha256": text.digest()}
    windows = text.batch(config.seed, 0, LENS_WINDOWS, config.architecture.context_bytes)
    stored = (
        write_table(out, CODES_NAME, codes.table()),
        write_table(out, LENSES_NAME, fit_lenses(stages, windows)),
    )
    write_record(out, GraftRecord(base, shape, partition, *stored, data))


def _identity(graft: Graft, settings: GraftSettings) -> str:
    """Everything that decides a block's weights."""
    config = asdict(graft.config)
    for name in ("rounds", "lookahead", "log_every", "evaluate_every", "save_every_s"):
        config.pop(name)
    before = [graft.record.blocks[i].weights.sha256 for i in range(settings.block) if i in graft.record.blocks]
    record = {
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
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
