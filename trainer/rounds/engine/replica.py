"""One replica of one part under torchft: local steps as everywhere, and torchft's DiLoCo at the end of each round."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.data import Corpus
from trainer.rounds.engine.crew import Tell
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.learner import Learner
from trainer.rounds.pace import Pace
from trainer.rounds.settings import MAX_SECONDS, RoundSettings
from trainer.rounds.shards import replica_seed

QUIET = ("RUST_LOG", "error")
"""torchft's servers log every heartbeat otherwise. To be set before it is imported."""
HOST = "127.0.0.1"
CALL_S = 600.0
"""Longest exchange of a round, once it is clear who takes part."""


@dataclass(frozen=True)
class Seat:
    """Which replica a process is, and where the others meet."""

    part: int
    replica: int
    needed: int
    """Replicas without which no round is made."""
    lighthouse: str
    """URL of the part's."""
    out: Path
    """File for the last weights."""


@dataclass(frozen=True)
class Progress:
    """What a replica says after each round, and at its end."""

    made: int = 0
    """Local steps."""
    merged: int = 0
    """Rounds in which its own work was averaged."""
    thrown: int = 0
    """Rounds of which nothing was left, for the others had gone on."""
    busy_s: float = 0.0
    seconds: float = 0.0
    """From when all were there."""
    finished: bool = False
    """Whether it was there when the last round was made."""


def replicate(
    tell: Tell, seat: Seat, frame: Frame, corpus: Corpus, fleet: Fleet, all_here: Barrier, over: Event
) -> None:
    """Make all rounds of a part, or as many as there are before `over`. Raises ConfigError of a training."""
    os.environ.setdefault(*QUIET)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    logging.getLogger("torchft").setLevel(logging.ERROR)  # it warns of NCCL, which is not used,
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # and of how it reads a peer's weights
    settings, pace = frame.config.rounds, Pace(fleet)
    learner = Learner(frame.task(seat.part, corpus, replica_seed(frame.config.seed, seat.replica)), frame.config)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    state = State(learner)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=CALL_S)),
        load_state_dict=state.load,
        state_dict=state.save,
        min_replica_size=seat.needed,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        timeout=timedelta(seconds=CALL_S),
        quorum_timeout=timedelta(seconds=MAX_SECONDS),
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=seat.lighthouse,
        hostname=HOST,
        replica_id=f"{learner.part.name}-{seat.replica}",
    )
    module = learner.part.module
    # a local step is one of two optimizers, but DiLoCo counts those of one: it gets one that does nothing else
    counter = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    merged = thrown = 0

    def say(finished: bool = False) -> None:
        tell(Progress(pace.steps, merged, thrown, pace.busy_s, time.monotonic() - begin, finished))

    all_here.wait()
    begin = time.monotonic()
    with DiLoCo(manager, [module], counter, new_outer(settings, module), settings.steps_per_round):
        while manager.current_step() < settings.rounds:
            first = manager.current_step() * settings.steps_per_round
            state.replaced = False
            for step in range(first, first + settings.steps_per_round):
                if over.is_set():
                    say()
                    manager.shutdown(wait=False)
                    return
                with pace.step(seat.replica):
                    learner.train(step, 1)
                counter.step()  # the last one of a round exchanges and merges
            counts = manager.current_step() * settings.steps_per_round > first and not state.replaced
            merged, thrown = merged + counts, thrown + (not counts)
            if manager.current_step() < settings.rounds:
                say()
    save_file(learner.weights(), seat.out)
    say(finished=True)
    over.wait()  # others may be in the middle of the last exchange
    manager.shutdown(wait=False)


class State:
    """What torchft copies from a replica to one that is behind: weights and inner optimizer."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.replaced = False
        """Whether what this replica had was replaced by that of another."""

    def save(self) -> dict[str, Any]:
        return {"weights": self.learner.weights(), "optimizers": self.learner.optimizers.tensors()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.learner.load(state["weights"])
        self.learner.optimizers.restore(state["optimizers"])
        self.replaced = True


def new_outer(settings: RoundSettings, module: nn.Module) -> torch.optim.Optimizer:
    """The outer optimizer as one of torch's: `mean` goes where the mean of the workers is."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.outer == "mean":
        return torch.optim.SGD(parameters, lr=1.0)
    momentum = settings.outer_momentum
    return torch.optim.SGD(parameters, lr=settings.outer_rate, momentum=momentum, nesterov=momentum > 0)
