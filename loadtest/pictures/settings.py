"""Settings of the benchmarks of pictures. Help reads this file, so it imports nothing heavy."""

# ruff: noqa: RUF009 - `setting` makes a field

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onesweep.loadtest.commands import CHECKPOINT, absolute, setting
from onesweep.loadtest.host.settings import numbers_flag
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.settings import flag

JUDGE = Path(__file__).with_name("fashion.safetensors")


@dataclass(frozen=True)
class PictureBenchSettings:
    """Settings of `bench pictures`."""

    data: Path = field(metadata=flag("pictures with a test part", metavar="PATH", type=absolute))
    checkpoint: Path = field(default=SHIPPED / "pictures", metadata=CHECKPOINT)
    judge: Path = setting(
        JUDGE, "a file of `bench picture-judge`", metavar="FILE", type=absolute, shown="of Fashion-MNIST"
    )
    modes: tuple[str, ...] = setting(
        ("chain", "steps", "local"), "also picard, displaced", metavar="M[,M]", shown="chain,steps,local"
    )
    count: int = setting(2000, "pictures of each row", least=100, most=60_000)
    levels: tuple[int, ...] = setting((6, 12, 24), "steps from noise to picture", **numbers_flag("--levels", "K"))
    codecs: tuple[str, ...] = setting(("int8",), "of the chain: fp32, int8, int4", metavar="C[,C]")
    guidance: float = setting(1.0, "pull towards the class; 1 is none", least=0, most=20)
    solver: str = setting("2m", "euler, 2m", metavar="NAME")
    seed: int = setting(0, "of the first picture", least=0)


@dataclass(frozen=True)
class PictureJudgeSettings:
    """Settings of `bench picture-judge`."""

    data: Path = field(metadata=flag("pictures to learn", metavar="PATH", type=absolute))
    out: Path = field(metadata=flag("the judge's file", metavar="FILE", type=absolute))
    epochs: int = setting(6, "passes over the training pictures", least=1, most=1000)
    seed: int = setting(0, "of weights and batches", least=0)
