"""The engine in one process against loops written out by hand, and what late, lost and slow workers do to it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.small import corpus, tiny
from trainer.blocks.config import RoundSettings, TrainingConfig
from trainer.blocks.run import OptimizerSet, train_step
from trainer.blocks.state import digest
from trainer.rounds.codecs import load, subtract, trainable
from trainer.rounds.comparison import PooledCorpus
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec, replica_seed

EXACT = {"codec": "fp32", "down_codec": "fp32"}
LOCKSTEP: dict[str, Any] = {"rounds": 3, "steps_per_round": 2, "deadline_s": 0, **EXACT}


def make(config: TrainingConfig, fleet: SimulatedWorkers | None = None, **rounds: Any) -> Simulation:
    settings = RoundSettings(**{**LOCKSTEP, **rounds})
    return Simulation(RunSpec.of(replace(config, rounds=settings), corpus), corpus, fleet or SimulatedWorkers())


# One part, so that what is about time costs little.
small = replace(tiny, architecture=replace(tiny.architecture, parts=1, layers=1))


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_the_simulation_is_diloco_bit_for_bit(rate: float, momentum: float) -> None:
    engine = make(tiny, outer_rate=rate, outer_momentum=momentum)
    engine.run()

    config = replace(tiny, steps=6)
    for index, name in enumerate(engine.spec.parts):
        replicas = [engine.spec.task(index, corpus, replica_seed(config.seed, i)) for i in range(2)]
        inner = [OptimizerSet(task.module, config) for task in replicas]
        theta = trainable(replicas[0].module)
        buffer = {key: torch.zeros_like(tensor) for key, tensor in theta.items()}
        for number in range(3):
            deltas = []
            for task, optimizer in zip(replicas, inner, strict=True):
                load(task.module, theta)
                for step in range(2 * number, 2 * number + 2):
                    train_step(task, optimizer, config, step)
                deltas.append(subtract(theta, trainable(task.module)))
            for key in theta:
                mean = torch.stack([delta[key] for delta in deltas]).mean(dim=0)
                if not momentum:
                    theta[key] = theta[key] - mean
                else:
                    buffer[key] = mean + 0.9 * buffer[key]
                    theta[key] = theta[key] - 0.7 * (mean + 0.9 * buffer[key])
        for key, tensor in theta.items():
            assert torch.equal(engine.published()[name][key], tensor)


def test_the_same_run_gives_the_same_bits() -> None:
    fleet = SimulatedWorkers(in_time=0.6, lost=0.2, slowness=(1.0, 3.0))
    runs = []
    for _ in range(2):
        engine = make(small, fleet, model="ar", deadline_s=600.0, rounds=5, codec="e3m0", down_codec="int8")
        traffic = engine.run()
        runs.append(([digest(weights) for weights in engine.published().values()], traffic))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("model", ["chain", "scorer", "ar"])
def test_every_model_is_trained_and_measured(model: str) -> None:
    config = replace(tiny, architecture=replace(tiny.architecture, layers=1))
    engine = make(config, model=model, rounds=2)
    begin = engine.published()
    engine.run()
    assert all(digest(begin[name]) != digest(weights) for name, weights in engine.published().items())
    losses = engine.spec.evaluate(engine.published(), corpus)
    assert 0 < losses["next_byte"] < 7
    assert (engine.traffic.copies_bytes > 0) == (model == "scorer")


def test_replicas_read_different_text_and_the_pooled_corpus_all_of_it() -> None:
    assert replica_seed(5, 0) == 5
    assert len({replica_seed(5, i) for i in range(50)} | {replica_seed(6, i) for i in range(1, 50)}) == 99
    pooled = PooledCorpus(corpus.name, corpus.train, corpus.valid, replicas=2)
    both = [corpus.batch(replica_seed(5, i), 3, 2, 16) for i in range(2)]
    assert torch.equal(pooled.batch(5, 3, 4, 16), torch.cat(both))


def test_a_lockstep_round_does_not_wait_for_an_update_that_was_refused() -> None:
    engine = make(small, SimulatedWorkers(lie=-200), model="ar", replicas=3)
    assert engine.run().updates == {"in time": 6, "refused": 3}
