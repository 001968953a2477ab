"""What all workers of a run share, and the parts that come of it: equal on every machine, by digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from stages.ar import ArModel, ArStage
from stages.block import Block
from stages.codes import Codes
from stages.errors import ConfigError
from stages.partition import NoisePartition
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.diagnostics import chain_diagnostics
from trainer.entropy import make_partition
from trainer.evaluation import next_byte_nats
from trainer.lookahead import OwnHead
from trainer.rounds.feature_format import check_features, is_fed
from trainer.rounds.fragments import Cutting
from trainer.rounds.parts import (
    AR,
    HEAD,
    STAGE,
    AheadPart,
    ArPart,
    BlockPart,
    FedPart,
    Part,
    StagePart,
    block_name,
    stage_name,
    stage_weights,
)
from trainer.rounds.tensors import Tensors, load, parameter_shapes, trainable
from trainer.tasks import STEPS_PER_BLOCK


@dataclass(frozen=True)
class Frame:
    """Settled settings, and for a chain its codes and noise partition."""

    config: TrainingConfig
    codes: Codes
    partition: NoisePartition | None

    @classmethod
    def of(cls, config: TrainingConfig, corpus: Corpus, partition: NoisePartition | None = None) -> Frame:
        """:param partition: the run's, if it is known already; else it is measured, for a chain.

        Raises ConfigError for settings that do not go together, DataError for too little text.
        """
        model, architecture = config.rounds.model, config.architecture
        if config.rounds.lookahead and (model != "chain" or architecture.context != "chained"):
            raise ConfigError(
                "lookahead in [rounds] goes through the features that blocks pass on: "
                'give model = "chain" and context = "chained"; a scorer is set by the section [lookahead]'
            )
        if config.lookahead.copies != "fp32":
            raise ConfigError(
                f"copies = {config.lookahead.copies!r} in [lookahead] is for training in one place: over rounds give "
                "copies_codec in [rounds]"
            )
        check_features(config)
        corpus.require(architecture.context_bytes + 1)
        codes = Codes(config.noise.code_seed, architecture.code_dim)
        if model == "chain":
            partition = partition or make_partition(config.noise, architecture.parts, codes, corpus.train)
        else:
            config = replace(config, architecture=replace(architecture, context="own"))
        return cls(settled(config), codes, partition)

    def identity(self, corpus: Corpus) -> str:
        """Names the run: everything that decides its weights."""
        config = asdict(self.config)
        for name in ("log_every", "evaluate_every", "save_every_s"):
            config.pop(name)
        record = {"config": config, "data": corpus.digest()}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def names(self) -> tuple[str, ...]:
        """Of the parts, in order."""
        if self.config.rounds.model == "ar":
            return (AR,)
        named = block_name if self.config.rounds.model == "chain" else stage_name
        return tuple(named(index) for index in range(self.config.architecture.parts))

    def module(self, index: int) -> nn.Module:
        """A part as it begins, whatever was drawn before."""
        config, architecture = self.config, self.config.architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + index)
            match config.rounds.model:
                case "chain":
                    return Block(architecture, index, self.codes)
                case "ar":
                    return ArModel(architecture)
                case "scorer":
                    stage = nn.ModuleDict({STAGE: ArStage(architecture, index)})
                    if index < architecture.parts - 1:
                        stage[HEAD] = OwnHead(architecture, config.lookahead.private_layers)
                    return stage

    def initial(self) -> dict[str, Tensors]:
        """Version 0 of all parts."""
        return {name: trainable(self.module(index)) for index, name in enumerate(self.names())}

    def cutting(self) -> Cutting:
        """The fragments of all parts. Raises ConfigError for more of them than a part has tensors."""
        with torch.device("meta"):  # who holds one part has no room for all
            like = {name: parameter_shapes(self.module(index)) for index, name in enumerate(self.names())}
        return Cutting.of(like, self.config.rounds.fragments)

    def task(self, index: int, corpus: Corpus, seed: int) -> Part:
        """Part number `index`, for a worker whose batches and noise come from `seed`."""
        config, parts, module = replace(self.config, seed=seed), self.config.architecture.parts, self.module(index)
        if isinstance(module, ArModel):
            return ArPart(module, corpus, config)
        if isinstance(module, nn.ModuleDict):
            copies = [ArStage(config.architecture, i) for i in range(parts) if i != index]
            return StagePart(module, copies, corpus, config)
        assert isinstance(module, Block)
        assert self.partition is not None
        if is_fed(config, index):
            return FedPart(module, self.partition, corpus, config)
        chained = config.architecture.context == "chained"
        before = [Block(config.architecture, i, self.codes) for i in range(index if chained else 0)]
        if not config.rounds.lookahead:
            return BlockPart(module, before, self.partition, corpus, config)
        later = [Block(config.architecture, i, self.codes) for i in range(index + 1, parts)]
        return AheadPart(module, before, later, self.partition, corpus, config)

    def evaluate(self, published: Mapping[str, Tensors], corpus: Corpus) -> dict[str, float]:
        """Validation losses in nats of what was published: "next_byte" at its end; of a chain also those of the whole,
        as `chain_diagnostics` names them, and "PART KIND" of each block.
        """
        if self.config.rounds.model != "chain":
            text = corpus.valid_batch(self.config.valid_windows, self.config.architecture.context_bytes + 1)
            with torch.inference_mode():
                return {"next_byte": next_byte_nats(self.pipeline(published)(text[:, :-1]), text)}
        losses, blocks = dict[str, float](), list[Block]()
        rounds = replace(self.config.rounds, context_by="copies")  # who measures has all blocks
        whole = replace(self, config=replace(self.config, rounds=rounds))
        for index, name in enumerate(self.names()):
            task = whole.task(index, corpus, self.config.seed)
            load(task.module, published[name])
            task.see(published)
            task.module.eval()
            with torch.inference_mode():
                found = task.evaluate()
            assert isinstance(task.module, Block)
            blocks.append(task.module)
            kinds = {key.removeprefix("valid_").removesuffix("_nats"): nats for key, nats in found.items()}
            losses |= {f"{name} {kind}": nats for kind, nats in kinds.items() if not kind.endswith("_bits")}
        assert self.partition is not None
        text = corpus.valid_batch(self.config.valid_windows, self.config.architecture.context_bytes + 1)
        chain = chain_diagnostics(blocks, self.partition, text, STEPS_PER_BLOCK)
        losses |= {key.removesuffix("_nats"): nats for key, nats in chain.items()}
        return losses | {"next_byte": losses[f"{self.names()[-1]} next_byte"]}

    def pipeline(self, published: Mapping[str, Tensors]) -> ArModel:
        """A scorer or AR model as it was published."""
        architecture = self.config.architecture
        whole = ArModel(architecture)
        if self.config.rounds.model == "ar":
            load(whole, published[AR])
        else:
            for stage in whole.stages:
                load(stage, stage_weights(published[stage_name(stage.index)]))
        return whole.eval()


def settled(config: TrainingConfig) -> TrainingConfig:
    """`steps` and `rounds` in agreement, so that the schedule of the rates ends with the last round."""
    rounds = config.rounds.count(config.steps)
    if rounds < 1:
        raise ConfigError("a run of rounds has at least one: give steps or rounds above 0")
    return replace(config, rounds=replace(config.rounds, rounds=rounds), steps=rounds * config.rounds.steps_per_round)
