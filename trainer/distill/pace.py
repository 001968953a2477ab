"""How long a drafter takes for a symbol, computed as the router will compute it."""

from __future__ import annotations

import time

import torch

from stages.ar import new_caches
from stages.backends import drafting_runner
from stages.backends.base import CleanPiece
from stages.families import PipelineStage

STEPS = 24


@torch.inference_mode()
def draft_ms(stage: PipelineStage) -> float:
    """Processor time of the quickest of some steps from one symbol to the odds of the next.

    On a machine that does other things too, it says more than a clock on the wall.

    stage: the whole drafter; its matrices may be taken over.
    """
    a, runner, taken = stage.architecture, drafting_runner(stage), list[float]()
    steps = min(STEPS, a.positions)
    caches = new_caches(a.layers_in(0), a, steps)
    for symbol in torch.arange(steps) % a.vocabulary:
        begin = time.process_time()
        (hidden,) = runner.read([CleanPiece(symbol[None], caches)])
        runner.next_byte([hidden])
        taken.append(1000 * (time.process_time() - begin))
    return min(taken)
