"""What a run over the network is: its settings, its parts, and who may take part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version

from stages.architecture import Architecture
from stages.errors import InputError
from stages.manifest import Manifest
from stages.refusal import failed_precondition, invalid
from stages.transport import check_name
from trainer.config import TrainingConfig
from trainer.destination import identity
from trainer.v1 import rounds_pb2

DATA_KIND = "bytes"
"""What the model reads: a worker with text of another kind has nothing to bring."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that coordinator and workers must agree on."""

    config: TrainingConfig
    manifest: Manifest
    """Of the checkpoint that the run makes."""

    @property
    def run(self) -> str:
        """Names the run: a digest of everything that decides its weights."""
        record = {"manifest": identity(self.manifest), "rounds": asdict(self.config.rounds)}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names, in the order of the chain."""
        noun = {"chain": "block", "scorer": "stage"}.get(self.config.rounds.model)
        return tuple(f"{noun}-{i}" for i in range(self.config.architecture.parts)) if noun else ("ar",)

    @property
    def rounds(self) -> int:
        return self.config.rounds.count(self.config.steps)

    def steps(self, round_: int) -> int:
        """Local steps of a round: the last may have fewer."""
        whole = self.config.rounds.steps_per_round
        return whole if self.config.rounds.rounds else min(whole, self.config.steps - round_ * whole)

    def needed_by(self, part: str) -> tuple[str, ...]:
        """Parts whose frozen copies a worker of `part` trains with."""
        rounds, index = self.config.rounds, self.parts.index(part)
        if rounds.model == "scorer":
            ahead = self.config.lookahead.ahead
        elif rounds.model == "chain" and self.config.architecture.context == "chained":
            ahead = rounds.lookahead
        else:
            return ()
        return (*self.parts[:index], *(self.parts[index + 1 :] if ahead else ()))

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
                "your settings have another architecture than this run: give --config as the coordinator has it, or none"
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
