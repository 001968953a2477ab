"""A run's specification, with the same digest on every machine: settings, parts, initial weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Self

import torch

from stages.checkpoint.files import replace_file
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.errors import ConfigError, InputError, ServiceError
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel, ArStage
from stages.model.randomness import Codes
from stages.wire.channel import check_name
from stages.wire.status import failed_precondition, invalid, protocol_refusal
from trainer.blocks.checkpoint_dir import identity, make_partition, new_ar, new_chain, open_checkpoint_dir
from trainer.blocks.config import MAX_WHOLE, TrainingConfig, parse_config
from trainer.blocks.data import Corpus
from trainer.blocks.losses import next_byte_nats
from trainer.blocks.state import json_digest
from trainer.rounds.codecs import Shapes, Tensors, load, shapes, trainable
from trainer.rounds.parts import AR, STAGE, ArPart, BlockPart, Learner, PartTask, StagePart, reads_features, stage_name
from trainer.rounds.settings import PROTOCOL, WorkerSettings
from trainer.v1 import rounds_pb2


def replica_seed(seed: int, replica: int, machine: int = 0) -> int:
    """Seed of a replica's batches and noise: a pure function, so that any machine can replace it.

    :param machine: number within a site that acts as this replica.
    """
    # Replica 0 has the run's own seed, so that a run of one replica equals training in one place.
    if replica == machine == 0:
        return seed
    word = hashlib.sha256(f"{seed} {replica}{f' {machine}' if machine else ''}".encode()).digest()
    return int.from_bytes(word[:8], "little") % MAX_WHOLE


@dataclass(frozen=True)
class RunSpec:
    """Settled settings, a chain's codes and noise partition, and over the network the manifest of the checkpoint."""

    config: TrainingConfig
    codes: Codes
    partition: NoisePartition | None
    manifest: Manifest | None = None  # of the coordinator's checkpoint; a run in one process has none

    @classmethod
    def of(
        cls,
        config: TrainingConfig,
        corpus: Corpus,
        partition: NoisePartition | None = None,
        manifest: Manifest | None = None,
    ) -> Self:
        """:param partition: the run's, if already known; else measured, for a chain.

        Raises ConfigError for settings that conflict, DataError for too little text.
        """
        model, architecture = config.rounds.model, config.architecture
        corpus.require(architecture.context_length + 1)
        codes = Codes(config.noise.code_seed, architecture.code_dim)
        if model == "chain":
            partition = partition or make_partition(config.noise, architecture.parts, codes, corpus.train)
        return cls(settled(config), codes, partition, manifest)

    @classmethod
    def begin(cls, config: TrainingConfig, corpus: Corpus, out: Path) -> Self:
        """A run into the checkpoint `out`, created if it is not there.

        Raises ConfigError, DataError; CheckpointError if `out` belongs to another run.
        """
        corpus.require(config.architecture.context_length + 1)
        whole, is_chain = settled(config), config.rounds.model == "chain"
        new = new_chain(whole, corpus, "rounds") if is_chain else new_ar(whole.architecture, whole, corpus, "rounds")
        manifest = open_checkpoint_dir(out, new)
        return cls.of(config, corpus, manifest.partition, manifest)

    @classmethod
    def joined(cls, place: rounds_pb2.JoinResponse, directory: Path, corpus: Corpus) -> Self:
        """The run that a coordinator describes; stores its manifest in `directory`. Raises OnesweepError."""
        replace_file(directory / MANIFEST_NAME, lambda path: path.write_text(place.manifest, encoding="utf-8"))
        config, manifest = parse_config(place.config, "the coordinator's settings"), read_manifest(directory)
        spec = cls.of(config, corpus, manifest.partition, manifest)
        if spec.run != place.run:
            raise ServiceError("the coordinator's settings do not match the run that it names: is it another version?")
        return spec

    @property
    def rounds(self) -> int:
        return self.config.rounds.rounds

    @property
    def checkpoint(self) -> Manifest:
        assert self.manifest is not None, "a run in one process makes no checkpoint"
        return self.manifest

    @cached_property
    def run(self) -> str:
        """Name of a run over the network: a digest of everything that determines its weights."""
        return json_digest({"manifest": identity(self.checkpoint), "rounds": asdict(self.config.rounds)})

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in order."""
        if self.config.rounds.model == "ar":
            return (AR,)
        kind = "block" if self.config.rounds.model == "chain" else STAGE
        return tuple(f"{kind}-{index}" for index in range(self.config.architecture.parts))

    @cached_property
    def shapes(self) -> Mapping[str, Shapes]:
        with torch.device("meta"):  # a worker that trains one part has no room for all
            return {name: shapes(dict(self.module(i).named_parameters())) for i, name in enumerate(self.parts)}

    def module(self, index: int) -> Block | ArModel | ArStage:
        """A part in its initial state, whatever random numbers were drawn before."""
        config, architecture = self.config, self.config.architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + index)
            match config.rounds.model:
                case "chain":
                    return Block(architecture, index, self.codes)
                case "ar":
                    return ArModel(architecture)
                case "scorer":
                    return ArStage(architecture, index)

    def initial(self) -> dict[str, Tensors]:
        """Version 0 of all parts."""
        return {name: trainable(self.module(index)) for index, name in enumerate(self.parts)}

    def task(self, index: int, corpus: Corpus, seed: int) -> PartTask:
        """The task of part `index`, for a worker whose batches and noise come from `seed`."""
        config, parts, module = replace(self.config, seed=seed), self.config.architecture.parts, self.module(index)
        if isinstance(module, ArModel):
            return ArPart(module, corpus, config)
        if isinstance(module, ArStage):
            first = index if reads_features(config, index) else 0
            copies = [ArStage(config.architecture, i) for i in range(first, parts) if i != index]
            return StagePart(module, copies, corpus, config)
        assert self.partition is not None
        return BlockPart(module, self.partition, corpus, config)

    def learner(self, place: rounds_pb2.JoinResponse, corpus: Corpus, settings: WorkerSettings) -> Learner:
        """The learner of a place's part, on this machine."""
        seed = replica_seed(self.config.seed, place.replica, settings.machine)
        return Learner(self.task(place.part, replace(corpus, device=settings.device), seed), self.config)

    @torch.inference_mode()
    def evaluate(self, published: Mapping[str, Tensors], corpus: Corpus) -> dict[str, float]:
        """Validation losses of published weights in nats: "next_byte" at the end; for a chain also "PART next_byte" per
        block.
        """
        text = corpus.valid_batch(self.config.valid_windows, self.config.architecture.context_length + 1)
        if self.config.rounds.model != "chain":
            return {"next_byte": next_byte_nats(self.pipeline(published)(text[:, :-1]), text)}
        nats = [next_byte_nats(block.predict(text[:, :-1]), text) for block in self.chain(published)]
        return {f"{name} next_byte": each for name, each in zip(self.parts, nats, strict=True)} | {
            "next_byte": nats[-1]
        }

    def chain(self, published: Mapping[str, Tensors]) -> list[Block]:
        """A chain's blocks with published weights."""
        blocks = [Block(self.config.architecture, index, self.codes).eval() for index in range(len(self.parts))]
        for name, block in zip(self.parts, blocks, strict=True):
            load(block, published[name])
        return blocks

    def pipeline(self, published: Mapping[str, Tensors]) -> ArModel:
        """A scorer or AR model with published weights."""
        whole = ArModel(self.config.architecture)
        if self.config.rounds.model == "ar":
            load(whole, published[AR])
        else:
            for stage in whole.stages:
                load(stage, published[stage_name(stage.index)])
        return whole.eval()

    def check_join(self, request: rounds_pb2.JoinRequest, own_data: bool) -> None:
        """Raise StatusError unless the joining worker can take part.

        :param own_data: whether it may bring its own text.
        """
        try:
            check_name(request.worker, "worker")
        except InputError as error:
            raise invalid(str(error)) from None
        if request.protocol != PROTOCOL:
            raise protocol_refusal(request.protocol, "your worker", "this coordinator", PROTOCOL, "rounds")
        if request.version != version("onesweep"):
            raise failed_precondition(
                f"you have version {request.version[:40]!r} of onesweep, this coordinator has {version('onesweep')}: "
                "only the same version computes the same results"
            )
        if request.run and request.run != self.run:
            raise failed_precondition(
                f"your state is of run {request.run[:12]}, but this is run {self.run[:12]}: give another --state"
            )
        if not own_data and request.data != self.checkpoint.data["train_sha256"]:
            raise failed_precondition(
                f"your training text ({request.data[:12] or 'none'}) is not that of this run, "
                f"{self.checkpoint.data['name']} ({self.checkpoint.data['train_sha256'][:12]}): give the same --data"
            )


def settled(config: TrainingConfig) -> TrainingConfig:
    """Make `steps` and `rounds` agree, so that the schedule of the learning rates ends with the last round."""
    each = config.rounds.steps_per_round
    rounds = config.rounds.rounds or -(-config.steps // each)
    if not config.rounds.rounds and config.steps < each:
        raise ConfigError(
            f"steps = {config.steps} is less than a round of {each}: set more steps, a lower steps_per_round, or rounds"
        )
    return replace(config, rounds=replace(config.rounds, rounds=rounds), steps=rounds * each)
