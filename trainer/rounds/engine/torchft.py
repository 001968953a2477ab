"""Real processes that torchft holds together (github.com/pytorch/torchft): its Lighthouse says who takes part in a
round, its DiLoCo averages and steps. There is no coordinator: everybody has everything."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from stages.errors import ConfigError, InputError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.engine.base import Tally, Trained, check_real
from trainer.rounds.engine.crew import Crew
from trainer.rounds.engine.replica import QUIET, Progress, Seat, replicate
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.inprocess import Traffic
from trainer.rounds.settings import MAX_SECONDS, RoundSettings

FAREWELL_S = 1.0
"""How long the others of the last round have to come to its end."""
DISMISSED_S = 3.0
"""How long those who are behind have to say what they did, once the run is over."""


class Torchft:
    def check(self, config: TrainingConfig, fleet: Fleet) -> None:
        if importlib.util.find_spec("torchft") is None:
            raise InputError("engine torchft is not installed: pip install 'onesweep[torchft]' (Linux on x86-64 only)")
        check_real(fleet)
        model, context = config.rounds.model, config.architecture.context
        if model == "scorer" or (model == "chain" and context == "chained"):
            raise ConfigError(
                "torchft knows nothing of other parts, and these read copies of them: give model = ar, or context = own"
            )
        for wrong in _beyond(config.rounds):
            raise ConfigError(f"engine torchft: {wrong}")

    def train(self, frame: Frame, corpus: Corpus, fleet: Fleet) -> Trained:
        os.environ.setdefault(*QUIET)
        from torchft.coordination import LighthouseServer

        settings, parts = frame.config.rounds, frame.names()
        lockstep = settings.deadline == "lockstep"
        names = {part: [f"{part}-{replica}" for replica in range(settings.replicas)] for part in parts}
        workers = len(parts) * settings.replicas
        needed = settings.replicas if lockstep else settings.replicas // 2 + 1
        wait_s = MAX_SECONDS if lockstep else settings.deadline_s
        progress: dict[str, Progress] = {}
        first: dict[str, str] = {}
        """Of each part, the replica that was the first to make the last round."""
        with (
            tempfile.TemporaryDirectory(prefix="onesweep-rounds-") as scratch,
            contextlib.ExitStack() as stack,
            Crew(workers) as crew,
        ):
            all_here, over = crew.context.Barrier(workers), {part: crew.context.Event() for part in parts}
            for index, part in enumerate(parts):
                lighthouse = LighthouseServer(
                    bind="127.0.0.1:0", min_replicas=needed, join_timeout_ms=int(1000 * wait_s)
                )
                stack.callback(lighthouse.shutdown)
                port = lighthouse.address().rpartition(":")[2]
                for replica, name in enumerate(names[part]):
                    seat = Seat(index, replica, needed, f"http://127.0.0.1:{port}", Path(scratch) / name)
                    crew.start(name, replicate, seat, frame, corpus, fleet, all_here, over[part])
            for name, word in crew.told():
                progress[name] = word
                part = next(part for part in parts if name in names[part])
                if not word.finished:
                    continue
                if part not in first:
                    first[part] = name
                    if not lockstep:
                        time.sleep(FAREWELL_S)
                        over[part].set()
                        crew.dismiss(names[part], DISMISSED_S)
                elif lockstep and all(progress[other].finished for other in names[part]):
                    over[part].set()
            weights = {part: load_file(Path(scratch) / first[part]) for part in parts}
        size = {part: sum(4 * tensor.numel() for tensor in tensors.values()) for part, tensors in weights.items()}
        said = {part: [progress.get(name, Progress()) for name in names[part]] for part in parts}
        everybody = [each for part in parts for each in said[part]]
        exchanged = sum(size[part] * (each.merged + each.thrown) for part in parts for each in said[part])
        return Trained(
            weights,
            Traffic(
                up_bytes=exchanged,
                down_bytes=exchanged,
                updates=Counter(
                    {"in time": sum(e.merged for e in everybody), "dropped": sum(e.thrown for e in everybody)}
                ),
                busy_s=sum(each.busy_s for each in everybody),
                seconds=max(progress[name].seconds for name in first.values()),
            ),
            workers,
            [Tally(each.made, each.merged * settings.steps_per_round, each.busy_s) for each in everybody],
        )


def _beyond(settings: RoundSettings) -> list[str]:
    """What torchft does otherwise, or not at all; a sentence each."""
    wrong = []
    if settings.outer not in ("mean", "nesterov"):
        wrong.append(f"the outer optimizer is mean or nesterov, not {settings.outer}")
    if settings.overlap != "none":
        wrong.append("a worker waits for its round: overlap must be none")
    if settings.deadline == "adaptive":
        wrong.append("there is no adaptive deadline: give deadline = lockstep, or fixed with late = drop")
    if settings.deadline == "fixed" and settings.late != "drop":
        wrong.append("late work is lost, whoever it is of: with deadline = fixed give late = drop")
    if (settings.codec, settings.down_codec) != ("fp32", "fp32"):
        wrong.append("pseudo-gradients are summed as they are: codec and down_codec must be fp32")
    if settings.robust != "none":
        wrong.append("whatever comes is averaged: robust must be none")
    if settings.fragments != 1:
        wrong.append("a part is exchanged whole: fragments must be 1")
    return wrong
