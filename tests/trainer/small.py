"""A small text, models, tensors and updates, always the same."""

import random
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from stages.errors import ResumeError
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.partition import equal_probability
from stages.model.randomness import Codes
from trainer.blocks.config import NoiseConfig, RoundSettings, TrainingConfig
from trainer.blocks.data import load_corpus
from trainer.rounds.codecs import Tensors
from trainer.rounds.store import DATABASE, Record, Update, connect, read_events

_WORDS = ["the", "ship", "sailed", "north", "and", "nobody", "saw", "it", "again", "naïve"]
_random = random.Random(0)
# 12 kB of words, and the same as a corpus.
TEXT = " ".join(_random.choice(_WORDS) for _ in range(2400))
with tempfile.TemporaryDirectory() as _directory:
    (Path(_directory) / "words.txt").write_text(TEXT, encoding="utf-8")
    corpus = load_corpus(Path(_directory) / "words.txt")

tiny = TrainingConfig(
    architecture=Architecture(parts=2, layers=2, width=16, heads=2, context_length=32, code_dim=8, condition_dim=8),
    noise=NoiseConfig(partition="equal_probability"),
    steps=6,
    sequences=2,
    warmup_steps=2,
    chunks=(1, 4, 0),
    bfloat16=False,
    log_every=1,
    evaluate_every=4,
    valid_windows=4,
    save_every_s=0.0,
)
# For rounds over the network: two blocks, whose workers wait for each other.
rounds_config = replace(
    tiny,
    architecture=replace(tiny.architecture, layers=1),
    rounds=RoundSettings(steps_per_round=2, rounds=3, replicas=2, deadline_s=0, codec="fp32", down_codec="fp32"),
)
partition = equal_probability(2, 0.15, 10.0)


def make_blocks(**changes: object) -> list[Block]:
    """Blocks whose every parameter is far from its start, so that nothing is silent by being zero."""
    architecture = replace(tiny.architecture, **changes)
    blocks = [Block(architecture, i, Codes(0, architecture.code_dim)) for i in range(architecture.parts)]
    generator = torch.Generator().manual_seed(7)
    for block in blocks:
        for parameter in block.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return blocks


def tensors(seed: int, scale: float = 1.0) -> Tensors:
    """A matrix, a vector and a number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.weight": scale * torch.randn(6, 5, generator=generator),
        "bias": scale * torch.randn(7, generator=generator),
        "gain": scale * torch.randn((), generator=generator),
    }


def events_of(rounds: Path) -> list[Record]:
    """Events that a coordinator, which may run, has committed in its folder `rounds`."""
    if not (rounds / DATABASE).exists():
        return []
    try:
        with closing(connect(rounds / DATABASE)) as database:
            return read_events(database)
    except (sqlite3.Error, ResumeError):  # it is just being made
        return []


def update(number: int = 0, worker: int = 0, **changes: object) -> Update:
    """The update that a worker hands in for a round."""
    fields: dict[str, object] = {
        "id": f"w{worker}-{number}",
        "worker": f"w{worker}",
        "part": "p",
        "base_version": number,
        "round": number,
        "steps": 4,
        "sequences": 8,
        "delta": tensors(100 * number + worker, 0.1),
    }
    return Update(**{**fields, **changes})  # type: ignore[arg-type]
