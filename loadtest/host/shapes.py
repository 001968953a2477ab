"""The benchmark `shapes`: the time that one host of a large model takes, with the floor of a WAN added.

Weights are random and one block is held at a time: time depends on shapes only. The rows of BlockTrain's serving table
(arXiv 2606.24722) are theirs, on other hardware and other links: never the same test.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch

from onesweep.loadtest.host.benchmark import Benchmark
from onesweep.loadtest.host.settings import ShapesSettings
from onesweep.loadtest.host.stage import times_of
from onesweep.loadtest.lab.profile import Profile, node_names, profile_named
from onesweep.loadtest.report.table import aligned
from onesweep.stages.device import check_device, device_kind
from onesweep.stages.errors import InputError
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.block import Block, Codes
from onesweep.stages.model.families import without_memory
from onesweep.stages.model.pipeline import ArStage, new_caches

HEAD_DIM = 64
LAYERS = 4
PROMPT_BYTES = 64
BLOCKS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED_BYTES = 1 << 28  # by which a device's memory is measured: beyond any cache
MEMORY_SHARE = 0.8  # of the available memory, for one block: the rest is for activations and caches
PATTERN = 1 << 16

# BlockTrain's B=3, L=4 rows by width: parameters, output tokens, seconds, tokens a second. Theirs.
THEIRS = {
    512: ("0.040B", 64, 0.245, 261.0),
    2048: ("0.632B", 128, 0.340, 377.0),
    8192: ("10.08B", 128, 0.382, 335.0),
    18432: ("50.98B", 32, 1.314, 24.0),
}


@dataclass(frozen=True)
class ShapeFigures:
    """One width. Seconds of one host; `sweep_s` and `ar_token_s` are of three, with the links' floor."""

    width: int
    parameters: int  # of three blocks
    dtype: str
    block_gb: float
    evaluation_s: float  # one evaluation of one block over all slots
    stage_s: float  # a stage's part of a sweep
    token_s: float  # a stage's part of one AR step
    token_floor_s: float  # the time to read the stage's weights once
    sweep_s: float
    ar_token_s: float
    slots: int
    refused: str = ""  # reason why this width was not measured

    @property
    def tokens_per_s(self) -> float:
        return self.slots / self.sweep_s if self.sweep_s else 0.0

    @property
    def floors(self) -> float:
        """A stage's AR step as a multiple of its floor."""
        return self.token_s / self.token_floor_s if self.token_floor_s else 0.0


class ShapesBench(Benchmark[ShapesSettings, list[ShapeFigures]]):
    """`onesweep bench shapes`: a row for each width."""

    @property
    def announcement(self) -> str:
        return f"one block after the other, {self.settings.slots} slots ..."

    def check(self) -> None:
        s = self.settings
        profile_named(s.profile)
        if not s.widths:
            raise InputError("--widths is empty: name one or more, such as 512,2048")
        for width in s.widths:
            if width < HEAD_DIM or width % HEAD_DIM:
                raise InputError(f"--widths must be multiples of {HEAD_DIM}, not {width}")
        if s.dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, not {s.dtype!r}")
        if not 1 <= s.slots <= 4096 or not 1 <= s.steps <= 64:
            raise InputError("--slots must be 1 to 4096 and --steps 1 to 64")
        check_device(s.device)

    def measure(self) -> list[ShapeFigures]:
        """Figures of each width; one that does not fit the memory has a reason instead."""
        s, figures, device = self.settings, [], torch.device(self.settings.device)
        for width in s.widths:
            a = Architecture(
                parts=BLOCKS, layers=LAYERS, width=width, heads=width // HEAD_DIM, context_length=PROMPT_BYTES + s.slots
            )
            with without_memory():
                parameters = sum(p.numel() for p in Block(a, 0, Codes(0, a.code_dim)).parameters())
            size, free = parameters * DTYPES[s.dtype].itemsize, psutil.virtual_memory().available
            if device.type == "cuda":
                free = min(free, torch.cuda.mem_get_info(device)[0])
            if size > MEMORY_SHARE * free:
                refused = f"a block takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"
                nothing = (0.0,) * 6
                figures.append(
                    ShapeFigures(width, BLOCKS * parameters, s.dtype, size / 1e9, *nothing, s.slots, refused)
                )
            else:
                figures.append(_measure(s, a, parameters, size))
        return figures

    def table(self, result: list[ShapeFigures]) -> str:
        s = self.settings
        header = (
            *("width", "parameters", "block GB", "s/evaluation", "stage s", "sweep s", "tokens/s"),
            *("AR s/token", "AR stage ms", "x floor"),
        )
        theirs = [
            (str(width), parameters, "", "", "", f"{seconds:.3f}", f"{rate:.0f}", "0.35", "", "")
            for width, (parameters, _, seconds, rate) in THEIRS.items()
        ]
        return "\n".join(
            [
                f"{BLOCKS} blocks of {LAYERS} layers, {s.slots} slots, {s.steps} step(s) a block, {s.dtype}, "
                f"{torch.get_num_threads()} thread(s) of {device_kind(torch.device(s.device))}; links: {s.profile}",
                aligned(header, [_row(f) for f in result]),
                *(f"width {f.width}: not measured, {f.refused}" for f in result if f.refused),
                "",
                "BlockTrain's table (theirs: other hardware, other links, 32 to 128 tokens; not the same test):",
                aligned(header, theirs),
            ]
        )

    def record(self, result: list[ShapeFigures]) -> dict[str, Any]:
        s = self.settings
        return {
            "bench": "shapes",
            "profile": s.profile,
            "slots": s.slots,
            "steps": s.steps,
            "seed": s.seed,
            "threads": torch.get_num_threads(),
            "device": device_kind(torch.device(s.device)),
            "figures": [{**asdict(f), "tokens_per_s": f.tokens_per_s} for f in result],
            "theirs": {str(width): row for width, row in THEIRS.items()},
        }


def _measure(settings: ShapesSettings, a: Architecture, parameters: int, size: int) -> ShapeFigures:
    dtype, profile = DTYPES[settings.dtype], profile_named(settings.profile)
    kind = torch.device(settings.device).type
    with torch.no_grad(), torch.autocast(kind, dtype, enabled=dtype is not torch.float32):
        evaluation_s = _evaluation_s(a, settings)
        token_s, floor_s = _token_s(a, settings)
    stage_s = settings.steps * evaluation_s
    payload_bits = 8 * settings.slots * (a.code_dim + 4)  # int8 with a float32 scale for each slot
    return ShapeFigures(
        a.width,
        BLOCKS * parameters,
        settings.dtype,
        size / 1e9,
        evaluation_s,
        stage_s,
        token_s,
        floor_s,
        BLOCKS * stage_s + _links_s(profile, payload_bits, home=True),
        # a byte of AR goes from the last host to the first: the router only hears of it
        BLOCKS * token_s + _links_s(profile, 8 * 4 * a.width, home=False),
        settings.slots,
    )


def _evaluation_s(a: Architecture, settings: ShapesSettings) -> float:
    """Seconds of one evaluation of one block."""
    codes, generator = Codes(0, a.code_dim), torch.Generator().manual_seed(settings.seed)
    device = torch.device(settings.device)
    with without_memory():  # torch's own initialisation of a large block takes longer than the measurement
        block = Block(a, 0, codes)
    _fill(block, DTYPES[settings.dtype], generator, device)
    _, memory = block.read(torch.randint(0, 256, (1, PROMPT_BYTES), generator=generator).to(device))
    z = torch.randn(1, settings.slots, a.code_dim, generator=generator).to(device)
    sigma = torch.ones(1, 1, device=device)
    evaluate = torch.inference_mode()(lambda: block.denoise(z, 0.1 * z, sigma, memory, PROMPT_BYTES))
    return min(times_of(evaluate, device))


def _token_s(a: Architecture, settings: ShapesSettings) -> tuple[float, float]:
    """Seconds of one AR step of one stage, and those that its weights take at the rate of a copy of memory."""
    generator, device = torch.Generator().manual_seed(settings.seed), torch.device(settings.device)
    with without_memory():
        stage = ArStage(a, 1)  # a middle one: layers only
    _fill(stage, DTYPES[settings.dtype], generator, device)
    hidden = torch.randn(1, PROMPT_BYTES, a.width, generator=generator).to(device, DTYPES[settings.dtype])
    caches = new_caches(a.layers, a, a.context_length, device=device)
    stage.read(hidden, caches)

    @torch.inference_mode()
    def step() -> None:
        for cache in caches:
            cache.length = PROMPT_BYTES
        stage.read(hidden[:, :1], caches)

    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    rate = 2 * COPIED_BYTES / min(times_of(lambda: target.copy_(source), device))
    weights = sum(p.numel() * p.element_size() for p in stage.parameters())
    return min(times_of(step, device)), weights / rate


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


def _links_s(profile: Profile, payload_bits: int, home: bool) -> float:
    """Delays and serialisation of a ring of three: from the router and back to it, or once from host to host."""
    router, *hosts = node_names(BLOCKS)
    stops = [router, *hosts, router] if home else [*hosts, hosts[0]]
    links = [profile.link(source, target) for source, target in pairwise(stops)]
    return sum(link.delay_ms / 1000 + payload_bits / ((link.rate_mbps or 1e9) * 1e6) for link in links)


def _row(f: ShapeFigures) -> tuple[str, ...]:
    shape = (str(f.width), f"{f.parameters / 1e9:.3f}B", f"{f.block_gb:.2f}")
    if f.refused:
        return (*shape, "-", "-", "-", "-", "-", "-", "-")
    seconds = (f"{value:.4f}" for value in (f.evaluation_s, f.stage_s, f.sweep_s))
    step = (f"{f.ar_token_s:.3f}", f"{1000 * f.token_s:.3f}", f"{f.floors:.2f}")
    return (*shape, *seconds, f"{f.tokens_per_s:.0f}", *step)
