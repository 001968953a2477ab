"""What decides a distillation, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.errors import ConfigError
from trainer.config import TrainingConfig

MAX_WINDOW = 4096
MAX_SEQUENCES = 1024
MAX_MINUTES = 60.0 * 24 * 365


@dataclass(frozen=True)
class DistillSettings:
    """Where the teacher is, what it reads, and how long its drafter learns from it."""

    checkpoint: Path
    texts: tuple[Path, ...]
    out: Path
    layers: tuple[int, ...] | None = None
    """The teacher's layers, from 0, that the drafter begins with; None for as many as a stage allows."""
    steps: int | None = None
    minutes: float | None = None
    """How long to train, resumed runs counted together; one of the two is given. After 0 steps there is the lens."""
    sequences: int = 8
    """Windows in a step."""
    window: int = 256
    """Symbols of a window, at most the teacher's context."""
    written: float = 0.1
    """Share of the samples that the teacher writes itself, from the beginning of a window on: on a CPU they take four
    times as long as those that it only reads."""
    passes: float = 3.0
    """How often a sample is read on average: the teacher's part is the dearer one."""
    learning_rate: float = 1.5e-3
    lens_rate: float = 1e-3
    bfloat16: bool = True
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("say how long to train: either --steps or --minutes")
        if self.minutes is not None and not 0 < self.minutes <= MAX_MINUTES:
            raise ConfigError(f"--minutes must be above 0, and at most a year, not {self.minutes:g}")
        for name, value, least, most in (
            ("--steps", self.steps or 0, 0, 1 << 32),
            ("--sequences", self.sequences, 1, MAX_SEQUENCES),
            ("--window", self.window, 16, MAX_WINDOW),
            ("--seed", self.seed, 0, 1 << 53),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, not {value}")
        if not 0 <= self.written <= 1:
            raise ConfigError(f"--written is a share of the samples, from 0 to 1, not {self.written:g}")
        if not 1 <= self.passes <= 1000:
            raise ConfigError(f"--passes must be from 1 to 1000, not {self.passes:g}")
        for name, rate in (("--learning-rate", self.learning_rate), ("--lens-rate", self.lens_rate)):
            if not (math.isfinite(rate) and rate >= 0):
                raise ConfigError(f"{name} must be a finite number of at least 0, not {rate}")

    def training(self) -> TrainingConfig:
        """How the run goes: rates, warm-up, how often it measures and saves."""
        return TrainingConfig(
            steps=self.steps if self.steps is not None else 1 << 32,
            sequences=self.sequences,
            learning_rate=self.lens_rate,
            matrix_learning_rate=self.learning_rate,
            matrix_optimizer="adamw",
            warmup_steps=10,
            weight_decay=0.0,
            bfloat16=self.bfloat16,
            seed=self.seed,
            log_every=5,
            evaluate_every=1 << 40,  # looks go by the clock
        )

    def record(self) -> dict[str, Any]:
        """For the manifest: what decides the weights."""
        left_out = ("checkpoint", "texts", "out", "device")
        record = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**record, "layers": None if self.layers is None else list(self.layers)}
