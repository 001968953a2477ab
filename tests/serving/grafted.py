"""A small pretrained model with a chain that is grafted on it, as training and export would leave them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onesweep.stages.backends import DEFAULT_BACKEND, backend_named
from onesweep.stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.codec import Int8
from onesweep.stages.model.pipeline import new_caches
from onesweep.stages.model.samplers import DEFAULT_SAMPLER
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.trainer.blocks.config import PROFILES
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.grafting.model import GraftModel
from onesweep.trainer.grafting.store import GraftSettings
from onesweep.trainer.grafting.training import export_chain, open_graft, train_block
from tests.serving.pretrained import write_model

CONFIG = replace(
    PROFILES["graft"],
    architecture=Architecture(context_length=16, code_dim=8, condition_dim=8),
    steps=1,
    sequences=1,
    valid_windows=1,
    warmup_steps=0,
    chunks=(4,),
    bfloat16=False,
)


def write_bundle(directory: Path) -> GraftModel:
    """`ar/` and the `chain/` made from it, in `directory`; returns the chain in one process."""
    write_model(directory / "ar")
    words = torch.tensor(list(b"the old man said that the sea and the ship " * 60), dtype=torch.uint8)
    graft = open_graft(directory / "ar", directory / "graft", 2, CONFIG, Corpus("words", words, words))
    for block in range(3):
        train_block(graft, GraftSettings(block))
        graft = open_graft(directory / "ar", directory / "graft", 2, CONFIG, Corpus("words", words, words))
    export_chain(graft, directory / "chain")
    return graft.model()


def write(
    model: GraftModel,
    prompt: Sequence[int],
    count: int,
    chunk: int,
    *,
    steps: int = 4,
    sampler: str = DEFAULT_SAMPLER,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """`count` symbols after `prompt`, `chunk` of them a sweep: as hosts write them, by the same code."""
    a, alphabet = model.architecture, Alphabet(model.architecture.vocabulary)
    backend = backend_named(DEFAULT_BACKEND)
    runners = [backend.block(part) for part in model.parts()]
    caches = [new_caches(a.layers_in(i), a, len(prompt) + count, device=model.device) for i in range(a.parts)]
    clean, written, read = alphabet.encode(list(prompt)), list[int](), 0
    while len(written) < count:
        read += alphabet.count(clean)
        plan = SweepPlan(seed, read, min(chunk, count - len(written)), steps, temperature, sampler)
        outcome: Boundary | bytes | None = None
        for index, runner in enumerate(runners):
            assert not isinstance(outcome, bytes)
            work = BlockWork(a, index, model.partition, caches[index], plan, Int8(), alphabet.decode(clean), outcome)
            outcome = run_unbatched(work, runner)
        assert isinstance(outcome, bytes)
        clean, written = outcome, written + alphabet.symbols(outcome)
    return written
