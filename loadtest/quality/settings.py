"""Settings of `bench quality`, and their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.commands import absolute
from stages.settings import setting

JUDGE = Path(__file__).with_name("fashion.safetensors")


@dataclass(frozen=True)
class QualitySettings:
    """Settings of `bench quality`: of text with `prompts`, of pictures with `pictures`."""

    prompts: Path | None = setting(None, "held-out text: a file or folder", metavar="PATH")
    pictures: Path | None = setting(None, "pictures with a test part, instead of text", metavar="PATH", type=absolute)
    # None: all that the router serves, but for `auto`.
    modes: str | None = setting(
        None,
        "with settings: sweep:steps=16, resample:ar:chunk=32:candidates=64; of pictures: steps:int8",
        metavar="M[,M]",
        shown="all served",
    )
    count: int = setting(100, "prompts, or pictures of each row", least=1)
    max_bytes: int = setting(256, "bytes to generate", name="--bytes", least=1)
    prompt_bytes: int = 64  # of a prompt
    levels: tuple[int, ...] = setting((12,), "steps from noise to picture", metavar="K[,K]")
    judge: Path = setting(
        JUDGE, "judge of pictures; learned from --pictures where there is none", type=absolute, shown="of Fashion-MNIST"
    )
    seed: int = setting(0, "of the first request; the next has the next", metavar="S", least=0, most=(1 << 63) - 1)
    checkpoint: Path | None = setting(
        None, "bundle to serve", metavar="DIR", shown="the shipped weights", type=absolute
    )
    in_flight: int = 8  # requests at once; with `write` one
    write: Path | None = setting(None, "the file that mode auto chooses from, for DIR/frontier.json")
