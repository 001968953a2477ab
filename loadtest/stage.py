"""What one step of one part costs, for each backend, against this machine's multiply-adds.

Each backend is measured in a process of its own, so that its memory can be told and libraries do not share threads.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from loadtest.plain import PlainBlock, PlainStage
from loadtest.stage_losses import Losses, chain_losses
from loadtest.table import aligned
from stages.allocator import return_large_buffers, trim
from stages.ar import ArStage, new_caches
from stages.architecture import VOCABULARY, Architecture
from stages.backends import BACKENDS, backend_named
from stages.backends.base import BlockRunner, CleanPiece, NoisyPiece, StageRunner
from stages.block import Block
from stages.bundle import find_bundle
from stages.checkpoint import load_block, load_stage
from stages.errors import InputError
from stages.llama.stage import LlamaStage

PREFIX = 128
"""Clean positions before the slots or before the new position, where the context has room for them."""
SIGMA = 1.0
MEASURE_S = 1.0
"""Time spent on each figure."""
LARGE = 1024
TARGET_RATIO = 2.0
PLAIN = "plain"
"""No backend: the modules themselves."""


@dataclass(frozen=True)
class StageBenchSettings:
    """:param text: what losses are measured on; the manifest's probe text if None."""

    checkpoint: Path
    slots: int = 128
    batches: tuple[int, ...] = (1, 4, 16)
    threads: int = 1
    text: Path | None = None


@dataclass(frozen=True)
class StageFigure:
    """One operation of one backend. ms: the fastest of all calls; floor: as many multiply-adds."""

    backend: str
    dtype: str
    what: str
    batch: int
    ms: float
    median_ms: float
    floor_ms: float
    ratio: float
    positions_per_s: float
    memory_mb: float
    """What making the runner and using it added to the process, weights of the loaded part not counted."""


@dataclass(frozen=True)
class StageReport:
    gflops: float
    """The best rate of a float32 matrix product on this machine, with that many threads."""
    figures: list[StageFigure]
    losses: list[Losses]
    left_out: list[str]
    """Backends that are not installed."""


def check_stage_settings(settings: StageBenchSettings) -> None:
    """Raises InputError or CheckpointError."""
    if min(settings.slots, settings.threads, *settings.batches) < 1:
        raise InputError("--slots, --batch and --threads must be at least 1")
    block, _ = _parts(settings.checkpoint)
    if settings.slots > block.architecture.context_bytes:
        raise InputError(f"--slots {settings.slots}: the context has {block.architecture.context_bytes} positions")
    if settings.text is not None and not settings.text.is_file():
        raise InputError(f"--text {settings.text} is not a file")


def measure_stage(settings: StageBenchSettings) -> StageReport:
    """Every backend that is installed. Raises OnesweepError."""
    figures: list[StageFigure] = []
    losses: list[Losses] = []
    installed = [name for name in BACKENDS if is_installed(name)]
    rate = alone(best_rate, settings)
    figures += alone(_measure_plain, settings, rate)
    for name in installed:
        figures += alone(_measure_backend, settings, name, rate)
        losses += alone(chain_losses, settings.checkpoint, name, settings.text)
    return StageReport(rate / 1e9, figures, losses, [name for name in BACKENDS if name not in installed])


def stage_table(settings: StageBenchSettings, report: StageReport) -> str:
    header = ("backend", "dtype", "what", "batch", "ms", "median", "floor ms", "x floor", "positions/s", "MB")
    rows = [
        (
            *(f.backend, f.dtype, f.what, str(f.batch), f"{f.ms:.3f}", f"{f.median_ms:.3f}"),
            *(f"{f.floor_ms:.3f}", f"{f.ratio:.2f}", f"{f.positions_per_s:.0f}", f"{f.memory_mb:.1f}"),
        )
        for f in report.figures
    ]
    losses = [(x.backend, x.part, f"{x.next_byte_nats:.4f}", f"{x.denoise_nats:.4f}") for x in report.losses]
    return "\n".join(
        [
            f"multiply-adds: {report.gflops:.1f} GFLOP/s with {settings.threads} thread(s)",
            aligned(header, rows),
            "",
            aligned(("backend", "part", "next-byte nats", "denoising nats"), losses),
            *(f"left out, as it is not installed: {name}" for name in report.left_out),
        ]
    )


def stage_record(settings: StageBenchSettings, report: StageReport) -> dict[str, Any]:
    """Figures for a JSON file."""
    return {
        "bench": "stage",
        "slots": settings.slots,
        "threads": settings.threads,
        "gflops": report.gflops,
        "target_ratio": TARGET_RATIO,
        "rows": [asdict(figure) for figure in report.figures],
        "losses": [asdict(losses) for losses in report.losses],
        "left_out": report.left_out,
    }


def denoise_flops(a: Architecture, slots: int, start: int) -> int:
    """Multiplications and additions of one evaluation; AdaLN's are left out, as they are kept from step to step."""
    ends = 2 * a.code_dim * a.width + a.width * VOCABULARY + 2 * a.code_dim * VOCABULARY
    return 2 * slots * (a.layers * _layer_products(a, start + slots) + ends)


def step_flops(a: Architecture, past: int) -> int:
    """Multiplications and additions of one new position of an AR stage, heads left out."""
    return 2 * a.layers * _layer_products(a, past + 1)


def best_rate(settings: StageBenchSettings) -> float:
    """FLOP/s of the fastest matrix product: the shapes of a step, and a large one."""
    torch.set_num_threads(settings.threads)
    width, rows = _parts(settings.checkpoint)[0].architecture.width, settings.slots
    shapes = ((rows, width, 3 * width), (rows, width, 4 * width), (rows, 4 * width, width), (LARGE, LARGE, LARGE))
    rates = []
    for m, k, n in shapes:
        x, y, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
        rates.append(2 * m * k * n / min(times_of(partial(torch.mm, x, y, out=out))))
    return max(rates)


def _layer_products(a: Architecture, keys: int) -> int:
    return 12 * a.width**2 + 2 * keys * a.width


def _parts(checkpoint: Path) -> tuple[Block, ArStage | None]:
    """The first block and the first stage."""
    bundle = find_bundle(checkpoint)
    if bundle.chain is None:
        raise InputError(f"{checkpoint} has no chain of blocks, which this bench measures")
    block = load_block(bundle.chain, 0)
    stage = load_stage(bundle.ar, 0) if bundle.ar else None
    if isinstance(stage, LlamaStage):
        raise InputError(f"{bundle.ar} holds a pretrained model; this bench measures models of bytes")
    return block, stage


def is_installed(backend: str) -> bool:
    try:
        backend_named(backend)
    except InputError:
        return False
    return True


def alone(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Call it in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), return_large_buffers) as pool:
        return pool.submit(function, *arguments).result()


def _measure_backend(settings: StageBenchSettings, name: str, rate: float) -> list[StageFigure]:
    torch.set_num_threads(settings.threads)
    block, stage = _parts(settings.checkpoint)
    backend, dtype = backend_named(name), "int8" if name.endswith("int8") else "float32"
    trim()
    before = resident()
    runner = backend.block(block)
    figures = list(_denoise_figures(settings, runner, block, (name, dtype), rate, before))
    if stage is not None:
        before = resident()
        figures += _step_figures(settings, backend.stage(stage), stage, (name, dtype), rate, before)
    return figures


def _measure_plain(settings: StageBenchSettings, rate: float) -> list[StageFigure]:
    """The modules without a backend, and the block in bfloat16."""
    torch.set_num_threads(settings.threads)
    block, stage = _parts(settings.checkpoint)
    before = resident()
    figures = list(_denoise_figures(settings, PlainBlock(block), block, (PLAIN, "float32"), rate, before))
    if stage is not None:
        figures += _step_figures(settings, PlainStage(stage), stage, (PLAIN, "float32"), rate, before)
    runner = PlainBlock(block, bfloat16=True)
    return figures + list(_denoise_figures(settings, runner, block, (PLAIN, "bfloat16"), rate, before))


def _denoise_figures(
    settings: StageBenchSettings, runner: BlockRunner, block: Block, labels: tuple[str, str], rate: float, before: int
) -> Iterator[StageFigure]:
    a, slots = block.architecture, settings.slots
    start = min(PREFIX, a.context_bytes - slots)
    flops = denoise_flops(a, slots, start)
    for batch in settings.batches:
        pieces = []
        for _ in range(batch):
            z, estimate = torch.randn(2, slots, a.code_dim)
            pieces.append(NoisyPiece(z, estimate * block.data_std, SIGMA, start, _caches(block, start)))
        times = times_of(partial(runner.denoise, pieces))
        yield _figure(labels, "denoise", batch, times, batch * flops / rate, batch * slots, before)


def _step_figures(
    settings: StageBenchSettings, runner: StageRunner, stage: ArStage, labels: tuple[str, str], rate: float, before: int
) -> Iterator[StageFigure]:
    a = stage.architecture
    past = min(PREFIX, a.context_bytes - 1)
    for batch in settings.batches:
        pieces = [CleanPiece(_new_position(stage), _caches(stage, past)) for _ in range(batch)]

        def step(pieces: Sequence[CleanPiece] = pieces) -> None:
            for piece in pieces:
                for cache in piece.caches:
                    cache.length = past
            runner.read(pieces)

        yield _figure(labels, "ar step", batch, times_of(step), batch * step_flops(a, past) / rate, batch, before)


def _figure(
    labels: tuple[str, str], what: str, batch: int, times: list[float], floor_s: float, positions: int, before: int
) -> StageFigure:
    best, (backend, dtype) = min(times), labels
    trim()
    memory_mb = max(resident() - before, 0) / 1e6
    median_ms = statistics.median(times) * 1000
    return StageFigure(
        *(backend, dtype, what, batch, best * 1000, median_ms, floor_s * 1000, best / floor_s, positions / best),
        memory_mb,
    )


def times_of(function: Callable[[], object]) -> list[float]:
    """Seconds of each call, for about MEASURE_S; with one thread its processor time, which others do not share."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    function()
    end = time.perf_counter() + MEASURE_S
    times: list[float] = []
    while not times or time.perf_counter() < end:
        begin = clock()
        function()
        times.append(clock() - begin)
    return times


def _new_position(stage: ArStage) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1,)) if stage.is_first else torch.randn(1, stage.architecture.width)


def _caches(part: Block | ArStage, length: int) -> list[Any]:
    caches = new_caches(part.architecture.layers, part.architecture, part.architecture.context_bytes)
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
        cache.length = length
    return caches


def resident() -> int:
    return int(psutil.Process().memory_info().rss)
