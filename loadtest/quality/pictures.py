"""Quality of pictures: how far drawn ones are from real ones by a judge's features, and what a picture costs."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from onesweep.loadtest.commands import BenchReport
from onesweep.loadtest.quality.commands import QualitySettings
from onesweep.loadtest.quality.picture_judge import (
    JudgeFile,
    distance_interval,
    frechet_distance,
    load_judge,
    save_judge,
    train_judge,
)
from onesweep.loadtest.report.record import settings_record
from onesweep.loadtest.report.table import Table, number_column, open_meter, text_column
from onesweep.loadtest.workload.caller import Access
from onesweep.loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from onesweep.loadtest.workload.variants import ModeVariant, parse_variants
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.serving.client.client import AsyncClient, DrawnPictures
from onesweep.serving.drawing import DRAWING_MODES
from onesweep.stages.errors import InputError
from onesweep.stages.signals import run_interruptible
from onesweep.trainer.pictures.data import PictureSet, load_pictures

REAL = "training pictures"
EPOCHS = 6  # passes of a judge that is learned here
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PictureRow:
    """Pictures of one mode at one number of levels, or real ones; costs are means over pictures."""

    mode: str  # with its codec, where one was named
    levels: int | None
    count: int
    distance: float  # Frechet distance of the judge's features to those of the test part
    distance_low: float
    distance_high: float
    accuracy: float  # share whose class the judge names
    trips: int | None = None
    host_ms: float | None = None
    wire_bytes: float | None = None


TABLE: Table[PictureRow] = Table(
    (
        text_column("mode"),
        number_column("levels", "levels", 0),
        number_column("FD", "distance", 2),
        ("95 %", lambda row: f"{row.distance_low:.2f} to {row.distance_high:.2f}"),
        number_column("accuracy", "accuracy", 3),
        number_column("trips", "trips", 0),
        number_column("host ms", "host_ms", 2),
        number_column("wire bytes", "wire_bytes", 0),
    )
)


def measure_pictures(settings: QualitySettings) -> BenchReport:
    """Raises OnesweepError."""
    s = settings
    assert s.pictures is not None
    variants = None if s.modes is None else parse_variants(s.modes, DRAWING_MODES)
    pictures = load_pictures(s.pictures)
    if not len(pictures.test):
        raise InputError(f"{s.pictures} has no test part to compare with")
    target = TestbedSettings(access=s.access, checkpoint=s.checkpoint or (None if s.access else SHIPPED / "pictures"))
    check_testbed(target)
    stored = _judge(s, pictures)
    real, _ = stored.judge.look(pictures.test.pixels)

    def row(mode: str, levels: int | None, pixels: torch.Tensor, labels: Sequence[int]) -> PictureRow:
        features, found = stored.judge.look(pixels)
        low, high = distance_interval(features, real)
        accuracy = float((found == np.asarray(labels)).mean())
        return PictureRow(mode, levels, len(pixels), frechet_distance(features, real), low, high, accuracy)

    # as many real pictures have the same bias, so a row can be no better than this one
    sample = pictures.train.take(torch.from_numpy(np.random.default_rng(0).permutation(len(pictures.train))[: s.count]))
    rows = [row(REAL, None, sample.pixels, sample.labels.tolist())]
    with open_testbed(target) as testbed:
        drawn = run_interruptible(_drawn(testbed.access, variants, pictures.classes, s))
    for (variant, levels), answers in drawn.items():
        pixels = torch.from_numpy(np.concatenate([answer.pixels for answer in answers]))
        labels = list(range(len(pictures.classes))) * len(answers)
        costs = {
            "trips": max(answer.sweeps for answer in answers),
            "host_ms": sum(host.compute_ms for answer in answers for host in answer.hosts) / len(pixels),
            "wire_bytes": statistics.fmean(answer.wire_bytes_total for answer in answers) / len(pictures.classes),
        }
        rows.append(PictureRow(**asdict(row(variant.label, levels, pixels, labels)) | costs))
    record = {
        "bench": "quality",
        "settings": settings_record(s),
        "judge": stored.digest,
        "test_pictures": len(pictures.test),
        "rows": [asdict(each) for each in rows],
    }
    words = (
        f"FD: Frechet distance of 64 features of a judge ({stored.digest[:12]}) to {len(pictures.test)} test pictures: "
        "it compares with other rows of this judge only"
    )
    return BenchReport(f"{TABLE.aligned(rows)}\n\n{words}", record)


def _judge(settings: QualitySettings, pictures: PictureSet) -> JudgeFile:
    """The judge; one that is not there is learned from the training pictures, and kept."""
    if not settings.judge.exists():
        save_judge(train_judge(pictures, EPOCHS), settings.judge, pictures)
    return load_judge(settings.judge)


async def _drawn(
    access: Access, variants: Sequence[ModeVariant] | None, classes: tuple[str, ...], settings: QualitySettings
) -> dict[tuple[ModeVariant, int], list[DrawnPictures]]:
    """A picture of every class in each request: `count` pictures at least. Raises OnesweepError."""
    requests = -(-settings.count // len(classes))
    async with AsyncClient(access.router, **access.who()) as client:
        status = await client.status()
        if tuple(status.pictures.classes) != classes:
            raise InputError(
                f"{access.router} draws other classes than {settings.pictures} has: give the data that its nets "
                "were trained on"
            )
        places = asyncio.Semaphore(settings.in_flight)
        variants = variants or tuple(map(ModeVariant, status.drawing_modes))
        with open_meter("drawing", len(variants) * len(settings.levels) * requests, "request") as progress:

            async def one(variant: ModeVariant, levels: int, number: int) -> DrawnPictures:
                fields = {"levels": levels, "seed": settings.seed + number * len(classes), **variant.request()}
                async with places:
                    answer = await client.draw(classes, timeout_s=TIMEOUT_S, **fields)
                progress(1)
                return answer

            return {
                (variant, levels): await asyncio.gather(*(one(variant, levels, i) for i in range(requests)))
                for variant in variants
                for levels in settings.levels
            }
