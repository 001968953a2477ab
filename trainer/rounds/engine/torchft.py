"""Real processes that torchft holds together (github.com/pytorch/torchft): its Lighthouse says who takes part in a
round, its DiLoCo averages and steps. There is no coordinator: everybody has everything."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.synchronize import Event
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
from trainer.rounds.tensors import Tensors, numel, shapes

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
        needed = settings.replicas if lockstep else settings.replicas // 2 + 1
        wait_s = MAX_SECONDS if lockstep else settings.deadline_s
        names = {part: [f"{part}-{replica}" for replica in range(settings.replicas)] for part in parts}
        workers = len(parts) * settings.replicas
        with (
            tempfile.TemporaryDirectory(prefix="onesweep-rounds-") as scratch,
            contextlib.ExitStack() as stack,
            Crew(workers) as crew,
        ):
            all_here, over = crew.context.Barrier(workers), {part: crew.context.Event() for part in parts}
            for index, part in enumerate(parts):
                lighthouse = LighthouseServer("127.0.0.1:0", needed, join_timeout_ms=int(1000 * wait_s))
                stack.callback(lighthouse.shutdown)
                port = lighthouse.address().rpartition(":")[2]
                for replica, name in enumerate(names[part]):
                    seat = Seat(index, replica, needed, f"http://127.0.0.1:{port}", Path(scratch) / name)
                    crew.start(name, replicate, seat, frame, corpus, fleet, all_here, over[part])
            progress, first = _follow(crew, names, over, lockstep)
            weights = {part: load_file(Path(scratch) / first[part]) for part in parts}
        return _trained(weights, [[progress[name] for name in names[part]] for part in parts], settings)


def _follow(
    crew: Crew, names: dict[str, list[str]], over: Mapping[str, Event], lockstep: bool
) -> tuple[dict[str, Progress], dict[str, str]]:
    """The last word of every replica, and of each part the replica that was the first to make the last round."""
    progress = {name: Progress() for replicas in names.values() for name in replicas}
    part_of = {name: part for part, replicas in names.items() for name in replicas}
    first: dict[str, str] = {}
    for name, word in crew.told():
        progress[name], part = word, part_of[name]
        if not word.finished:
            continue
        begins = part not in first
        first.setdefault(part, name)
        if lockstep and all(progress[other].finished for other in names[part]):
            over[part].set()
        elif begins and not lockstep:
            time.sleep(FAREWELL_S)
            over[part].set()
            crew.dismiss(names[part], DISMISSED_S)
    return progress, first


def _trained(weights: dict[str, Tensors], rows: Sequence[Sequence[Progress]], settings: RoundSettings) -> Trained:
    """:param rows: of each part, what its replicas said last."""
    everybody = [each for row in rows for each in row]
    exchanged = 0
    for tensors, row in zip(weights.values(), rows, strict=True):
        size = 4 * numel(shapes(tensors))
        exchanged += size * sum(each.merged + each.thrown for each in row)
    traffic = Traffic(
        up_bytes=exchanged,
        down_bytes=exchanged,
        updates=Counter(
            {"in time": sum(each.merged for each in everybody), "dropped": sum(each.thrown for each in everybody)}
        ),
        busy_s=sum(each.busy_s for each in everybody),
        seconds=max(min(each.seconds for each in row if each.finished) for row in rows),
    )
    tallies = [Tally(each.made, each.merged * settings.steps_per_round, each.busy_s) for each in everybody]
    return Trained(weights, traffic, len(everybody), tallies)


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
