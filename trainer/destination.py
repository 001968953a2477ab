"""The checkpoint that a run trains into: made, recognised, and told what was measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stages.architecture import Architecture
from stages.checkpoint import update_manifest, write_manifest
from stages.codes import Codes
from stages.errors import CheckpointError, ConfigError
from stages.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.probe import PROBE_TEXT
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.entropy import make_partition
from trainer.lock import exclusive

RUN_FOLDER = "training"


def new_chain(config: TrainingConfig, corpus: Corpus, objective: str = "own losses") -> Manifest:
    """The manifest of a chain of which no block is trained yet.

    objective: what the blocks' clean streams learn from, "own losses" or "lookahead".
    """
    codes = Codes(config.noise.code_seed, config.architecture.code_dim)
    return Manifest(
        kind="chain",
        architecture=config.architecture,
        parts=(None,) * config.architecture.parts,
        codes=codes,
        partition=make_partition(config.noise, config.architecture.parts, codes, corpus.train),
        probe_text=PROBE_TEXT,
        data=_data(corpus),
        training={"objective": objective, **_training(config)},
    )


def new_ar(architecture: Architecture, config: TrainingConfig, corpus: Corpus, objective: str) -> Manifest:
    """The manifest of an AR model of which no stage is stored yet.

    objective: how its stages are trained, "end to end" or "block by block".
    """
    return Manifest(
        kind="ar",
        architecture=architecture,
        parts=(None,) * architecture.parts,
        probe_text=PROBE_TEXT,
        data=_data(corpus),
        training={"objective": objective, **_training(config)},
    )


def open_destination(out: Path, new: Manifest) -> Manifest:
    """The manifest in `out` if it is of the same run, else `new`, written there.

    Raises CheckpointError for another run's, ConfigError for a directory that cannot be made.
    """
    try:
        (out / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot train into {out}: {error.strerror}; give another --out") from None
    with exclusive(out / RUN_FOLDER / "manifest.lock"):  # two blocks' trainings may be the first at once
        if not (out / MANIFEST_NAME).exists():
            write_manifest(out, new)
            return new
        old = read_manifest(out)
    # measured boundaries differ in their last digits between machines; what they were measured from is compared
    if identity(old) != identity(replace(new, partition=old.partition)):
        raise CheckpointError(
            f"{out} holds a checkpoint of other settings or data; give another --out, or the same settings to go on"
        )
    return old


def identity(manifest: Manifest) -> str:
    """Names a run: everything that decides its weights."""
    record = asdict(replace(manifest, parts=(), metrics={}))
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def add_metrics(out: Path, metrics: dict[str, Any]) -> Manifest:
    """Put measurements into the manifest in `out`, beside those that are there."""
    return update_manifest(out, lambda manifest: replace(manifest, metrics={**manifest.metrics, **metrics}))


def _data(corpus: Corpus) -> dict[str, Any]:
    return {"name": corpus.name, "train_bytes": len(corpus.train), "train_sha256": corpus.digest()}


def _training(config: TrainingConfig) -> dict[str, Any]:
    """What decides the weights; how often to log or save does not, nor rounds where there are none."""
    record = asdict(config)
    for name in ("architecture", "rounds", "log_every", "evaluate_every", "save_every_s"):
        record.pop(name)
    return dict(json.loads(json.dumps(record)))  # tuples become lists, as after a reading
