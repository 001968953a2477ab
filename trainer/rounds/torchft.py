"""The engine over torchft (github.com/pytorch/torchft): real processes, a Lighthouse that knows who takes part, and
torchft's DiLoCo. There is no coordinator: every replica has everything."""

# 0.2.0 is the first release in Python wheels with DiLoCo; nightlies change without notice.

import contextlib
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from onesweep.stages.errors import ConfigError, InputError
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.blocks.round_settings import MAX_SECONDS, RoundSettings
from onesweep.trainer.rounds.codecs import Tensors, numel, shapes
from onesweep.trainer.rounds.parts import Learner
from onesweep.trainer.rounds.processes import SubprocessPool, Tell
from onesweep.trainer.rounds.settings import SimulatedWorkers, Throttle
from onesweep.trainer.rounds.simulation import RoundsTraffic, Trained, WorkerTally, check_real
from onesweep.trainer.rounds.spec import RunSpec, replica_seed

QUIET = ("RUST_LOG", "error")  # torchft's servers log every heartbeat otherwise. To be set before it is imported.
LOOPBACK = "127.0.0.1"
CALL_S = 600.0  # longest exchange of a round, once it is clear who takes part


@dataclass(frozen=True)
class ReplicaPlace:
    """The replica that a process is, and the address where the others meet."""

    part: int
    replica: int
    needed: int  # replicas without which no round is made
    lighthouse: str  # URL of the part's
    out: Path  # file for the last weights


@dataclass(frozen=True)
class ReplicaReport:
    """A replica's message after each round, and at its end."""

    made: int = 0  # local steps
    merged: int = 0  # rounds in which its own work was averaged
    thrown: int = 0  # rounds of which nothing was left, for the others had gone on
    busy_s: float = 0.0
    seconds: float = 0.0  # from when all were there
    finished: bool = False  # whether it was there when the last round was made


def replicate(
    tell: Tell,
    seat: ReplicaPlace,
    spec: RunSpec,
    corpus: Corpus,
    fleet: SimulatedWorkers,
    all_here: Barrier,
    over: Event,
) -> None:
    """Make all rounds of a part, or as many as there are before `over`. Raises ConfigError of a training."""
    os.environ.setdefault(*QUIET)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    logging.getLogger("torchft").setLevel(logging.ERROR)  # it warns of NCCL, which is not used,
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # and of how it reads a peer's weights
    settings, pace = spec.config.rounds, Throttle(fleet)
    learner = Learner(spec.task(seat.part, corpus, replica_seed(spec.config.seed, seat.replica)), spec.config)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    replaced = False  # true if the state of this replica was replaced by that of one that is ahead

    def take(state: Mapping[str, Any]) -> None:
        nonlocal replaced
        learner.load(state["weights"])
        learner.optimizers.restore(state["optimizers"])
        replaced = True

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=CALL_S)),
        load_state_dict=take,
        state_dict=lambda: {"weights": learner.weights(), "optimizers": learner.optimizers.tensors()},
        min_replica_size=seat.needed,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        timeout=timedelta(seconds=CALL_S),
        quorum_timeout=timedelta(seconds=MAX_SECONDS),
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=seat.lighthouse,
        hostname=LOOPBACK,
        replica_id=f"{learner.part.name}-{seat.replica}",
    )
    module = learner.part.module
    # A local step of ours is one of Muon and one of AdamW, and torchft's DiLoCo counts the steps of one optimizer: it
    # gets one that does nothing. Its hook merges inside that optimizer's step, so waiting is not counted as training.
    counter = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    merged = thrown = 0

    def say(finished: bool = False) -> None:
        tell(ReplicaReport(pace.steps, merged, thrown, pace.busy_s, time.monotonic() - begin, finished))

    all_here.wait()
    begin = time.monotonic()
    with DiLoCo(manager, [module], counter, torch_outer(settings, module), settings.steps_per_round):
        while manager.current_step() < settings.rounds:
            first = manager.current_step() * settings.steps_per_round
            replaced = False
            for step in range(first, first + settings.steps_per_round):
                if over.is_set():
                    say()
                    manager.shutdown(wait=False)
                    return
                with pace.step(seat.replica):
                    learner.train(step, 1)
                counter.step()  # the last one of a round exchanges and merges
            counts = manager.current_step() * settings.steps_per_round > first and not replaced
            merged, thrown = merged + counts, thrown + (not counts)
            if manager.current_step() < settings.rounds:
                say()
    save_file(learner.weights(), seat.out)
    say(finished=True)
    over.wait()  # others may be in the middle of the last exchange
    manager.shutdown(wait=False)


def torch_outer(settings: RoundSettings, module: nn.Module) -> torch.optim.Optimizer:
    """The outer optimizer as one of torch's: `mean` goes where the mean of the workers is."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.outer == "mean":
        return torch.optim.SGD(parameters, lr=1.0)
    momentum = settings.outer_momentum
    return torch.optim.SGD(parameters, lr=settings.outer_rate, momentum=momentum, nesterov=momentum > 0)


FAREWELL_S = 1.0  # time in which the other replicas finish the last round
DISMISSED_S = 3.0  # time in which replicas that are behind report, once the run is over


class TorchftEngine:
    def check(self, config: TrainingConfig, fleet: SimulatedWorkers) -> None:
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

    def train(self, spec: RunSpec, corpus: Corpus, fleet: SimulatedWorkers) -> Trained:
        os.environ.setdefault(*QUIET)
        from torchft.coordination import LighthouseServer

        settings, parts = spec.config.rounds, spec.parts
        lockstep = settings.deadline == "lockstep"
        needed = settings.replicas if lockstep else settings.replicas // 2 + 1
        wait_s = MAX_SECONDS if lockstep else settings.deadline_s
        names = {part: [f"{part}-{replica}" for replica in range(settings.replicas)] for part in parts}
        workers = len(parts) * settings.replicas
        with (
            tempfile.TemporaryDirectory(prefix="onesweep-rounds-") as scratch,
            contextlib.ExitStack() as stack,
            SubprocessPool(workers) as crew,
        ):
            all_here, over = crew.context.Barrier(workers), {part: crew.context.Event() for part in parts}
            for index, part in enumerate(parts):
                lighthouse = LighthouseServer("127.0.0.1:0", needed, join_timeout_ms=int(1000 * wait_s))
                stack.callback(lighthouse.shutdown)
                port = lighthouse.address().rpartition(":")[2]
                for replica, name in enumerate(names[part]):
                    seat = ReplicaPlace(index, replica, needed, f"http://127.0.0.1:{port}", Path(scratch) / name)
                    crew.start(name, replicate, seat, spec, corpus, fleet, all_here, over[part])
            progress, first = _follow(crew, names, over, lockstep)
            weights = {part: load_file(Path(scratch) / first[part]) for part in parts}
        return _trained(weights, [[progress[name] for name in names[part]] for part in parts], settings)


def _follow(
    crew: SubprocessPool, names: dict[str, list[str]], over: Mapping[str, Event], lockstep: bool
) -> tuple[dict[str, ReplicaReport], dict[str, str]]:
    """The last word of every replica, and of each part the replica that was the first to make the last round."""
    progress = {name: ReplicaReport() for replicas in names.values() for name in replicas}
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


def _trained(weights: dict[str, Tensors], rows: Sequence[Sequence[ReplicaReport]], settings: RoundSettings) -> Trained:
    """:param rows: of each part, what its replicas said last."""
    everybody = [each for row in rows for each in row]
    exchanged = 0
    for tensors, row in zip(weights.values(), rows, strict=True):
        size = 4 * numel(shapes(tensors))
        exchanged += size * sum(each.merged + each.thrown for each in row)
    traffic = RoundsTraffic(
        up_bytes=exchanged,
        down_bytes=exchanged,
        updates=Counter(
            {"in time": sum(each.merged for each in everybody), "dropped": sum(each.thrown for each in everybody)}
        ),
        busy_s=sum(each.busy_s for each in everybody),
        seconds=max(min(each.seconds for each in row if each.finished) for row in rows),
    )
    tallies = [WorkerTally(each.made, each.merged * settings.steps_per_round, each.busy_s) for each in everybody]
    return Trained(weights, traffic, len(everybody), tallies)


def _beyond(settings: RoundSettings) -> list[str]:
    """A sentence for each setting that torchft does not have."""
    wrong = []
    if settings.overlap != "none":
        wrong.append("a worker waits for its round: overlap must be none")
    if settings.deadline == "adaptive":
        wrong.append("there is no adaptive deadline: give deadline = lockstep, or fixed with late = drop")
    if settings.deadline == "fixed" and settings.late != "drop":
        wrong.append("late work of any worker is lost: with deadline = fixed give late = drop")
    if (settings.codec, settings.down_codec) != ("fp32", "fp32"):
        wrong.append("pseudo-gradients are summed as they are: codec and down_codec must be fp32")
    if settings.robust != "none":
        wrong.append("whatever comes is averaged: robust must be none")
    if settings.fragments != 1:
        wrong.append("a part is exchanged whole: fragments must be 1")
    return wrong
