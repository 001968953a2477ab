"""What a run over the network is: its settings, its parts, and who may take part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from stages.architecture import Architecture
from stages.errors import InputError
from stages.manifest import Manifest
from stages.refusal import failed_precondition, invalid
from stages.transport import check_name
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.destination import identity, new_ar, new_chain, open_destination
from trainer.rounds.fragments import Cutting
from trainer.rounds.frame import Frame
from trainer.v1 import rounds_pb2

DATA_KIND = "bytes"
"""What the model reads: a worker with text of another kind has nothing to bring."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that coordinator and workers must agree on."""

    frame: Frame
    manifest: Manifest
    """Of the checkpoint that the run makes."""

    @property
    def config(self) -> TrainingConfig:
        return self.frame.config

    @property
    def rounds(self) -> int:
        return self.config.rounds.rounds

    @cached_property
    def run(self) -> str:
        """Names the run: a digest of everything that decides its weights."""
        record = {"manifest": identity(self.manifest), "rounds": asdict(self.config.rounds)}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names, in order."""
        return self.frame.names()

    @cached_property
    def cutting(self) -> Cutting:
        """What the ledger knows of the parts: their fragments."""
        return self.frame.cutting()

    @classmethod
    def begin(cls, config: TrainingConfig, corpus: Corpus, out: Path) -> RunPlan:
        """The plan of a run into the checkpoint `out`, which is made if it is not there.

        Raises ConfigError, DataError; CheckpointError where `out` is of another run.
        """
        frame = Frame.of(config, corpus)
        frame.cutting()
        if config.rounds.model == "chain":
            new = replace(new_chain(frame.config, corpus, "rounds"), partition=frame.partition)
        else:
            new = new_ar(frame.config.architecture, frame.config, corpus, "rounds")
        manifest = open_destination(out, new)
        return cls(Frame.of(config, corpus, manifest.partition), manifest)

    @classmethod
    def told(cls, config: TrainingConfig, manifest: Manifest, corpus: Corpus) -> RunPlan:
        """The plan that a coordinator tells a worker. Raises ConfigError, DataError."""
        return cls(Frame.of(config, corpus, manifest.partition), manifest)

    def check_join(self, request: rounds_pb2.JoinRequest, own_data: bool) -> None:
        """Raise Refusal unless who asks can take part.

        :param own_data: whether it may bring other text.
        """
        try:
            check_name(request.worker, "worker")
        except InputError as error:
            raise invalid(str(error)) from None
        if request.version != version("onesweep"):
            raise failed_precondition(
                f"you have version {request.version[:40]!r} of onesweep, this coordinator has {version('onesweep')}: "
                "workers compute alike only with the same one"
            )
        if request.architecture and request.architecture != architecture_digest(self.config.architecture):
            raise failed_precondition(
                "your settings have another architecture than this run: give --config of the coordinator, or none"
            )
        if request.run and request.run != self.run:
            raise failed_precondition(
                f"your state is of the run {request.run[:12]}, this is {self.run[:12]}: give another --state"
            )
        if request.data_kind != DATA_KIND:
            raise failed_precondition(f"this run learns from {DATA_KIND}, not {request.data_kind[:40]!r}")
        if not own_data and request.data != self.manifest.data["train_sha256"]:
            raise failed_precondition(
                f"your training text ({request.data[:12] or 'none'}) is not that of this run, "
                f"{self.manifest.data['name']} ({self.manifest.data['train_sha256'][:12]}): give the same --data"
            )


def architecture_digest(architecture: Architecture) -> str:
    """Names an architecture."""
    return hashlib.sha256(json.dumps(asdict(architecture), sort_keys=True).encode()).hexdigest()
