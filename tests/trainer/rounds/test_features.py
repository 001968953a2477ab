"""Features instead of copies: what travels, what is trained on it in one process, and where it is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from onesweep.stages.errors import CodecError, ConfigError
from onesweep.trainer.blocks.diagnostics import clean_features
from onesweep.trainer.blocks.round_settings import RoundSettings
from onesweep.trainer.planning.cost import LINKS
from onesweep.trainer.planning.plan import make_plan
from onesweep.trainer.rounds.codecs import load, subtract
from onesweep.trainer.rounds.comparison import arms
from onesweep.trainer.rounds.features import FeatureFormat, FeatureReader, names_before
from onesweep.trainer.rounds.parts import FedPart, Learner
from onesweep.trainer.rounds.settings import SimulatedWorkers
from onesweep.trainer.rounds.simulation import Simulation
from onesweep.trainer.rounds.spec import RunSpec, replica_seed
from tests.trainer.small import corpus, tiny

STEPS, ROUNDS = 2, 2


SETTINGS = RoundSettings(
    rounds=ROUNDS, steps_per_round=STEPS, replicas=1, outer="mean", deadline="lockstep", codec="fp32",
    down_codec="fp32", context_by="features",
)  # fmt: skip
# Three blocks, the last two of which get features.
CHAINED = replace(tiny.architecture, parts=3, layers=1, context="chained")
fed = replace(tiny, architecture=CHAINED, rounds=SETTINGS, valid_windows=2)


def test_what_travels_is_what_the_blocks_before_make() -> None:
    """Up to the codec: half a step of int8 of the largest number of each position."""
    spec = RunSpec.of(fed, corpus)
    blocks = [spec.module(index) for index in range(2)]
    reader = FeatureReader(spec.config, spec.codes, corpus)
    reader.take({name: spec.initial()[name] for name in names_before(2)})
    seed = replica_seed(fed.seed, 1)
    text = corpus.batch(seed, 7, fed.sequences, fed.architecture.context_length + 1)
    with torch.no_grad():
        expected, _ = clean_features(blocks, text[:, :-1])[-1]  # type: ignore[arg-type]
    payload = reader.payload(2, seed, 7)
    assert len(payload) == reader.format.step_bytes == fed.sequences * 32 * (fed.architecture.width + 4)
    found = reader.format.decode(payload)
    assert found.shape == expected.shape
    within = expected.abs().amax(dim=-1, keepdim=True) / 127 * 0.51
    assert bool(((found - expected).abs() <= within).all())
    with pytest.raises(CodecError, match="payload has"):
        reader.format.decode(payload[:-1])


def test_the_engine_is_a_loop_written_out_by_hand() -> None:
    """Round r of a block is trained on features that versions r of those before it make."""
    spec = RunSpec.of(fed, corpus)
    engine = Simulation(spec, corpus, SimulatedWorkers())
    engine.run()
    learners = [Learner(spec.task(index, corpus, spec.config.seed), spec.config) for index in range(3)]
    versions, form = spec.initial(), FeatureFormat.of(spec.config)
    for number in range(ROUNDS):
        trained = {}
        for index, learner in enumerate(learners):
            blocks = [spec.module(i) for i in range(index)]
            for block, name in zip(blocks, names_before(index), strict=True):
                load(block, versions[name])

            def made(step: int, blocks: list[Any] = blocks) -> torch.Tensor:
                text = corpus.batch(spec.config.seed, step, fed.sequences, fed.architecture.context_length + 1)
                with torch.no_grad():
                    features, _ = clean_features(blocks, text[:, :-1])[-1]
                return form.decode(form.encode(features))

            if index:
                assert isinstance(learner.part, FedPart)
                learner.part.feed = made
            name = spec.parts[index]
            learner.load(versions[name])
            learner.train(number * STEPS, STEPS)
            # the outer step of `mean`: the base minus the way that was made, in float32
            delta = subtract(versions[name], learner.weights())
            trained[name] = {key: tensor - delta[key] for key, tensor in versions[name].items()}
        versions = trained
    for name, weights in engine.published().items():
        assert all(torch.equal(weights[key], tensor) for key, tensor in versions[name].items())


def test_features_cost_what_copies_do_not() -> None:
    traffic = Simulation(RunSpec.of(fed, corpus), corpus, SimulatedWorkers()).run()
    assert traffic.copies_bytes == 0
    assert traffic.features_bytes == 2 * ROUNDS * STEPS * fed.sequences * 32 * (fed.architecture.width + 4)


def test_who_measures_has_all_blocks() -> None:
    spec = RunSpec.of(fed, corpus)
    copies = RunSpec.of(replace(fed, rounds=replace(fed.rounds, context_by="copies")), corpus)
    assert spec.evaluate(spec.initial(), corpus) == copies.evaluate(spec.initial(), corpus)


@pytest.mark.parametrize("changes", [{"model": "scorer"}, {"model": "ar"}, {"fragments": 2}])
def test_only_blocks_that_go_whole_get_features(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="context_by = features is for the blocks of a chain"):
        RoundSettings(context_by="features", **changes)


def test_features_that_cannot_be_are_refused() -> None:
    own = replace(fed, architecture=replace(fed.architecture, context="own"))
    with pytest.raises(ConfigError, match='give context = "chained" in'):
        RunSpec.of(own, corpus)
    with pytest.raises(ConfigError, match='give context = "chained" in'):
        make_plan(own, LINKS["lan"], 1.0, as_set=True)
    huge = replace(fed, rounds=replace(fed.rounds, steps_per_round=2**31))
    with pytest.raises(ConfigError, match="the features of a round are 2,748,779,069,440 bytes, above 68,719,476,736"):
        RunSpec.of(huge, corpus)


def test_features_can_be_varied_and_planned() -> None:
    found = arms(fed, SimulatedWorkers(), {"context_by": ["copies", "features"]})
    assert [arm.config.rounds.context_by for arm in found] == ["copies", "features"]
    rows = {row.name: row for row in make_plan(fed, LINKS["consumer"], 1.0, as_set=True)}
    assert rows["as set"].down_bytes == rows["features"].down_bytes
    assert rows["as set"].memory.copies < rows["diloco"].memory.copies
    assert rows["diloco"].timing.training_s > rows["features"].timing.training_s
