"""The benchmark `stage`: one step of one part with each backend, against this machine's rate of multiply-adds.

Each backend is measured in a process of its own, so that its memory can be told and libraries do not share threads.
"""

import copy
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
from torch import Tensor
from torch.nn import functional as F

from onesweep.loadtest.host.benchmark import Benchmark
from onesweep.loadtest.host.settings import StageSettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.backends import BACKENDS, DEFAULT_BACKEND, backend_named
from onesweep.stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from onesweep.stages.backends.on_device import DeviceRunner
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import CPU, load_block, load_stage
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.device import check_device, device_kind
from onesweep.stages.errors import InputError
from onesweep.stages.memory import return_large_buffers, trim
from onesweep.stages.model.architecture import VOCABULARY, Architecture
from onesweep.stages.model.block import Block
from onesweep.stages.model.llama import LlamaStage
from onesweep.stages.model.pipeline import ArStage, new_caches
from onesweep.stages.model.randomness import Purpose, normals

PREFIX = 128  # clean positions before the slots or before the new position, where the context has room for them
SIGMA = 1.0
MEASURE_S = 1.0  # time spent on each figure: long enough for the fastest call to meet no other work
LARGE = 1024  # a product whose operands leave the first caches, where a processor shows its best rate
TARGET_RATIO = 2.0
PLAIN = "plain"  # no backend: the modules themselves
WINDOWS = 32
WINDOW = 256  # symbols


@dataclass(frozen=True)
class BlockLosses:
    """Means over the text, nats a byte."""

    backend: str
    part: str
    next_byte_nats: float
    # At the geometric mean of the block's noise range, of the second half of each window given the first.
    denoise_nats: float


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
    memory_mb: float  # added by the runner and its use, without the weights of the loaded part


@dataclass(frozen=True)
class StageReport:
    gflops: float  # the best rate of a float32 matrix product on this machine, with that many threads
    figures: list[StageFigure]
    losses: list[BlockLosses]
    left_out: list[str]  # backends that are not installed


class StageBench(Benchmark[StageSettings, StageReport]):
    """`onesweep bench stage`: every backend that is installed, and the modules themselves."""

    @property
    def announcement(self) -> str:
        return f"one part of {self.settings.checkpoint.name}, each backend in a process of its own ..."

    def check(self) -> None:
        s = self.settings
        if min(s.slots, s.threads, *s.batches) < 1:
            raise InputError("--slots, --batch and --threads must be at least 1")
        check_device(s.device)
        block, _ = _parts(s.checkpoint)
        if s.slots > block.architecture.context_length:
            raise InputError(f"--slots {s.slots}: the context has {block.architecture.context_length} positions")
        if s.text is not None and not s.text.is_file():
            raise InputError(f"--text {s.text} is not a file")

    def measure(self) -> StageReport:
        s = self.settings
        computing = BACKENDS if s.device == "cpu" else (DEFAULT_BACKEND,)
        installed = [name for name in computing if is_installed(name)]
        rate = alone(best_rate, s)
        figures = [figure for name in (PLAIN, *installed) for figure in alone(_measure, s, name, rate)]
        losses = [x for name in installed for x in alone(chain_losses, s.checkpoint, name, s.text, s.device)]
        return StageReport(rate / 1e9, figures, losses, [name for name in computing if name not in installed])

    def table(self, result: StageReport) -> str:
        header = ("backend", "dtype", "what", "batch", "ms", "median", "floor ms", "x floor", "positions/s", "MB")
        rows = [
            (
                *(f.backend, f.dtype, f.what, str(f.batch), f"{f.ms:.3f}", f"{f.median_ms:.3f}"),
                *(f"{f.floor_ms:.3f}", f"{f.ratio:.2f}", f"{f.positions_per_s:.0f}", f"{f.memory_mb:.1f}"),
            )
            for f in result.figures
        ]
        losses = [(x.backend, x.part, f"{x.next_byte_nats:.4f}", f"{x.denoise_nats:.4f}") for x in result.losses]
        return "\n".join(
            [
                f"multiply-adds: {result.gflops:.1f} GFLOP/s with {self.settings.threads} thread(s) of "
                f"{device_kind(torch.device(self.settings.device))}",
                aligned(header, rows),
                "",
                aligned(("backend", "part", "next-byte nats", "denoising nats"), losses),
                *(f"left out, as it is not installed: {name}" for name in result.left_out),
            ]
        )

    def record(self, result: StageReport) -> dict[str, Any]:
        return {
            "bench": "stage",
            "slots": self.settings.slots,
            "threads": self.settings.threads,
            "device": device_kind(torch.device(self.settings.device)),
            "gflops": result.gflops,
            "target_ratio": TARGET_RATIO,
            "rows": [asdict(figure) for figure in result.figures],
            "losses": [asdict(losses) for losses in result.losses],
            "left_out": result.left_out,
        }


def denoise_flops(a: Architecture, slots: int, start: int) -> int:
    """Multiplications and additions of one evaluation; AdaLN's are left out, as they are kept from step to step."""
    ends = 2 * a.code_dim * a.width + a.width * VOCABULARY + 2 * a.code_dim * VOCABULARY
    return 2 * slots * (a.layers * _layer_products(a, start + slots) + ends)


def step_flops(a: Architecture, past: int) -> int:
    """Multiplications and additions of one new position of an AR stage, heads left out."""
    return 2 * a.layers * _layer_products(a, past + 1)


def best_rate(settings: StageSettings) -> float:
    """FLOP/s of the fastest matrix product: the shapes of a step, and a large one."""
    torch.set_num_threads(settings.threads)
    width, rows = _parts(settings.checkpoint)[0].architecture.width, settings.slots
    shapes = ((rows, width, 3 * width), (rows, width, 4 * width), (rows, 4 * width, width), (LARGE, LARGE, LARGE))
    rates, device = [], torch.device(settings.device)
    for m, k, n in shapes:
        x, y, out = (torch.rand(*shape).to(device) for shape in ((m, k), (k, n), (m, n)))
        rates.append(2 * m * k * n / min(times_of(partial(torch.mm, x, y, out=out), device)))
    return max(rates)


def _layer_products(a: Architecture, keys: int) -> int:
    return 12 * a.width**2 + 2 * keys * a.width


def _parts(checkpoint: Path, device: torch.device = CPU) -> tuple[Block, ArStage | None]:
    """The first block and the first stage."""
    bundle = find_bundle(checkpoint)
    if bundle.chain is None:
        raise InputError(f"{checkpoint} has no chain of blocks, which this bench measures")
    block = load_block(bundle.chain, 0, device)
    stage = load_stage(bundle.ar, 0, device) if bundle.ar else None
    if isinstance(stage, LlamaStage):
        raise InputError(f"{bundle.ar} holds a pretrained model; this bench measures models that are trained here")
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


def _measure(settings: StageSettings, name: str, rate: float) -> list[StageFigure]:
    """The figures of a backend; of PLAIN those of the modules without one, and of the block in bfloat16."""
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    block, stage = _parts(settings.checkpoint, device)
    backend = None if name == PLAIN else backend_named(name, device)
    labels = (name, "int8" if name.endswith("int8") else "float32")
    before = _held(block)  # a library's own memory is not that of a runner
    runner = _plain(PlainBlock(block), device) if backend is None else backend.block(block)
    figures = list(_denoise_figures(settings, runner, block, labels, rate, before))
    if stage is not None:
        before = _held(stage)
        reader = _plain(PlainStage(stage), device) if backend is None else backend.stage(stage)
        figures += _step_figures(settings, reader, stage, labels, rate, before)
    if backend is None:
        runner = _plain(PlainBlock(block, bfloat16=True), device)
        figures += _denoise_figures(settings, runner, block, (PLAIN, "bfloat16"), rate, before)
    return figures


def _denoise_figures(
    settings: StageSettings, runner: BlockRunner, block: Block, labels: tuple[str, str], rate: float, before: int
) -> Iterator[StageFigure]:
    a, slots = block.architecture, settings.slots
    start = min(PREFIX, a.context_length - slots)
    flops = denoise_flops(a, slots, start)
    for batch in settings.batches:
        pieces = []
        for _ in range(batch):
            z, estimate = torch.randn(2, slots, a.code_dim)
            # caches of random numbers: time depends on no value, but zeros can be quicker to multiply
            pieces.append(NoisyPiece(z, estimate * block.data_std, SIGMA, start, _caches(block, start)))
        times = times_of(partial(runner.denoise, pieces), block.rotary.device)
        yield _figure(labels, "denoise", batch, times, batch * flops / rate, batch * slots, _held(block) - before)


def _step_figures(
    settings: StageSettings, runner: StageRunner, stage: ArStage, labels: tuple[str, str], rate: float, before: int
) -> Iterator[StageFigure]:
    a = stage.architecture
    past = min(PREFIX, a.context_length - 1)
    for batch in settings.batches:
        pieces = [CleanPiece(_new_position(stage), _caches(stage, past)) for _ in range(batch)]

        def step(pieces: Sequence[CleanPiece] = pieces) -> None:
            for piece in pieces:
                for cache in piece.caches:
                    cache.length = past  # or each call would have a longer past than the last
            runner.read(pieces)

        times, floor_s = times_of(step, stage.rotary.device), batch * step_flops(a, past) / rate
        yield _figure(labels, "ar step", batch, times, floor_s, batch, _held(stage) - before)


def _figure(
    labels: tuple[str, str], what: str, batch: int, times: list[float], floor_s: float, positions: int, added: int
) -> StageFigure:
    best, (backend, dtype) = min(times), labels
    median_ms = statistics.median(times) * 1000
    return StageFigure(
        *(backend, dtype, what, batch, best * 1000, median_ms, floor_s * 1000, best / floor_s, positions / best),
        max(added, 0) / 1e6,
    )


def times_of(function: Callable[[], object], device: torch.device = CPU) -> list[float]:
    """Seconds of each call, for about MEASURE_S; with one thread its processor time, which others do not share."""
    clock = time.thread_time if device == CPU and torch.get_num_threads() == 1 else time.perf_counter
    # twice: the first call allocates, the second finds kernels chosen and caches warm
    function()
    function()
    end = time.perf_counter() + MEASURE_S
    times: list[float] = []
    while not times or time.perf_counter() < end:
        begin = clock()
        function()
        if device.type == "cuda":  # which has only been given the work by now
            torch.cuda.synchronize(device)
        times.append(clock() - begin)
    return times


def _new_position(stage: ArStage) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1,)) if stage.is_first else torch.randn(1, stage.architecture.width)


def _caches(part: Block | ArStage, length: int) -> list[Any]:
    a = part.architecture
    caches = new_caches(a.layers, a, a.context_length, device=part.rotary.device)
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
        cache.length = length
    return caches


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _held(part: Block | ArStage) -> int:
    """Bytes in use where a part is: this process's, or its device's."""
    trim()
    device = part.rotary.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident()


def _plain(runner: Any, device: torch.device) -> Any:  # noqa: ANN401 - of a block or a stage
    return runner if device == CPU else DeviceRunner(runner, device)


class PlainBlock(BlockRunner):
    """:param bfloat16: under torch's autocast, with caches in bfloat16: measured, not served."""

    def __init__(self, block: Block, bfloat16: bool = False) -> None:
        self.block, self.bfloat16 = block, bfloat16

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.block.read(piece.source[None], piece.caches)[0][0] for piece in pieces]

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        memory = [cache.stored() for cache in piece.caches]
        if self.bfloat16:
            memory = [(keys.bfloat16(), values.bfloat16()) for keys, values in memory]
        with torch.autocast(piece.z.device.type, torch.bfloat16, enabled=self.bfloat16):
            sigma = piece.z.new_full((1, 1), piece.sigma)
            logits = self.block.denoise(piece.z[None], piece.estimate[None], sigma, memory, piece.start)
        return Denoised(logits[0], self.block.point(logits / piece.divisor)[0])


class PlainStage(StageRunner):
    def __init__(self, stage: ArStage) -> None:
        self.stage = stage

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.stage.read(piece.source[None], piece.caches)[0] for piece in pieces]

    @torch.inference_mode()
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [
            torch.cat([self.stage.read(branch[None], copy.deepcopy(piece.caches)) for branch in piece.source])
            for piece in pieces
        ]

    @torch.inference_mode()
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [self.stage.next_byte(piece[None])[0] for piece in hidden]


def chain_losses(checkpoint: Path, backend: str, text: Path | None, device: str = "cpu") -> list[BlockLosses]:
    """:param text: windows spread over this file; the manifest's probe text if None."""
    directory = find_bundle(checkpoint).chain
    assert directory is not None
    manifest = read_manifest(directory)
    assert manifest.partition is not None
    windows = _windows(symbols_of(tokenizer_of(directory), text.read_bytes() if text else manifest.probe_text.encode()))
    losses = []
    for index in range(manifest.architecture.parts):
        block = load_block(directory, index, torch.device(device))
        high, low = manifest.partition.range(index)
        runner = backend_named(backend, torch.device(device)).block(block)
        sums = torch.tensor([_losses(runner, block, window, (high * low) ** 0.5) for window in windows])
        losses.append(BlockLosses(backend, f"block {index}", *sums.mean(dim=0).tolist()))
    return losses


def _windows(text: list[int]) -> list[Tensor]:
    """Up to WINDOWS windows, spread evenly."""
    size = min(WINDOW, len(text))
    if size < 2:
        raise InputError("the text for losses has fewer than two symbols; choose another --text FILE")
    count = min(WINDOWS, len(text) // size)
    starts = [i * (len(text) - size) // max(count - 1, 1) for i in range(count)]
    return [torch.tensor(text[at : at + size]) for at in starts]


@torch.inference_mode()
def _losses(runner: BlockRunner, block: Block, window: Tensor, sigma: float) -> tuple[float, float]:
    a = block.architecture
    window = window[: a.context_length]
    half = len(window) // 2  # the second half is denoised after the first, as a chunk after its prompt
    device = block.rotary.device
    caches = new_caches(a.layers, a, len(window), device=device)
    (first,) = runner.read([CleanPiece(window[:half], caches)])
    target = window[half:]
    noise = normals(0, Purpose.INITIAL_NOISE, half, len(target), a.code_dim)
    z = block.codes.cpu()[target] + sigma * noise
    (denoised,) = runner.denoise([NoisyPiece(z, torch.zeros_like(z), sigma, half, caches)])
    (second,) = runner.read([CleanPiece(target, caches)])
    logits = block.next_byte(torch.cat([first, second])[None].to(device)).cpu()[0, :-1]
    return float(F.cross_entropy(logits, window[1:])), float(F.cross_entropy(denoised.logits, target))
