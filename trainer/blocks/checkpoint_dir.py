"""A run's checkpoint and its noise ranges."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.checkpoint.checkpoint import update_manifest, write_manifest
from stages.checkpoint.files import replace_file
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import MANIFEST_NAME, MAX_PROBE_TOKENS, TOKENIZER_NAME, Manifest, read_manifest
from stages.errors import CheckpointError, ConfigError, file_errors
from stages.model.architecture import Architecture
from stages.model.partition import NoisePartition, equal_entropy, equal_probability
from stages.model.randomness import Codes
from stages.wire.secret_files import file_lock
from trainer.blocks.config import NoiseConfig, TrainingConfig
from trainer.blocks.data import Corpus, TextTokenizer
from trainer.blocks.state import json_digest

SAMPLES, MIN_SAMPLES = 4096, 256
LOGITS_AT_ONCE = 1 << 20  # most logits in memory: a large vocabulary gets fewer samples, but at least MIN_SAMPLES
LEVELS = 48


def make_partition(noise: NoiseConfig, blocks: int, codes: Codes, text: Tensor) -> NoisePartition:
    """The noise ranges that a config specifies; measures `equal_entropy` on `text` (tokens,)."""
    # The measurement uses the optimal context-free denoiser, so it needs no trained model, and workers that measure
    # the same text agree.
    if noise.partition == "equal_probability":
        return equal_probability(blocks, noise.sigma_min, noise.sigma_max, overlap=noise.overlap)
    sigmas, nats = entropy_curve(codes, text, noise.sigma_min, noise.sigma_max)
    measured = equal_entropy(blocks, sigmas, nats, noise.overlap)
    # Round off digits that depend on the machine or its threads, since two workers must get the same boundaries.
    inner = [float(f"{boundary:.6g}") for boundary in measured.boundaries[1:-1]]
    return replace(measured, boundaries=(noise.sigma_max, *inner, noise.sigma_min))


def entropy_curve(codes: Codes, text: Tensor, sigma_min: float, sigma_max: float) -> tuple[list[float], list[float]]:
    """(sigmas, nats): CE of the Bayes-optimal denoiser that knows the tokens' frequencies but no context.

    text: (tokens,), integers. Measured on a sample of it, at noise levels equally spaced in log sigma.
    """
    table = codes.table().double()
    prior = torch.bincount(text.long(), minlength=len(table)).double() + 1e-9
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(0)
    samples = min(SAMPLES, max(LOGITS_AT_ONCE // len(table), MIN_SAMPLES))
    sample = text[torch.randint(len(text), (samples,), generator=generator)].long()
    eps = torch.randn(samples, codes.dim, generator=generator).double()
    sigmas = torch.logspace(math.log10(sigma_min), math.log10(sigma_max), LEVELS, dtype=torch.float64).tolist()
    sigmas[0], sigmas[-1] = sigma_min, sigma_max
    nats = []
    for sigma in sigmas:
        z = table[sample] + sigma * eps
        logits = z @ table.T / (sigma * sigma) + log_prior
        nats.append(float(torch.nn.functional.cross_entropy(logits, sample)))
    return sigmas, nats


RUN_FOLDER = "training"


def new_chain(config: TrainingConfig, corpus: Corpus, objective: str = "own losses") -> Manifest:
    """The manifest of a chain with no block trained yet.

    objective: source of the clean streams' training signal, "own losses" or "rounds".
    """
    codes = Codes(config.noise.code_seed, config.architecture.code_dim, config.architecture.vocabulary)
    partition = make_partition(config.noise, config.architecture.parts, codes, corpus.train)
    plain = new_ar(config.architecture, config, corpus, objective)
    return replace(plain, kind="chain", codes=codes, partition=partition)


def new_ar(architecture: Architecture, config: TrainingConfig, corpus: Corpus, objective: str) -> Manifest:
    """The manifest of an AR model with no stage stored yet.

    objective: how its stages are trained, "end to end" or "block by block".
    """
    return Manifest(
        kind="ar",
        architecture=architecture,
        parts=(None,) * architecture.parts,
        probe_text=PROBE_TEXT,
        data={"name": corpus.name, "train_bytes": corpus.bytes_in(corpus.train), "train_sha256": corpus.digest()},
        training={"objective": objective, **config.record("architecture", "rounds")},
        **_tokens(corpus, architecture.positions),
    )


def open_checkpoint_dir(out: Path, new: Manifest, tokenizer: TextTokenizer | None = None) -> Manifest:
    """The manifest in `out` if it belongs to the same run, else `new`, which is written there with the tokenizer.

    Raises CheckpointError for another run's manifest, ConfigError for a directory that cannot be created.
    """
    with file_errors(ConfigError, f"cannot train into {out}", "choose another --out"):
        (out / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
    with file_lock(out / MANIFEST_NAME):  # the trainings of two blocks may start at once
        if not (out / MANIFEST_NAME).exists():
            if tokenizer is not None:
                text = tokenizer.json
                replace_file(out / TOKENIZER_NAME, lambda path: path.write_text(text, encoding="utf-8"))
            write_manifest(out, new)
            return new
        old = read_manifest(out)
    # measured boundaries differ in the last digits between machines, so compare their inputs instead
    if identity(old) != identity(replace(new, partition=old.partition)):
        raise CheckpointError(
            f"{out} has a checkpoint of other settings or data; choose another --out, or resume with the same settings"
        )
    return old


def identity(manifest: Manifest) -> str:
    """Digest of everything that determines a run's weights."""
    return json_digest(asdict(replace(manifest, parts=(), metrics={})))


def add_metrics(out: Path, metrics: dict[str, Any]) -> Manifest:
    """Add measurements to the manifest in `out`."""
    return update_manifest(out, lambda manifest: replace(manifest, metrics={**manifest.metrics, **metrics}))


def _tokens(corpus: Corpus, positions: int) -> dict[str, Any]:
    """A manifest's fields about a corpus's tokens."""
    if corpus.tokenizer is None:
        return {}
    probe = tuple(corpus.tokenizer.encoding.encode(PROBE_TEXT).ids[: min(positions, MAX_PROBE_TOKENS)])
    return {"tokenizer": "tokens", "probe_tokens": probe, "files": {TOKENIZER_NAME: corpus.tokenizer.digest}}
