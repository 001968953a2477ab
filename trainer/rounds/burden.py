"""What a step asks of a worker, measured on real steps: memory and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from trainer.data import Corpus
from trainer.memory import measure
from trainer.rounds.feature_reader import FeatureReader, feed_nothing
from trainer.rounds.frame import Frame


@dataclass(frozen=True)
class Burden:
    """Of the parts of a run."""

    memory_bytes: int
    """Of the worker that holds most: weights, gradients, optimizer state, activations and frozen copies."""
    copies_bytes: int
    """The frozen copies among them."""
    step_gflop: float
    """Matrix products of a local step, forward and backward, in 1e9 operations; the mean over parts."""
    feeding_gflop: float
    """Those that a coordinator makes for it, where workers get features; the mean over parts."""


def measure_burden(frame: Frame, corpus: Corpus) -> Burden:
    """Take one step of each part, as it begins."""
    held, operations = [], 0
    for index in range(len(frame.names())):
        part = feed_nothing(frame.task(index, corpus, frame.config.seed), frame)
        use = measure(part.module, frame.config, lambda part=part: part.loss(0).total, part.frozen)  # type: ignore[misc]
        copies = sum(p.numel() * p.element_size() for copy in part.frozen for p in copy.parameters())
        held.append((use.total, copies))
        with FlopCounterMode(display=False) as counter:
            part.loss(1).total.backward()
        operations += counter.get_total_flops()
    memory, copies = max(held)
    return Burden(memory, copies, operations / len(held) / 1e9, _feeding(frame, corpus) / len(held) / 1e9)


def _feeding(frame: Frame, corpus: Corpus) -> int:
    """Operations of a coordinator for one step of a worker of each part."""
    if frame.config.rounds.context_by != "features":
        return 0
    reader = FeatureReader(frame, corpus)
    with FlopCounterMode(display=False) as counter:
        for index in range(1, len(frame.names())):
            reader.payload(index, frame.config.seed, 0)
    return counter.get_total_flops()
