"""Settings of a distillation, which are its command's flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import ConfigError, InputError
from stages.settings import check, flag, setting
from trainer.options import positive

if TYPE_CHECKING:
    from trainer.blocks.config import TrainingConfig

MAX_MINUTES = 60.0 * 24 * 365


def layer_list(text: str) -> tuple[int, ...]:
    """Numbers, or N-M with both ends, with commas between."""
    ends = (part.partition("-") for part in text.split(","))
    return tuple(index for first, _, last in ends for index in range(int(first), int(last or first) + 1))


@dataclass(frozen=True)
class DistillSettings:
    """The teacher, the text it reads, and how long its drafter learns from it."""

    checkpoint: Path = field(metadata=flag("the pipeline to learn from", metavar="DIR"))
    texts: tuple[Path, ...] = field(
        metadata=flag("UTF-8 text, or folders", name="--text", nargs="+", action="extend", metavar="FILE")
    )
    out: Path | None = setting(None, "default: local/ in the checkpoint", metavar="DIR")
    head: bool = setting(False, "a draft head, which the host of the last stage drafts by, in place of a drafter")
    guesses: int = setting(16384, "most frequent symbols, which a new draft head guesses", least=2, most=1 << 20)
    start: Path | None = setting(
        None, "a drafter to continue, or the file of a draft head, to which --layers adds", metavar="PATH"
    )
    # The teacher's layers, from 0, that the drafter or the draft head begins with.
    layers: tuple[int, ...] | None = setting(
        None,
        "default: as many as a stage's size allows; of a draft head the first two and the last two",
        type=layer_list,
        metavar="N[-M][,N[-M]]",
    )
    # Either this or `steps` is given. After 0 steps there is the lens.
    minutes: float | None = setting(None, "how long to train, resumed runs counted together", type=positive)
    steps: int | None = setting(None, "or for how many steps", least=0, most=1 << 32)
    sequences: int = setting(8, "windows in a step", least=1, most=1024)
    window: int = setting(256, "symbols in a window", least=16, most=4096)
    # On a CPU, samples that the teacher writes take four times as long as those that it only reads.
    written: float = setting(0.1, "of samples that the model writes itself", metavar="SHARE")
    # The teacher's part is the expensive one, so a sample is read more than once.
    passes: float = setting(3.0, "how often a sample is read on average", metavar="N", least=1, most=1000)
    learning_rate: float = setting(1.5e-3, "peak rate of the layers", shown="1.5e-3", metavar="RATE", least=0)
    lens_rate: float = setting(1e-3, "peak rate of all else", shown="1e-3", metavar="RATE", least=0)
    bfloat16: bool = setting(True, "compute in float32 on any processor", name="--float32")
    device: str = setting("cpu", "where to train", shown="default: cpu", metavar="cpu|cuda[:N]")
    seed: int = setting(0, "of samples and batches", least=0, most=1 << 53)

    def __post_init__(self) -> None:
        check(self)
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("say how long to train: either --steps or --minutes")
        if self.minutes is not None and not 0 < self.minutes <= MAX_MINUTES:
            raise ConfigError(f"--minutes must be above 0, and at most a year, not {self.minutes:g}")
        if self.start is not None and self.layers is not None and not self.head:
            raise ConfigError("give either --layers or --start: a drafter to continue has its layers")
        if not 0 <= self.written <= 1:
            raise ConfigError(f"--written is a share of the samples, from 0 to 1, not {self.written:g}")

    def check_layers(self, total: int) -> None:
        """Raises InputError where the teacher, of `total` layers, lacks one."""
        if self.layers is not None and not (self.layers and all(0 <= i < total for i in self.layers)):
            raise InputError(f"--layers {','.join(map(str, self.layers))}: the model has layers 0 to {total - 1}")

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
        if not self.head:  # so that a drafter's record stays what it was
            del record["head"], record["guesses"]
        return {**record, "layers": None if self.layers is None else list(self.layers)}
