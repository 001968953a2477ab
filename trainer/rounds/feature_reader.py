"""Blocks that run forward only, so that the workers of later blocks need not hold copies of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.block import Block
from trainer.data import Corpus
from trainer.rounds.feature_format import FeatureFormat
from trainer.rounds.frame import Frame
from trainer.rounds.parts import FedPart, Part, block_name
from trainer.rounds.tensors import Tensors, share


class FeatureReader:
    """Makes what a later block reads of the text of one place. For one thread at a time."""

    def __init__(self, frame: Frame, corpus: Corpus) -> None:
        self.frame, self.corpus, self.format = frame, corpus, FeatureFormat.of(frame.config)
        architecture = frame.config.architecture
        count = architecture.parts - 1
        self.blocks = [Block(architecture, i, frame.codes).requires_grad_(False) for i in range(count)]

    def take(self, published: Mapping[str, Tensors]) -> None:
        """Read with these weights; they are not copied."""
        for part, weights in published.items():
            share(self.blocks[self.frame.names().index(part)], weights)

    def payload(self, index: int, seed: int, step: int) -> bytes:
        """What block `index` reads in one local step of the place whose batches come from `seed`."""
        config = self.frame.config
        text = self.corpus.batch(seed, step, config.sequences, config.architecture.context_bytes + 1)
        x = text[:, :-1]
        # as the copies of a worker run
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            for block in self.blocks[:index]:
                x, _ = block.read(x)
        return self.format.encode(x.float())


def names_before(index: int) -> tuple[str, ...]:
    """The parts whose blocks make what block `index` reads."""
    return tuple(map(block_name, range(index)))


def feed_nothing(part: Part, frame: Frame) -> Part:
    """The part with features of zeros, where only what it costs is of interest."""
    if isinstance(part, FedPart):
        form = FeatureFormat.of(frame.config)
        part.feed(lambda step: torch.zeros(form.sequences, form.positions, form.width))
    return part
