"""Progress of a training: written by its run, read by the service that `train watch` follows."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum


class TrainingState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (TrainingState.FINISHED, TrainingState.STOPPED, TrainingState.FAILED)


@dataclass(frozen=True)
class Moment:
    """Progress at one moment. `losses` are the last ones logged; `seconds_left` is for this run only."""

    run: str = ""
    step: int = 0
    steps: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    seconds_left: float | None = None
    state: TrainingState = TrainingState.STARTING


class Progress:
    """The latest moment. One thread writes; any thread may read `now`, which is replaced as a whole."""

    def __init__(self) -> None:
        self.now = Moment()
        self._began = 0.0
        self._first_step = 0

    def begin(self, run: str, step: int, steps: int) -> None:
        self._began, self._first_step = time.monotonic(), step
        self.now = Moment(run=run, step=step, steps=steps, state=TrainingState.RUNNING)

    def reach(self, step: int) -> None:
        """Record that `step` steps are done."""
        pace = (time.monotonic() - self._began) / max(step - self._first_step, 1)
        self.now = replace(
            self.now, step=step, seconds_left=pace * (self.now.steps - step), state=TrainingState.RUNNING
        )

    def record(self, losses: dict[str, float]) -> None:
        self.now = replace(self.now, losses={**self.now.losses, **losses})

    def enter(self, state: TrainingState) -> None:
        self.now = replace(self.now, state=state)
