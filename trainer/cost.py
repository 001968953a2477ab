"""What a way of training asks of one worker, counted from the tensors that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from trainer.config import TrainingConfig
from trainer.lookahead import Workers
from trainer.optimizer import OptimizerSet

FORWARD, THROUGH, TRAINED = 1, 2, 3
"""Passes of a layer that is read, that a gradient goes through, and that is trained."""
FP32_BYTES, INT8_BYTES = 4, 1


@dataclass(frozen=True)
class WorkerCost:
    """Of the worker that has most to do."""

    state_bytes: int
    """Weights, gradients and optimizer state of what it trains, and the frozen copies."""
    refresh_bytes: int
    """Copies that it downloads in the whole run."""
    feature_bytes: int
    """Features of the stage before that it downloads in the whole run, in int8."""
    passes: int
    """Layers times passes in a step; of all workers together."""


def end_to_end_cost(model: nn.Module, layers: int, config: TrainingConfig) -> WorkerCost:
    """Of one worker that trains everything."""
    return WorkerCost(trained_bytes(model, config), 0, 0, layers * TRAINED)


def scorer_cost(workers: Workers, config: TrainingConfig) -> WorkerCost:
    """Of workers with one stage each."""
    lookahead, stages = config.lookahead, workers.stages
    per_weight = INT8_BYTES if lookahead.copies == "int8" else FP32_BYTES
    refreshes, live = -(-config.steps // lookahead.refresh_every), lookahead.features == "live"
    states, downloads, passes = [], [], 0
    for index, stage in enumerate(stages):
        head = [] if stage.is_last else [workers.heads[index]]
        seen = [*([] if live else stages[:index]), *(stages[index + 1 :] if lookahead.ahead else [])]
        copies = sum(_numbers(other.parameters()) for other in seen) * per_weight
        states.append(trained_bytes(nn.ModuleList([stage, *head]), config) + copies)
        downloads.append(copies * refreshes)
        layers = stage.architecture.layers
        ahead = (len(stages) - 1 - index) * layers * THROUGH if lookahead.ahead else 0
        private = 0 if stage.is_last else lookahead.private_layers * TRAINED
        before = 0 if live else index * layers * FORWARD
        passes += before + layers * TRAINED + ahead + private
    a = stages[0].architecture
    features = config.steps * config.sequences * a.context_bytes * a.width * INT8_BYTES if live else 0
    return WorkerCost(max(states), max(downloads), features, passes)


def trained_bytes(module: nn.Module, config: TrainingConfig) -> int:
    """Weights and gradients once, one moment under Muon and two under AdamW: all fp32."""
    muon, adamw = (
        _numbers(optimizer.param_groups[0]["params"]) for optimizer in OptimizerSet(module, config).optimizers
    )
    return (3 * muon + 4 * adamw) * FP32_BYTES


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
