"""`onesweep bench pictures`: how good drawn pictures are, and what they cost over far links; and the judge."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.commands import CHECKPOINT, absolute, add_measurement, numbers_flag, say
from onesweep.loadtest.report.record import check_report_options, origin, settings_record, write_report
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.serving.drawing import EXPERT_RULES
from onesweep.stages.errors import InputError, one_of
from onesweep.stages.settings import check_destination, flag, from_flags, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onesweep.loadtest.pictures.drawing import DrawnSet, NetDrawing
    from onesweep.stages.pictures.architecture import PictureArchitecture

# Modules that need torch are imported when a command runs: help should not wait for it.

# Floors are computed, so that one run compares all modes at all links and a busy machine changes nothing but the
# arithmetic. What real links take is measured by real hosts (tests/serving/drawing, `onesweep draw --link-ms`).
LINKS_MS = (20, 60, 150)  # round trips, as the lab's profiles have them
RATE_MBPS = 100.0
MODES = ("chain", "steps", "local", "experts:once", "experts:1")
CODED = ("chain", "experts:1")  # modes in which E travels, in a codec
REAL = "training pictures"


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
        ("chain", "steps", "local"), f"also {', '.join(MODES[3:])}", metavar="M[,M]", shown="chain,steps,local"
    )
    count: int = setting(2000, "pictures of each row", least=100, most=60_000)
    levels: tuple[int, ...] = setting((6, 12, 24), "steps from noise to picture", **numbers_flag("--levels", "K"))
    codecs: tuple[str, ...] = setting(("int8",), "between blocks or experts: fp32, int8, int4", metavar="C[,C]")
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


@dataclass(frozen=True)
class PictureRow:
    """One mode at one number of levels; or real pictures, of which only the quality is known."""

    mode: str
    count: int
    distance: float  # Frechet distance to the test part
    distance_low: float
    distance_high: float
    accuracy: float  # share whose class the judge names
    copies: float  # median distance to the nearest training picture
    levels: int | None = None
    codec: str | None = None
    moves: float | None = None  # of experts: changes of the host, a picture
    delays: float | None = None  # one-way delays on the way of a picture
    evaluations: float | None = None  # layers x evaluations of a picture
    compute_ms: float | None = None
    per_host_second: float | None = None  # pictures that a second of one thread's arithmetic draws
    hop_bytes: int | None = None
    seconds_20: float | None = None
    seconds_60: float | None = None
    seconds_150: float | None = None


def picture_table(rows: Sequence[PictureRow]) -> str:
    """Rows in aligned columns."""
    from onesweep.loadtest.report.table import Table, number_column, text_column

    table = Table[PictureRow](
        [
            text_column("mode"),
            number_column("levels", "levels", 0),
            ("codec", lambda row: row.codec or "-"),
            number_column("FD", "distance", 2),
            ("95 %", lambda row: f"{row.distance_low:.2f} to {row.distance_high:.2f}"),
            number_column("accuracy", "accuracy", 3),
            number_column("nearest", "copies", 0),
            number_column("moves", "moves", 2),
            number_column("delays", "delays", 1),
            number_column("layer evaluations", "evaluations", 0),
            number_column("compute ms", "compute_ms", 2),
            number_column("pictures a host-s", "per_host_second", 1),
            number_column("hop bytes", "hop_bytes", 0),
            *(number_column(f"s at {ms} ms", f"seconds_{ms}", 3) for ms in LINKS_MS),
        ]
    )
    return table.aligned(rows)


def least_seconds(rows: Sequence[PictureRow]) -> str:
    """A line for each opponent: its least seconds on links of 60 ms at an FD no worse than the chain's, at each of the
    chain's levels; empty without a chain or without an opponent."""
    from onesweep.loadtest.report.table import aligned

    chain = [row for row in rows if row.mode == "chain"]
    chain = [row for row in chain if row.codec == chain[0].codec]
    opponents = dict.fromkeys(row.mode for row in rows if row.mode not in ("chain", REAL))
    if not chain or not opponents:
        return ""

    def cell(mode: str, mine: PictureRow) -> str:
        as_good = [row.seconds_60 or 0.0 for row in rows if row.mode == mode and row.distance <= mine.distance]
        return f"{min(as_good):.3f} ({min(as_good) / (mine.seconds_60 or 0.0):.1f} x)" if as_good else "never"

    # Points, not intervals: two modes whose FDs hardly differ may swap places with another seed.
    titles = [f"{row.levels} levels" for row in chain]
    lines = [("FD of the chain", *(f"{row.distance:.1f}" for row in chain))]
    lines += [("chain", *(f"{row.seconds_60:.3f}" for row in chain))]
    lines += [(mode, *(cell(mode, row) for row in chain)) for mode in opponents]
    return aligned(("least s at the chain's FD, 60 ms", *titles), lines)


def delays_of(mode: str, hosts: int, levels: int, moves: float = 0.0) -> float:
    """One-way delays between the request and the picture, over `hosts` hosts and the router.

    The router holds the router net of experts, too, so the first host is the right one.
    """
    return {
        "chain": hosts + 1,
        "steps": (levels + 1) * hosts + 1,
        "local": 0,
        "experts:once": 2,
        "experts:1": 2 + moves,
    }[mode]


def hop_bytes_of(mode: str, a: PictureArchitecture, codec: str) -> int:
    """Largest hop of one picture: E, or hidden states with E and the pictures denoised before, in fp32."""
    from onesweep.stages.model.codec import codec_named

    if mode == "local":
        return 0
    if mode.startswith(("chain", "experts")):
        # Where an expert takes over, D of the level before comes with E.
        return codec_named(codec).size(a.tokens, a.patch_dim) * (1 + (mode == "experts:1"))
    return 4 * a.tokens * (a.features + 2 * a.patch_dim)


def floor_s(delays: float, compute_ms: float, hop_bytes: int, link_ms: int) -> float:
    """Seconds that a picture takes at least: delays, bytes over the rate of each link, and arithmetic on its way."""
    return delays * (link_ms / 2000 + hop_bytes * 8 / (RATE_MBPS * 1e6)) + compute_ms / 1000


add_pictures = partial(add_measurement, settings=PictureBenchSettings, svg=True)
add_picture_judge = partial(add_measurement, settings=PictureJudgeSettings)


def run_picture_judge(options: argparse.Namespace) -> int:
    """Train a judge."""
    from onesweep.loadtest.pictures.judge import accuracy, load_judge, save_judge, train_judge
    from onesweep.trainer.pictures.data import load_pictures

    settings = from_flags(PictureJudgeSettings, options)
    check_report_options(options, charts=False)
    check_destination(settings.out, "--out")
    pictures = load_pictures(settings.data)
    save_judge(train_judge(pictures, settings.epochs, settings.seed), settings.out, pictures)
    stored = load_judge(settings.out)
    figures = {"valid": accuracy(stored.judge, pictures.valid)}
    if len(pictures.test):
        figures["test"] = accuracy(stored.judge, pictures.test)
    print("\n".join(f"{name:6} {share:.4f} of the classes" for name, share in figures.items()))
    print(f"{settings.out}: {stored.digest}")
    write_report(options, {**origin(seed=settings.seed), "accuracy": figures, "digest": stored.digest})
    return 0


def run_pictures(options: argparse.Namespace) -> int:
    """Draw with every mode, and judge."""
    from onesweep.loadtest.report.chart import draw_chart

    settings = from_flags(PictureBenchSettings, options)
    check_report_options(options)
    rows, record = measure_pictures(settings)
    print(picture_table(rows))
    if lines := least_seconds(rows):
        print("\n" + lines)
    print(
        f"\nFD: Frechet distance of 64 features of a judge ({record['judge'][:12]}) to {record['test_pictures']} test "
        "pictures: it compares with other rows of this judge only. nearest: median distance to the nearest training "
        f"picture. Seconds are floors: delays, bytes at {RATE_MBPS:g} Mbit/s and one thread's arithmetic."
    )
    chart = draw_chart(lambda figure: _draw(figure, rows), "pictures", 6.5, 4.0, own_page=True) if options.svg else ""
    write_report(options, record, chart=lambda: chart)
    return 0


def measure_pictures(settings: PictureBenchSettings) -> tuple[list[PictureRow], dict[str, Any]]:
    """Rows of all modes, and the record of the run. Raises OnesweepError."""
    import numpy as np
    import torch

    from onesweep.loadtest.pictures.judge import distance_interval, frechet_distance, load_judge, nearest
    from onesweep.stages.pictures.trajectory import MAX_LEVELS, SOLVERS
    from onesweep.trainer.pictures.data import load_pictures

    for mode in settings.modes:
        if mode not in MODES:
            raise InputError(f"unknown mode {mode!r}{one_of(mode, MODES)}")
    solver = next((each for each in SOLVERS if each == settings.solver), None)
    if solver is None:
        raise InputError(f"unknown solver {settings.solver!r}{one_of(settings.solver, SOLVERS)}")
    if not settings.levels or not all(1 <= levels <= MAX_LEVELS for levels in settings.levels):
        raise InputError(f"--levels takes numbers from 1 to {MAX_LEVELS}")
    stored, pictures = load_judge(settings.judge), load_pictures(settings.data)
    if not len(pictures.test):
        raise InputError(f"{settings.data} has no test part to compare with")
    torch.set_num_threads(1)
    known = torch.from_numpy(np.random.default_rng(0).permutation(len(pictures.train)))
    # Each picture is held against 57,000: the sample keeps that to seconds.
    # Copies are looked for among all training pictures, in a sample of what was drawn.
    looked = min(settings.count, 500)
    real, _ = stored.judge.look(pictures.test.pixels)

    def quality(pixels: torch.Tensor, labels: Sequence[int]) -> dict[str, Any]:
        features, found = stored.judge.look(pixels)
        low, high = distance_interval(features, real)
        return {
            "count": len(pixels),
            "distance": frechet_distance(features, real),
            "distance_low": low,
            "distance_high": high,
            "accuracy": float((found == np.asarray(labels)).mean()),
            "copies": float(np.median(nearest(pixels[:looked], pictures.train.pixels))),
        }

    # The same number of real pictures has the same bias, so a row can be no better than this one.
    sample = pictures.train.take(known[: settings.count])
    held_out = float(np.median(nearest(pictures.test.pixels[:looked], pictures.train.pixels)))
    rows = [PictureRow(REAL, **{**quality(sample.pixels, sample.labels.tolist()), "copies": held_out})]
    classes = [i % len(pictures.classes) for i in range(settings.count)]
    for mode in settings.modes:
        for codec in settings.codecs if mode in CODED else ("fp32",):
            net = net_of(settings, mode, codec, pictures.classes)
            for levels in settings.levels:
                if levels < net.ranges:
                    continue
                say(f"{mode}, {levels} levels, {codec} ...")
                drawn = net.draw(classes, settings.seed, levels, solver, settings.guidance)
                rows.append(_row(mode, codec, levels, drawn, net, quality(drawn.pixels, classes)))
    record = {
        "bench": "pictures",
        **origin(seed=settings.seed),
        "settings": settings_record(settings),
        "judge": stored.digest,
        "test_pictures": len(pictures.test),
        "rows": [asdict(row) for row in rows],
    }
    return rows, record


def net_of(settings: PictureBenchSettings, mode: str, codec: str, classes: Sequence[str]) -> NetDrawing:
    """The nets of one mode. Raises OnesweepError where the bundle has none that draws these classes."""
    from onesweep.loadtest.pictures.drawing import ChainSet, ExpertSet, StepSet
    from onesweep.stages.checkpoint.bundle import find_bundle

    folder = mode.partition(":")[0]
    directory = getattr(find_bundle(settings.checkpoint), folder)
    if directory is None:
        raise InputError(f"{settings.checkpoint} has no {folder}/: leave {mode} out of --modes")
    makers: dict[str, Callable[[Path], NetDrawing]] = {
        "chain": lambda path: ChainSet(path, codec),
        **{name: partial(ExpertSet, rule=rule, codec=codec) for name, rule in EXPERT_RULES.items()},
    }
    net = makers.get(mode, StepSet)(directory)
    if net.architecture.classes != tuple(classes):
        raise InputError(
            f"{directory} draws other classes than {settings.data} has: give the data that it was trained on"
        )
    return net


def _row(mode: str, codec: str, levels: int, drawn: DrawnSet, net: NetDrawing, quality: dict[str, Any]) -> PictureRow:
    a = net.architecture
    delays = delays_of(mode, a.parts, levels, drawn.moves or 0)
    size = hop_bytes_of(mode, a, codec)
    return PictureRow(
        mode,
        levels=levels,
        codec=codec,
        moves=drawn.moves,
        delays=delays,
        evaluations=drawn.evaluations,
        compute_ms=drawn.compute_ms,
        per_host_second=1000 / drawn.compute_ms,
        hop_bytes=size,
        seconds_20=floor_s(delays, drawn.compute_ms, size, 20),
        seconds_60=floor_s(delays, drawn.compute_ms, size, 60),
        seconds_150=floor_s(delays, drawn.compute_ms, size, 150),
        **quality,
    )


def _draw(figure: Figure, rows: Sequence[PictureRow]) -> None:
    from onesweep.loadtest.report.chart import COLOURS, FAINT, MARKERS, grid

    axes = figure.subplots()
    real = next(row for row in rows if row.mode == REAL)
    for i, mode in enumerate(dict.fromkeys(row.mode for row in rows if row.mode != REAL)):
        shown = [row for row in rows if row.mode == mode and row.codec in ("int8", "fp32")]
        points = sorted((row.seconds_60 or 0.0, row.distance, row.levels) for row in shown)
        seconds, distances, levels = zip(*points, strict=True)
        axes.plot(seconds, distances, MARKERS[i] + "-", color=COLOURS[i], label=mode, markersize=5, linewidth=1)
        for point in zip(seconds, distances, levels, strict=True):
            axes.annotate(str(point[2]), point[:2], textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.axhline(real.distance, color=FAINT, linewidth=1)
    axes.annotate("real pictures", (1, real.distance), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds a picture, three hosts, links of 60 ms (floor)")
    axes.set_ylabel("Frechet distance to test pictures")
    axes.legend(frameon=False, fontsize=8)
    grid(axes)
