"""The command `onesweep bench quality`, and its settings, which are its flags."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.commands import MAX_SEED, absolute, add_measurement, run_bench
from stages.errors import InputError
from stages.settings import check_destination, from_flags, setting

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
    seed: int = setting(0, "of the first request; the next has the next", metavar="S", least=0, most=MAX_SEED)
    checkpoint: Path | None = setting(None, "bundle to serve", metavar="DIR", shown="shipped weights", type=absolute)
    in_flight: int = 8  # requests at once; with `write` one
    write: Path | None = setting(None, "the file that mode auto chooses from, for DIR/frontier.json")


add_quality = partial(add_measurement, settings=QualitySettings)


def run_quality(options: argparse.Namespace) -> int:
    settings = from_flags(QualitySettings, options)
    if (settings.prompts is None) == (settings.pictures is None):
        raise InputError("name what to measure against: --prompts with held-out text, or --pictures")
    if settings.write is not None:
        if settings.pictures is not None:
            raise InputError("--write is for text: mode auto chooses among modes that write")
        check_destination(settings.write, "--write")
    if settings.pictures is not None:
        from loadtest.quality.pictures import measure_pictures as measure
    else:
        from loadtest.quality.text import measure_text as measure
    return run_bench(options, lambda: measure(settings))
