"""A small pretrained model with a chain that is grafted on it, as training and export would leave them."""

from dataclasses import replace
from pathlib import Path

import torch

from onesweep.stages.model.architecture import Architecture
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
