"""A worker's state: its progress, in one file from which it resumes after a kill at any instruction."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stages.errors import ConfigError, ResumeError
from trainer.blocks.config import SPARSE, RoundSettings
from trainer.blocks.state import load_state, save_state, strip_prefix
from trainer.rounds.cache import CachedWeights
from trainer.rounds.codecs import Tensors, norm, subtract, with_feedback

STATE_NAME = "worker.safetensors"
FORMAT = 2  # of the state; format 1, without this number, had fragments
# Groups of tensors: a round's initial weights, the held version, the codec's rounding errors, and the pending payload.
BASE, HELD, CARRIED, PAYLOAD = "base", "held", "carried", "payload"


@dataclass
class WorkerProgress:
    """A worker's progress in training its part."""

    part: str
    incarnation: str = ""  # of the run
    finished: int = -1  # the last round that it trained or gave up
    round: int | None = None  # the current round; None between rounds
    base_version: int = 0
    steps: int = 0  # steps done in this round
    sequences: int = 0  # sequences read by these steps
    held_version: int = 0  # version of the part among the tensors
    # Submission fields of an update that the coordinator has not judged yet; its payload is among the tensors.
    pending: dict[str, Any] | None = None


class WorkerRounds:
    """A worker's rounds, each of which makes an update."""

    def __init__(self, progress: WorkerProgress, settings: RoundSettings) -> None:
        self.progress, self.settings = progress, settings
        self.base = Tensors()
        self.carried, self.payload = Tensors(), b""  # the part that the codec left out of updates; the pending update

    @property
    def in_round(self) -> int:
        """The current or last round; -1 before the first."""
        return self.progress.finished if self.progress.round is None else self.progress.round

    def is_current(self, open_round: int) -> bool:
        """True if the current round is still worth finishing."""
        if self.progress.round is None:
            return False
        behind = open_round - self.progress.round
        return behind <= (self.settings.max_staleness if self.settings.stale_discount else 0)

    def begin(self, round_: int, version: int, weights: Tensors) -> Tensors:
        """Begin a round; returns the weights to train, made from the newest version."""
        progress, self.base = self.progress, weights
        progress.round, progress.base_version, progress.steps, progress.sequences = round_, version, 0, 0
        stays = self.settings.codec in SPARSE and self.carried
        return subtract(self.base, self.carried) if stays else self.base

    def give_up(self) -> None:
        """End a round that is no longer worth finishing."""
        assert self.progress.round is not None
        self.progress.finished, self.progress.round = self.progress.round, None

    def finish(self, weights: Tensors, losses: dict[str, float], author: str) -> None:
        """Make the round's update for handing in. Raises ConfigError for weights that are not finite.

        :param losses: of the last step; :param author: run and worker.
        """
        progress = self.progress
        assert progress.round is not None
        delta = subtract(self.base, weights)
        if not norm(delta) < float("inf"):
            raise ConfigError(
                f"{progress.part}: weights are not finite after round {progress.round}; lower the learning rates"
            )
        self.payload, self.carried = with_feedback(self.settings, delta, self.carried, progress.round)
        word = f"{author} {progress.part} {progress.round} {hashlib.sha256(self.payload).hexdigest()}"
        progress.pending = {
            # the same in every try, but different for other work
            "id": f"r{progress.round}-{hashlib.sha256(word.encode()).hexdigest()[:32]}",
            "round": progress.round,
            "base_version": progress.base_version,
            "steps": progress.steps,
            "sequences": progress.sequences,
            "losses": losses,
        }
        progress.finished, progress.round = progress.round, None

    def state(self, held: CachedWeights | None) -> dict[str, Tensors]:
        """Tensors by group; :param held: the held version of the part."""
        groups = {CARRIED: self.carried}
        if self.progress.pending is not None:
            groups[PAYLOAD] = {self.progress.part: torch.frombuffer(bytearray(self.payload), dtype=torch.uint8)}
        if held is not None:
            groups[HELD] = held.tensors
            self.progress.held_version = held.version
        if self.progress.round is not None and (held is None or self.base is not held.tensors):
            groups[BASE] = self.base
        return groups

    def restore(self, progress: WorkerProgress, groups: Mapping[str, Tensors]) -> CachedWeights | None:
        """Restore the groups that `state` returned; returns the held version."""
        self.progress, held = progress, groups.get(HELD)
        if progress.pending is not None:
            self.payload = groups[PAYLOAD][progress.part].numpy().tobytes()
        self.base, self.carried = groups.get(BASE) or held or {}, groups.get(CARRIED, {})
        return CachedWeights(progress.held_version, held) if held else None


def save_worker(path: Path, run: str, progress: WorkerProgress, groups: dict[str, Tensors]) -> None:
    """Replace the state. Raises CheckpointError, with the old state intact, if it cannot be written.

    :param groups: tensors by group and name.
    """
    tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    save_state(path, {**asdict(progress), "run": run, "format": FORMAT}, tensors)


def load_worker(path: Path) -> tuple[str, WorkerProgress, dict[str, Tensors]]:
    """Run, progress and groups of a state. Raises ResumeError if it is damaged or of an older format."""
    record, tensors = load_state(path)
    if (format_ := record.pop("format", 1)) != FORMAT:
        raise ResumeError(f"{path} has format {format_}, but this version reads {FORMAT}; delete it to start over")
    try:
        run = record.pop("run")
        groups = {key.partition("/")[0] for key in tensors}
        return run, WorkerProgress(**record), {group: strip_prefix(f"{group}/", tensors) for group in groups}
    except (KeyError, TypeError) as error:
        raise ResumeError(f"{path} is damaged ({error}); delete it to start over") from None
