"""Features instead of copies: what travels, what is trained on it in one process, and where it is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.errors import CodecError
from tests.trainer.small import corpus, tiny
from trainer.blocks.config import RoundSettings
from trainer.rounds.codecs import subtract
from trainer.rounds.parts import FeatureFormat, Learner, load_copies
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec

STEPS, ROUNDS = 2, 2


SETTINGS = RoundSettings(
    rounds=ROUNDS, steps_per_round=STEPS, replicas=1, deadline_s=0, codec="fp32",
    down_codec="fp32", model="scorer",
)  # fmt: skip
# Three stages, the last two of which get features.
fed = replace(tiny, architecture=replace(tiny.architecture, parts=3, layers=1), rounds=SETTINGS, valid_windows=2)


def test_features_of_a_step_travel_in_int8() -> None:
    """Up to the codec: half a step of int8 of the largest number of each position."""
    form = FeatureFormat.of(fed)
    made = torch.randn(form.sequences, form.positions, form.width, generator=torch.Generator().manual_seed(1))
    payload = form.encode(made)
    assert len(payload) == form.step_bytes == fed.sequences * 32 * (fed.architecture.width + 4)
    within = made.abs().amax(dim=-1, keepdim=True) / 127 * 0.51
    assert bool(((form.decode(payload) - made).abs() <= within).all())
    with pytest.raises(CodecError, match="payload has"):
        form.decode(payload[:-1])


def test_the_engine_matches_a_loop_written_out_by_hand() -> None:
    """Each step goes through all parts; what the one before made in the same step is what a part reads."""
    spec = RunSpec.of(fed, corpus)
    engine = Simulation(spec, corpus, SimulatedWorkers())
    engine.run()
    learners = [Learner(spec.task(index, corpus, spec.config.seed), spec.config) for index in range(3)]
    versions, form, made = spec.initial(), FeatureFormat.of(spec.config), dict[int, Tensor]()
    for index, learner in enumerate(learners):
        neighbours = learner.part.neighbours
        neighbours.read = (lambda _, before=index - 1: form.decode(form.encode(made[before]))) if index else None
        neighbours.send = lambda _, features, index=index: made.update({index: features.detach()})
    for number in range(ROUNDS):
        for name, learner in zip(spec.parts, learners, strict=True):
            learner.load(versions[name])
            load_copies(learner.part, versions)
        for step in range(number * STEPS, (number + 1) * STEPS):
            for learner in learners:
                learner.train(step, 1)
        for name, learner in zip(spec.parts, learners, strict=True):
            # the outer step of `mean`: the base minus the way that was made, in float32
            delta = subtract(versions[name], learner.weights())
            versions[name] = {key: tensor - delta[key] for key, tensor in versions[name].items()}
    for name, weights in engine.published().items():
        assert all(torch.equal(weights[key], tensor) for key, tensor in versions[name].items())


def test_parts_train_at_the_same_time() -> None:
    """A round of three parts lasts its steps, and two more until the last part has what it reads."""
    fleet = SimulatedWorkers(step_s=100.0, latency_s=0.001)
    traffic = Simulation(RunSpec.of(fed, corpus), corpus, fleet).run()
    assert traffic.seconds == pytest.approx(ROUNDS * (STEPS + 2) * 100, abs=5)


def test_a_stage_that_reads_features_has_no_copies_of_earlier_stages() -> None:
    spec = RunSpec.of(fed, corpus)
    held = [list(spec.task(index, corpus, 0).copies) for index in range(3)]
    assert held == [["stage-1", "stage-2"], ["stage-2"], []]


@pytest.mark.parametrize("changes", [{"model": "ar"}, {"model": "chain"}, {"context_by": "copies"}])
def test_only_stages_of_a_scorer_get_features(changes: dict[str, Any]) -> None:
    assert RoundSettings(model="scorer").by_features
    assert not RoundSettings(**{"model": "scorer", **changes}).by_features
