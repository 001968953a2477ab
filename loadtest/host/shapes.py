"""Rows of `bench host --widths`: a block and a stage of a large model, on a processor or a GPU.

Weights are random and one part is held at a time: time depends on shapes only.
"""

import time
from collections.abc import Callable

import psutil
import torch

from loadtest.commands import Row
from loadtest.host.settings import HostBenchSettings
from stages.device import check_device
from stages.errors import InputError
from stages.model.architecture import Architecture
from stages.model.block import Block, Codes
from stages.model.pipeline import ArStage, new_caches, without_memory

HEAD_DIM = 64
LAYERS = 4
PROMPT_BYTES = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURE_S = 1.0  # time spent on each figure: long enough for the fastest call to meet no other work
COPIED_BYTES = 1 << 28  # by which a device's memory is measured: beyond any cache
MEMORY_SHARE = 0.8  # of the available memory, for one block: the rest is for activations and caches
PATTERN = 1 << 16


def measure_shapes(settings: HostBenchSettings) -> list[Row]:
    """Rows of each width. Raises InputError for a device that is not there, or a width that does not fit its memory."""
    check_device(settings.device)
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    for width in settings.widths:
        if width < HEAD_DIM or width % HEAD_DIM:
            raise InputError(f"--widths must be multiples of {HEAD_DIM}, not {width}")
    rows = list[Row]()
    for width in settings.widths:
        a = Architecture(
            parts=3, layers=LAYERS, width=width, heads=width // HEAD_DIM, context_length=PROMPT_BYTES + settings.slots
        )
        size = _block_bytes(a, dtype)
        _check_memory(width, size, device)
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            evaluation_s = _evaluation_s(a, settings.slots, dtype, device)
            token_s, floor_s = _token_s(a, dtype, device)
        rows += [
            Row(f"width {width}: memory of a block", size / 1e9, "GB"),
            Row(f"width {width}: a block evaluates {settings.slots} slots", 1000 * evaluation_s, "ms"),
            Row(f"width {width}: an AR stage reads a token", 1000 * token_s, "ms"),
            Row(f"width {width}: that over reading its weights once", token_s / floor_s, "x"),
        ]
    return rows


def _block_bytes(a: Architecture, dtype: torch.dtype) -> int:
    with without_memory():
        return sum(p.numel() for p in Block(a, 0, Codes(0, a.code_dim)).parameters()) * dtype.itemsize


def _check_memory(width: int, size: int, device: torch.device) -> None:
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(device)[0])
    if size > MEMORY_SHARE * free:
        raise InputError(f"--widths {width}: a block takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free")


def _evaluation_s(a: Architecture, slots: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of one evaluation of one block."""
    codes, generator = Codes(0, a.code_dim), torch.Generator().manual_seed(0)
    with without_memory():  # torch's own initialisation of a large block takes longer than the measurement
        block = Block(a, 0, codes)
    _fill(block, dtype, generator, device)
    _, memory = block.read(torch.randint(0, 256, (1, PROMPT_BYTES), generator=generator).to(device))
    z = torch.randn(1, slots, a.code_dim, generator=generator).to(device)
    sigma = torch.ones(1, 1, device=device)
    return _best_s(lambda: block.denoise(z, 0.1 * z, sigma, memory, PROMPT_BYTES), device)


def _token_s(a: Architecture, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Seconds of one AR step of one stage, and those that its weights take at the rate of a copy of memory."""
    generator = torch.Generator().manual_seed(0)
    with without_memory():
        stage = ArStage(a, 1)  # a middle one: layers only
    _fill(stage, dtype, generator, device)
    hidden = torch.randn(1, PROMPT_BYTES, a.width, generator=generator).to(device, dtype)
    caches = new_caches(a.layers, a, a.context_length, device=device)
    stage.read(hidden, caches)

    def step() -> None:
        for cache in caches:
            cache.length = PROMPT_BYTES
        stage.read(hidden[:, :1], caches)

    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    rate = 2 * COPIED_BYTES / _best_s(lambda: target.copy_(source), device)
    weights = sum(p.numel() * p.element_size() for p in stage.parameters())
    return _best_s(step, device), weights / rate


@torch.inference_mode()
def _best_s(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest call, tried for about MEASURE_S."""
    # twice: the first call allocates, the second finds kernels chosen and caches warm
    function()
    function()
    end, best = time.perf_counter() + MEASURE_S, float("inf")
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        function()
        if device.type == "cuda":  # which has only been given the work by now
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _fill(module: Block | ArStage, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    """Give a module on the meta device numbers, cheaply: a repeated pattern multiplies no faster than others."""
    module.to(dtype).to_empty(device=device)
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        pattern = (scale * torch.randn(PATTERN, generator=generator)).to(device, dtype)
        flat = parameter.data.view(-1)
        whole = len(flat) // PATTERN * PATTERN
        flat[:whole].view(-1, PATTERN)[:] = pattern
        flat[whole:] = pattern[: len(flat) - whole]
    module.eval().requires_grad_(False)
    module.restore_tables()
    module.to(device)
