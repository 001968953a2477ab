"""Drawing modes: along a chain of hosts, step by step round a ring, and on the router's machine; and the checks of a
picture request that need the model."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time_ns

from serving.modes import DEFAULT_GUIDANCE, DEFAULT_LEVELS, DRAWING_MODES, MAX_PICTURES
from serving.router.accounting import Account
from serving.router.audit import MAX_TRIES, RETRY_PAUSE_S, AuditFailed
from serving.router.ring import RingView
from serving.router.session import Session
from serving.v1 import router_pb2
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.errors import close_to, one_of, quoted
from stages.host.plan import ModelKind
from stages.model.codec import CODECS, HIDDEN
from stages.pictures.trajectory import MAX_GUIDANCE, MAX_LEVELS, SOLVERS, DrawPlan, Trajectory, max_pictures
from stages.v1 import stage_pb2
from stages.wire.messages import PictureMessage
from stages.wire.status import failed_precondition, internal, invalid, unavailable

# Called with the estimate of the pictures after a block.
Preview = Callable[[stage_pb2.Pictures], object]


@dataclass(frozen=True)
class CheckedDrawing:
    """A picture request that one mode can serve."""

    mode: DrawingMode
    info: stage_pb2.PictureInfo
    plan: DrawPlan
    codec: str
    previews: bool
    due_at: float

    @property
    def drawing(self) -> stage_pb2.Drawing:
        p = self.plan
        return stage_pb2.Drawing(seed=p.seed, classes=p.classes, levels=p.levels, solver=p.solver, guidance=p.guidance)

    def pictures(self, pixels: bytes, block: int = 0, preview: bool = False) -> router_pb2.Pictures:
        """Wrap pixels for the answer."""
        info, count = self.info, self.plan.pictures
        shape = {"count": count, "channels": info.channels, "height": info.height, "width": info.width}
        return router_pb2.Pictures(pixels=pixels, block=block, preview=preview, **shape)

    def summary(self, account: Account) -> router_pb2.DrawSummary:
        p, names = self.plan, [*self.info.classes, ""]
        cost = account.summary(self.mode.name, p.seed)
        return router_pb2.DrawSummary(
            mode=self.mode.name,
            seed=p.seed,
            classes=[names[each] for each in p.classes],
            levels=p.levels,
            solver=p.solver,
            guidance=p.guidance,
            **{name: getattr(cost, name) for name in _COSTS},
        )

    @property
    def size(self) -> int:
        """Bytes of the pictures."""
        return self.plan.pictures * self.info.channels * self.info.height * self.info.width


_COSTS = ("sweeps", "hops", "wire_bytes", "wire_bytes_total", "latency_ms", "compute_ms", "hosts", "replays")


class DrawingMode(ABC):
    """One way of drawing."""

    name: str
    codecs: tuple[str, ...] = ("fp32",)
    default_codec = "fp32"
    uses_hosts = True

    @property
    @abstractmethod
    def info(self) -> stage_pb2.PictureInfo | None:
        """The pictures that it draws; None if it has no weights."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """The missing weights, if there is no `info`."""

    @property
    def min_levels(self) -> int:
        return 1

    @abstractmethod
    async def draw(self, order: CheckedDrawing, account: Account, preview: Preview) -> bytes:
        """Draw all pictures, add the cost to `account` and return the pixels. Raises StatusError."""


class _RingDrawing(DrawingMode):
    """Drawing on the hosts."""

    kind: ModelKind

    def __init__(self, ring: RingView) -> None:
        self.ring = ring

    @property
    def info(self) -> stage_pb2.PictureInfo | None:
        model = self.ring.model(self.kind)
        return model.pictures if model is not None and model.HasField("pictures") else None

    @property
    def problem(self) -> str:
        return f"the hosts have no {self.kind}/ that draws"

    # A drawing is one message and one result, however many steps the hosts do, and they cache nothing of it: a replay
    # is the same message on another path, and a second try alongside a slow first one costs only compute.
    async def draw(self, order: CheckedDrawing, account: Account, preview: Preview) -> bytes:
        # Blocks (each with at least one level) whose previews are due; the last block brings the pictures.
        blocks = {*range(self.min_levels - 1)}

        def preview_of(event: stage_pb2.Event) -> None:
            shown = event.pictures
            # A second try repeats previews. Any others are nonsense, and nothing depends on them.
            if len(shown.pixels) == order.size and shown.block in blocks:
                blocks.remove(shown.block)
                preview(shown)

        def check(event: stage_pb2.Event) -> None:
            if len(event.pictures.pixels) != order.size:
                raise internal(f"the pictures have {len(event.pictures.pixels)} bytes, not {order.size}")

        evaluations = order.plan.evaluations
        with Session(self.ring, self.kind, evaluations, order.due_at, account) as session:
            session.on_preview = preview_of
            await session.push(self._work(order))
            event = await session.event(check)
            await session.finish()
        account.add_sweep(event)
        return event.pictures.pixels

    @abstractmethod
    def _work(self, order: CheckedDrawing) -> PictureMessage: ...


class ChainDrawing(_RingDrawing):
    """One trip: each host takes the pictures through its range of noise."""

    name = kind = "chain"
    codecs = tuple(CODECS)
    default_codec = "int8"

    @property
    def min_levels(self) -> int:
        model = self.ring.model("chain")
        return model.parts if model else 1

    def _work(self, order: CheckedDrawing) -> stage_pb2.Draw:
        return stage_pb2.Draw(codec=order.codec, drawing=order.drawing, previews=order.previews)


class StepDrawing(_RingDrawing):
    """A trip for each step: the undivided net, cut by layers. The hosts start every further step themselves."""

    name = kind = "steps"
    codecs = tuple(HIDDEN)

    async def draw(self, order: CheckedDrawing, account: Account, preview: Preview) -> bytes:
        pixels = await super().draw(order, account, preview)
        # The result has the sums over all trips, so the account gets the mean of a hop's bytes.
        hosts, trips = len(account.wire_bytes) - 1, order.plan.levels + 1
        account.sweeps += trips - 1
        if hosts > 1:  # a single host sends itself nothing
            account.hops += (trips - 1) * hosts
            account.wire_bytes = [*(size // trips for size in account.wire_bytes[:-1]), account.wire_bytes[-1]]
        return pixels

    def _work(self, order: CheckedDrawing) -> stage_pb2.Denoise:
        return stage_pb2.Denoise(codec=order.codec, drawing=order.drawing)


class LocalDrawing(DrawingMode):
    """No trip: a net the size of one block on the router's machine."""

    name = "local"
    uses_hosts = False
    info: stage_pb2.PictureInfo | None = None
    problem = "the router has no local/ that draws"

    def __init__(self, directory: Path | None) -> None:
        """Blocks. Raises OnesweepError for a damaged net.

        :param directory: a bundle of pictures, with or without local/, if there is one.
        """
        if directory is None or (local := find_bundle(directory).local) is None:
            return
        from stages.backends import Backend
        from stages.checkpoint.checkpoint import load_picture_part

        manifest = read_manifest(local)
        a = self._architecture = manifest.picture_architecture
        assert manifest.partition is not None
        self._partition = manifest.partition
        self._runner = Backend().picture(load_picture_part(local, 0))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-drawing")
        self.info = stage_pb2.PictureInfo(
            height=a.height, width=a.width, channels=a.channels, patch=a.patch, classes=a.classes
        )

    async def draw(self, order: CheckedDrawing, account: Account, preview: Preview) -> bytes:
        if order.plan.pictures > (most := max_pictures(self._architecture, order.plan.guidance)):
            raise invalid(f"{order.plan.pictures} pictures; a request can draw at most {most}")
        # One thread: the router's event loop stays free for others, and two nets at once would be no quicker.
        loop = asyncio.get_running_loop()
        begin = partial(Trajectory.whole, self._architecture, order.plan, self._partition)
        trajectory = await loop.run_in_executor(self._thread, begin)
        while not trajectory.done:  # one level at a time: others draw in between, and a client that leaves ends it
            account.local_compute_ms += await loop.run_in_executor(self._thread, self._step, trajectory)
        return trajectory.pixels().numpy().tobytes()

    def _step(self, trajectory: Trajectory) -> float:
        import torch

        begin = process_time_ns()
        with torch.inference_mode():
            trajectory.supply(self._runner.evaluate([trajectory.piece()])[0])
        return (process_time_ns() - begin) / 1e6


def drawing_modes(ring: RingView, local: LocalDrawing) -> dict[str, DrawingMode]:
    """Every drawing mode over a ring and the router's own nets."""
    return {mode.name: mode for mode in (ChainDrawing(ring), StepDrawing(ring), local)}


async def retry_drawing(order: CheckedDrawing, account: Account, preview: Preview) -> bytes:
    """Draw pixels, none of them from hosts found faulty meanwhile. Raises StatusError."""
    for _ in range(MAX_TRIES):
        try:
            return await order.mode.draw(order, account, preview)
        except AuditFailed:
            account.begin_again()
            await asyncio.sleep(RETRY_PAUSE_S)
    raise unavailable(f"a host of this request was faulty {MAX_TRIES} times: check the hosts")


Modes = Mapping[str, DrawingMode]


def check_drawing_mode(name: str, modes: Modes) -> DrawingMode:
    """The mode of a request. Raises StatusError."""
    name = name or "chain"
    if name not in modes:
        raise invalid(f"unknown drawing mode {quoted(name)}{close_to(name, DRAWING_MODES)}; {_served(modes)}")
    return modes[name]


def check_drawing(request: router_pb2.DrawRequest, mode: DrawingMode, modes: Modes, due_at: float) -> CheckedDrawing:
    """Check that `mode` can serve a request. Meaningful once the hosts are ready. Raises StatusError.

    :param modes: all modes, to name the served ones. Nothing of the pictures' size is allocated before their number
        is checked.
    """
    if mode.info is None:
        raise failed_precondition(f"mode {mode.name} cannot be served: {mode.problem}; {_served(modes)}")
    # Check the product before allocating anything: ten bytes of a message can request a billion pictures.
    each = request.pictures or 1
    count = each * len(request.classes)
    if not 1 <= count <= MAX_PICTURES:
        raise invalid(f"{count} pictures; a request can draw 1 to {MAX_PICTURES}")
    levels = request.levels if request.HasField("levels") else max(DEFAULT_LEVELS, mode.min_levels)
    if not mode.min_levels <= levels <= MAX_LEVELS:
        raise invalid(f"levels must be {mode.min_levels} to {MAX_LEVELS} in mode {mode.name}, not {levels}")
    guidance = request.guidance if request.HasField("guidance") else DEFAULT_GUIDANCE
    if not 0 <= guidance <= MAX_GUIDANCE:  # false for NaN, too
        raise invalid(f"guidance must be 0 to {MAX_GUIDANCE:g}, not {guidance}; 1 turns it off")
    named = request.solver if request.HasField("solver") else SOLVERS[-1]
    solver = next((solver for solver in SOLVERS if solver == named), None)
    if solver is None:
        raise invalid(f"unknown solver {quoted(named)}{one_of(named, SOLVERS)}")
    codec = request.codec if request.HasField("codec") else mode.default_codec
    if codec not in mode.codecs:
        raise invalid(f"mode {mode.name} has no codec {quoted(codec)}; choose from {', '.join(mode.codecs)}")
    if request.previews and mode.name != "chain":
        raise invalid(f"mode {mode.name} has no previews: leave them out, or use mode chain")
    classes = [_class_index(name, mode.info) for name in request.classes for _ in range(each)]
    plan = DrawPlan(request.seed, tuple(classes), levels, solver, guidance)
    return CheckedDrawing(mode, mode.info, plan, codec, request.previews, due_at)


def _class_index(name: str, info: stage_pb2.PictureInfo) -> int:
    if not name:
        return len(info.classes)
    if name in info.classes:
        return list(info.classes).index(name)
    if name.isascii() and name.isdigit() and len(name) <= 6 and int(name) < len(info.classes):
        return int(name)
    raise invalid(f"unknown class {quoted(name)}{one_of(name, list(info.classes))}")


def _served(modes: Modes) -> str:
    served = [name for name, mode in modes.items() if mode.info is not None]
    return f"served here: {', '.join(served)}" if served else "no weights here draw: serve a picture bundle"
