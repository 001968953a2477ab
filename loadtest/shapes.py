"""Large shapes, stage by stage: how long one host of a large model takes, and what a WAN's floor adds.

Weights are random and one block is held at a time: time depends on shapes only. The rows of BlockTrain's serving table
(arXiv 2606.24722) are theirs, on other hardware and other links: never the same test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch

from loadtest.table import aligned
from loadtest.wan.profile import Profile, node_names
from stages.ar import ArStage, new_caches
from stages.architecture import Architecture
from stages.block import Block
from stages.codes import Codes
from stages.errors import InputError
from stages.unfilled import without_memory

HEAD_DIM = 64
LAYERS = 4
PROMPT_BYTES = 64
BLOCKS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEMORY_SHARE = 0.8
"""Of what is available, for one block."""
EVALUATIONS = 5
PATTERN = 1 << 16

THEIRS = {
    512: ("0.040B", 64, 0.245, 261.0),
    2048: ("0.632B", 128, 0.340, 377.0),
    8192: ("10.08B", 128, 0.382, 335.0),
    18432: ("50.98B", 32, 1.314, 24.0),
}
"""BlockTrain's B=3, L=4 rows by width: parameters, output tokens, seconds, tokens a second. Theirs."""


@dataclass(frozen=True)
class ShapesSettings:
    """What `onesweep bench shapes` is told."""

    widths: tuple[int, ...]
    profile: Profile
    slots: int = 128
    steps: int = 1
    """Euler steps in each block."""
    dtype: str = "fp32"
    seed: int = 0


@dataclass(frozen=True)
class ShapeFigures:
    """One width. Seconds of one host; `sweep_s` and `ar_token_s` are of three, with the links' floor."""

    width: int
    parameters: int
    """Of three blocks."""
    dtype: str
    block_gb: float
    evaluation_s: float
    """One evaluation of one block over all slots."""
    stage_s: float
    """A stage's part of a sweep."""
    token_s: float
    """A stage's part of one AR step."""
    sweep_s: float
    ar_token_s: float
    slots: int
    refused: str = ""
    """Why this width was not measured."""

    @property
    def tokens_per_s(self) -> float:
        return self.slots / self.sweep_s if self.sweep_s else 0.0


def check_shapes(settings: ShapesSettings) -> None:
    """Raises InputError for what cannot be measured."""
    if not settings.widths:
        raise InputError("--widths is empty: name one or more, such as 512,2048")
    for width in settings.widths:
        if width < HEAD_DIM or width % HEAD_DIM:
            raise InputError(f"--widths must be multiples of {HEAD_DIM}, not {width}")
    if settings.dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    if not 1 <= settings.slots <= 4096 or not 1 <= settings.steps <= 64:
        raise InputError("--slots must be 1 to 4096 and --steps 1 to 64")


def measure_shapes(settings: ShapesSettings) -> Iterator[ShapeFigures]:
    """Figures of each width; one that does not fit the memory says so."""
    check_shapes(settings)
    for width in settings.widths:
        architecture = Architecture(
            parts=BLOCKS,
            layers=LAYERS,
            width=width,
            heads=width // HEAD_DIM,
            context_bytes=PROMPT_BYTES + settings.slots,
        )
        with without_memory():
            parameters = sum(p.numel() for p in Block(architecture, 0, Codes(0, architecture.code_dim)).parameters())
        size = parameters * DTYPES[settings.dtype].itemsize
        free = psutil.virtual_memory().available
        if size > MEMORY_SHARE * free:
            refused = f"a block takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"
            yield ShapeFigures(
                width, BLOCKS * parameters, settings.dtype, size / 1e9, 0, 0, 0, 0, 0, settings.slots, refused
            )
        else:
            yield _measure(settings, architecture, parameters, size)


def shapes_table(settings: ShapesSettings, figures: list[ShapeFigures]) -> str:
    header = ("width", "parameters", "block GB", "s/evaluation", "stage s", "sweep s", "tokens/s", "AR s/token")
    rows = [_row(f) for f in figures]
    theirs = [
        (str(width), parameters, "", "", "", f"{seconds:.3f}", f"{rate:.0f}", "0.35")
        for width, (parameters, _, seconds, rate) in THEIRS.items()
    ]
    return "\n".join(
        [
            f"{BLOCKS} blocks of {LAYERS} layers, {settings.slots} slots, {settings.steps} step(s) a block, "
            f"{settings.dtype}, {torch.get_num_threads()} thread(s); links: {settings.profile.name}",
            aligned(header, rows),
            *(f"width {f.width}: not measured, {f.refused}" for f in figures if f.refused),
            "",
            "BlockTrain's table (theirs: other hardware, other links, 32 to 128 tokens; not the same test):",
            aligned(header, theirs),
        ]
    )


def shapes_record(settings: ShapesSettings, figures: list[ShapeFigures]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    return {
        "bench": "shapes",
        "profile": settings.profile.name,
        "slots": settings.slots,
        "steps": settings.steps,
        "seed": settings.seed,
        "threads": torch.get_num_threads(),
        "figures": [{**asdict(f), "tokens_per_s": f.tokens_per_s} for f in figures],
        "theirs": {str(width): row for width, row in THEIRS.items()},
    }


def _measure(settings: ShapesSettings, a: Architecture, parameters: int, size: int) -> ShapeFigures:
    dtype = DTYPES[settings.dtype]
    with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        evaluation_s = _evaluation_s(a, settings)
        token_s = _token_s(a, settings)
    stage_s = settings.steps * evaluation_s
    payload_bits = 8 * settings.slots * (a.code_dim + 4)
    return ShapeFigures(
        a.width,
        BLOCKS * parameters,
        settings.dtype,
        size / 1e9,
        evaluation_s,
        stage_s,
        token_s,
        BLOCKS * stage_s + _links_s(settings.profile, payload_bits, home=True),
        BLOCKS * token_s + _links_s(settings.profile, 8 * 4 * a.width, home=False),
        settings.slots,
    )


def _evaluation_s(a: Architecture, settings: ShapesSettings) -> float:
    """Seconds of one evaluation of one block."""
    codes, generator = Codes(0, a.code_dim), torch.Generator().manual_seed(settings.seed)
    with without_memory():
        block = Block(a, 0, codes)
    _fill(block, DTYPES[settings.dtype], generator)
    block.restore_tables(codes)
    _, memory = block.read(torch.randint(0, 256, (1, PROMPT_BYTES), generator=generator))
    z = torch.randn(1, settings.slots, a.code_dim, generator=generator)
    return _timed(lambda: block.denoise(z, 0.1 * z, torch.ones(1, 1), memory, PROMPT_BYTES))


def _token_s(a: Architecture, settings: ShapesSettings) -> float:
    """Seconds of one AR step of one stage."""
    generator = torch.Generator().manual_seed(settings.seed)
    with without_memory():
        stage = ArStage(a, 1)  # a middle one: layers only
    _fill(stage, DTYPES[settings.dtype], generator)
    stage.restore_tables()
    hidden = torch.randn(1, PROMPT_BYTES, a.width, generator=generator).to(DTYPES[settings.dtype])
    caches = new_caches(a.layers, a, a.context_bytes)
    stage.read(hidden, caches)

    def step() -> None:
        for cache in caches:
            cache.length = PROMPT_BYTES
        stage.read(hidden[:, :1], caches)

    return _timed(step)


def _fill(module: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Give a module on the meta device numbers, cheaply: a repeated pattern multiplies no faster than others."""
    module.to(dtype).to_empty(device="cpu")
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        pattern = (scale * torch.randn(PATTERN, generator=generator)).to(dtype)
        flat = parameter.data.view(-1)
        whole = len(flat) // PATTERN * PATTERN
        flat[:whole].view(-1, PATTERN)[:] = pattern
        flat[whole:] = pattern[: len(flat) - whole]
    module.eval().requires_grad_(False)


def _timed(call: Callable[[], object]) -> float:
    """The best of some, after one to warm up: other programs can only make it longer."""
    call()
    seconds = []
    for _ in range(EVALUATIONS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _links_s(profile: Profile, payload_bits: int, home: bool) -> float:
    """Delays and serialisation of a ring of three: from the router and back to it, or once from host to host."""
    router, *hosts = node_names(BLOCKS)
    stops = [router, *hosts, router] if home else [*hosts, hosts[0]]
    links = [profile.link(source, target) for source, target in pairwise(stops)]
    return sum(link.delay_ms / 1000 + payload_bits / ((link.rate_mbps or 1e9) * 1e6) for link in links)


def _row(f: ShapeFigures) -> tuple[str, ...]:
    if f.refused:
        return (str(f.width), f"{f.parameters / 1e9:.3f}B", f"{f.block_gb:.2f}", "-", "-", "-", "-", "-")
    return (
        str(f.width),
        f"{f.parameters / 1e9:.3f}B",
        f"{f.block_gb:.2f}",
        *(f"{value:.4f}" for value in (f.evaluation_s, f.stage_s, f.sweep_s)),
        f"{f.tokens_per_s:.0f}",
        f"{f.ar_token_s:.3f}",
    )
