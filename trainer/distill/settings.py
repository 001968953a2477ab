"""Settings of a distillation, which are its command's flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import ConfigError
from stages.settings import check, flag, limits, setting

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig

MAX_MINUTES = 60.0 * 24 * 365


@dataclass(frozen=True, kw_only=True)
class DistillTuning:
    """Settings of a distillation that its TOML has."""

    # The teacher's layers, from 0, that the drafter begins with; by default as many as a stage's size allows.
    layers: tuple[int, ...] | None = None
    sequences: int = field(default=8, metadata=limits(least=1, most=1024))  # windows in a step
    window: int = field(default=256, metadata=limits(least=16, most=4096))  # tokens in a window
    # Share of the samples that the teacher writes itself. On a CPU these take four times as long as those that it only
    # reads.
    written: float = field(default=0.1, metadata=limits(least=0, most=1))
    # The teacher's part is the expensive one, so a sample is read more than once: so often on average.
    passes: float = field(default=3.0, metadata=limits(least=1, most=1000))
    learning_rate: float = field(default=1.5e-3, metadata=limits(least=0))  # peak rate of the layers
    lens_rate: float = field(default=1e-3, metadata=limits(least=0))  # peak rate of all else
    bfloat16: bool = True  # where the device is quick at it
    seed: int = field(default=0, metadata=limits(least=0, most=1 << 53))  # of samples and batches

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class DistillSettings(DistillTuning):
    """The teacher, the text it reads, and how long its drafter learns from it."""

    checkpoint: Path = field(metadata=flag("the pipeline to learn from", metavar="DIR"))
    texts: tuple[Path, ...] = field(
        metadata=flag("UTF-8 text, or folders", name="--text", nargs="+", action="extend", metavar="FILE")
    )
    out: Path | None = setting(None, "default: local/ in the checkpoint", metavar="DIR")
    start: Path | None = setting(None, "a drafter to continue", metavar="DIR")
    # Either this or `steps` is given. After 0 steps there is the lens.
    minutes: float | None = setting(
        None, "how long to train, resumed runs counted together", least=1e-3, most=MAX_MINUTES
    )
    steps: int | None = setting(None, "or for how many steps", least=0, most=1 << 32)
    device: str = setting("cpu", "where to train", shown="default: cpu", metavar="cpu|cuda[:N]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("say how long to train: either --steps or --minutes")
        if self.start is not None and self.layers is not None:
            raise ConfigError("give either layers or --start: a drafter to continue has its layers")

    @property
    def folder(self) -> Path:
        """The drafter's checkpoint."""
        return self.out or self.checkpoint / "local"

    def training(self) -> TrainingConfig:
        """Rates, warm-up, and how often the run measures and saves."""
        from trainer.blocks.config import TrainingConfig

        # AdamW, as with the same samples it comes to 3.01 bits of KL in 85 s of processor time, Muon to 3.19 in 80 s.
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
            evaluate_every=1 << 40,  # evaluations go by the clock
        )

    def record(self) -> dict[str, Any]:
        """For the manifest: what decides the weights."""
        left_out = ("checkpoint", "texts", "out", "device", "start")
        record = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**record, "layers": None if self.layers is None else list(self.layers)}
