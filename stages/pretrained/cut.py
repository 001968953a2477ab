"""Cutting a model into contiguous stages of about equal cost.

The cost of a layer, and of the head, is the numbers in its matrices: each is read from memory once for a token and
multiplied once, whether the step waits for memory or for arithmetic. Counting them gives the same cut on every
machine, which timing them does not. The embedding costs a step nothing, for one row of it is read, but memory: among
equally fast cuts, the one whose largest stage is smallest wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stages.errors import InputError
from stages.llama.architecture import LlamaArchitecture


@dataclass(frozen=True)
class StageCost:
    """What a stage costs its host."""

    layers: int
    step: int
    """Numbers that each token's step reads."""
    held: int
    """Numbers in memory."""


def layer_cost(architecture: LlamaArchitecture) -> int:
    a = architecture
    return a.width * (a.qkv_width + a.query_width + 3 * a.mlp_width)


def stage_cost(architecture: LlamaArchitecture, layers: int, first: bool, last: bool) -> StageCost:
    """Of a stage of so many layers, with the embedding if it is the first and the head if it is the last."""
    table = architecture.vocabulary * architecture.width
    step = layers * layer_cost(architecture) + last * table
    return StageCost(layers, step, step + first * table)


def cut(architecture: LlamaArchitecture, stages: int) -> tuple[int, ...]:
    """Layers of each stage, such that the slowest is as fast as can be. architecture: uncut. Raises InputError."""
    total = sum(architecture.layers)
    if not 1 <= stages <= total:
        raise InputError(f"--blocks {stages}: the model has {total} layers, and every stage needs one at least")

    @lru_cache(None)
    def best(begin: int, left: int) -> tuple[int, int, int, tuple[int, ...]]:
        """Of the layers from `begin` on in `left` stages: worst step, most held, layers moved to the front, the cut."""
        ways: list[tuple[int, int, int, tuple[int, ...]]] = []
        for count in range(1, total - begin - left + 2) if left > 1 else [total - begin]:
            cost = stage_cost(architecture, count, begin == 0, left == 1)
            if left == 1:
                ways.append((cost.step, cost.held, 0, (count,)))
                continue
            step, held, spread, rest = best(begin + count, left - 1)
            squares = spread + (count * count)
            ways.append((max(step, cost.step), max(held, cost.held), squares, (count, *rest)))
        return min(ways)

    return best(0, stages)[3]
