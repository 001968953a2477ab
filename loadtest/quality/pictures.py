"""Quality of pictures: the distance of drawn from real ones by a judge's features, and the cost of a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from loadtest.commands import BenchReport, settings_record
from loadtest.report.table import Column, number_column, open_meter, table, text_column
from loadtest.workload.caller import Access
from loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from serving.client.client import Client, DrawnPictures
from serving.client.variants import ModeVariant, parse_variants
from serving.modes import DRAWING_MODES
from serving.router.topology import SHIPPED
from stages.errors import InputError, ResumeError
from stages.settings import check_destination
from trainer.blocks.state import digest, load_state, save_state
from trainer.pictures.data import PictureSet, load_pictures

if TYPE_CHECKING:
    from loadtest.benches import QualitySettings

EPOCHS = 6  # training passes of a judge
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PictureRow:
    """Pictures of one mode at one number of levels, or real ones; costs are means over pictures."""

    mode: str  # with its codec, if one was given
    levels: int | None
    count: int
    distance: float  # Frechet distance of the judge's features to those of the test part
    distance_low: float
    distance_high: float
    accuracy: float  # share whose class the judge recognizes
    trips: int | None = None
    host_ms: float | None = None
    wire_bytes: float | None = None


COLUMNS: tuple[Column[PictureRow], ...] = (
    text_column("mode"),
    number_column("levels", "levels", 0),
    number_column("FD", "distance", 2),
    ("95 %", lambda row: f"{row.distance_low:.2f} to {row.distance_high:.2f}"),
    number_column("accuracy", "accuracy", 3),
    number_column("trips", "trips", 0),
    number_column("host ms", "host_ms", 2),
    number_column("wire bytes", "wire_bytes", 0),
)


def measure_pictures(settings: QualitySettings) -> BenchReport:
    """Raises OnesweepError."""
    s = settings
    assert s.pictures is not None
    variants = None if s.modes is None else parse_variants(s.modes, DRAWING_MODES)
    pictures = load_pictures(s.pictures)
    if not len(pictures.test):
        raise InputError(f"{s.pictures} has no test part to compare with")
    target = TestbedSettings(checkpoint=s.checkpoint or SHIPPED / "pictures")
    check_testbed(target)
    if not s.judge.exists():  # a missing judge is trained on the training pictures and stored
        check_destination(s.judge, "--judge")
        save_judge(train_judge(pictures, EPOCHS), s.judge, pictures)
    judge, name = load_judge(s.judge)
    real, _ = judge.classify(pictures.test.pixels)

    def row(mode: str, levels: int | None, pixels: torch.Tensor, labels: Sequence[int]) -> PictureRow:
        features, found = judge.classify(pixels)
        low, high = distance_interval(features, real)
        accuracy = float((found == np.asarray(labels)).mean())
        return PictureRow(mode, levels, len(pixels), frechet_distance(features, real), low, high, accuracy)

    # an equal number of real pictures has the same bias, so no row can be better than this one
    sample = pictures.train.take(torch.from_numpy(np.random.default_rng(0).permutation(len(pictures.train))[: s.count]))
    rows = [row("training pictures", None, sample.pixels, sample.labels.tolist())]
    with open_testbed(target) as testbed:
        drawn = _drawn(testbed.access, variants, pictures.classes, s)
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
        "settings": settings_record(s),
        "judge": name,
        "test_pictures": len(pictures.test),
        "rows": [asdict(each) for each in rows],
    }
    words = (
        f"FD: Frechet distance of 64 features of a judge ({name[:12]}) to {len(pictures.test)} test pictures: "
        "it compares only with other rows of this judge"
    )
    return BenchReport(f"{table(COLUMNS, rows)}\n\n{words}", record)


def _drawn(
    access: Access, variants: Sequence[ModeVariant] | None, classes: tuple[str, ...], settings: QualitySettings
) -> dict[tuple[ModeVariant, int], list[DrawnPictures]]:
    """Draw at least `count` pictures, one of every class per request. Raises OnesweepError."""
    requests = -(-settings.count // len(classes))
    with Client(access.router, **access.client_options()) as client, ThreadPoolExecutor(settings.in_flight) as threads:
        status = client.status()
        if tuple(status.pictures.classes) != classes:
            raise InputError(
                f"the bundle draws other classes than {settings.pictures} has: give the data that it was trained on"
            )
        variants = variants or tuple(map(ModeVariant, status.drawing_modes))
        total = len(variants) * len(settings.levels) * requests
        with open_meter(desc="drawing", total=total, unit="request") as progress:

            def one(variant: ModeVariant, levels: int, number: int) -> DrawnPictures:
                fields = {"levels": levels, "seed": settings.seed + number * len(classes), **variant.request()}
                answer = client.draw(classes, timeout_s=TIMEOUT_S, **fields)
                progress.update()
                return answer

            return {
                (variant, levels): list(threads.map(partial(one, variant, levels), range(requests)))
                for variant in variants
                for levels in settings.levels
            }


# The judge: a small classifier, whose features measure the distance of drawn pictures from real ones

FEATURES = 64
WIDTH = 32
BATCH = 128
LEARNING_RATE = 2e-3
AT_ONCE = 500  # pictures per batch


class PictureJudge(nn.Module):
    """Two convolutions, 64 features, and a class for each picture."""

    # FID needs Inception's weights, which are not available here and know only photographs. So nothing is called FID,
    # and results compare only under the same judge, whose digest is in every record.

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.size = (channels, height, width)
        self.first = nn.Conv2d(channels, WIDTH, 3, padding=1)
        self.second = nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1)
        self.features = nn.Linear(2 * WIDTH * (height // 4) * (width // 4), FEATURES)
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features (pictures, 64) and logits (pictures, classes). pixels: (pictures, channels, height, width) uint8."""
        x = pixels.float() / 255
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        features = F.relu(self.features(x.flatten(1)))
        return features, self.head(F.dropout(features, 0.3, self.training))

    @torch.inference_mode()
    def classify(self, pixels: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Features (pictures, 64) and classes (pictures,). Raises InputError for pictures of another size."""
        if pixels.shape[1:] != self.size:
            raise InputError(
                f"the judge needs pictures of {self.size}, but these have {tuple(pixels.shape[1:])} (channels, height, "
                "width): give --judge a file that was made for them"
            )
        seen = [self(part) for part in pixels.split(AT_ONCE)]
        features, logits = (torch.cat([each[i] for each in seen]) for i in (0, 1))
        return features.double().numpy(), logits.argmax(1).numpy()


def train_judge(pictures: PictureSet, epochs: int) -> PictureJudge:
    """Train a judge on the training part of these pictures. epochs: passes over it."""
    torch.manual_seed(0)
    _, channels, height, width = pictures.train.pixels.shape
    judge = PictureJudge(channels, height, width, len(pictures.classes))
    steps = epochs * (len(pictures.train) // min(BATCH, len(pictures.train)))
    optimizer = torch.optim.AdamW(judge.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(steps, 2))
    for _ in range(steps):
        batch = pictures.train.take(torch.randint(len(pictures.train), (min(BATCH, len(pictures.train)),)))
        loss = F.cross_entropy(judge(batch.pixels)[1], batch.labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return judge.eval().requires_grad_(False)


def save_judge(judge: PictureJudge, path: Path, pictures: PictureSet) -> None:
    """Write a judge, in 16 bits. Raises CheckpointError."""
    # Half the size in the repository; the file is read back before use, so results are those of the stored judge.
    record = {"size": judge.size, "classes": pictures.classes, "data": pictures.digest}
    save_state(path, record, {name: tensor.half() for name, tensor in judge.state_dict().items()})


def load_judge(path: Path) -> tuple[PictureJudge, str]:
    """A stored judge, and the digest of its weights, since results compare only under one judge.

    Raises ResumeError for a damaged file or one without a judge.
    """
    record, tensors = load_state(path)
    try:
        channels, height, width = record["size"]
        judge = PictureJudge(channels, height, width, len(record["classes"]))
        judge.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (KeyError, TypeError, RuntimeError) as error:
        raise ResumeError(f"{path} is not a judge ({error})") from None
    return judge.eval().requires_grad_(False), digest(tensors)


# Distances

DRAWS = 50  # of a bootstrap


def frechet_distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Frechet distance of two Gaussians with the means and covariances of these features, (pictures, features) each.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) (Heusel et al. 2017, arXiv 1706.08500, equation 6).
    """
    means, covariances = zip(*((x.mean(0), np.cov(x, rowvar=False)) for x in (one, other)), strict=True)
    # (C1 C2)^(1/2) has the trace of the root of C1^(1/2) C2 C1^(1/2), which is symmetric.
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    product = np.linalg.eigvalsh(root @ covariances[1] @ root)
    squared = float(((means[0] - means[1]) ** 2).sum())
    return squared + float(np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * np.sqrt(product.clip(0)).sum())


def distance_interval(drawn: NDArray[np.float64], real: NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of `frechet_distance` over the drawn pictures. It is biased upwards, since each draw has
    fewer different pictures: only its width is meaningful, not its position."""
    generator = np.random.default_rng(0)
    found = [frechet_distance(drawn[generator.integers(len(drawn), size=len(drawn))], real) for _ in range(DRAWS)]
    low, high = np.quantile(found, (0.025, 0.975))
    middle = float(np.median(found))
    centre = frechet_distance(drawn, real)
    return centre + low - middle, centre + high - middle
