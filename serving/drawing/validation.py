"""Checks of a request for pictures that need the model: modes, sizes and classes."""

from collections.abc import Mapping

from serving.drawing import DEFAULT_GUIDANCE, DEFAULT_LEVELS, DRAWING_MODES, MAX_PICTURES
from serving.drawing.modes import CheckedDrawing, DrawingMode
from serving.v1 import router_pb2
from stages.errors import close_to, one_of
from stages.pictures.trajectory import MAX_GUIDANCE, MAX_LEVELS, SOLVERS, DrawPlan
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, invalid

Modes = Mapping[str, DrawingMode]


def check_drawing_mode(name: str, modes: Modes) -> DrawingMode:
    """The mode of a request. Raises StatusError."""
    name = name or "chain"
    if name in DRAWING_MODES and name not in modes:
        raise failed_precondition(
            f"mode {name} cannot be served: the router has no local/ that draws; {_served(modes)}"
        )
    if name not in modes:
        raise invalid(f"unknown mode {name[:40]!r} of drawing{close_to(name, DRAWING_MODES)}; {_served(modes)}")
    return modes[name]


def check_drawing(request: router_pb2.DrawRequest, mode: DrawingMode, modes: Modes, due_at: float) -> CheckedDrawing:
    """A request that `mode` can serve. Meaningful once the hosts are ready. Raises StatusError.

    :param modes: all of them, to name those that are served. Nothing of the pictures' size is made before their number
        is checked.
    """
    if mode.info is None:
        raise failed_precondition(f"mode {mode.name} cannot be served: {mode.problem}; {_served(modes)}")
    # The product is checked before anything is made of it: ten bytes of a message can ask for a billion pictures.
    each = request.pictures or 1
    count = each * len(request.classes)
    if not 1 <= count <= MAX_PICTURES:
        raise invalid(f"{count} pictures; a request draws 1 to {MAX_PICTURES}")
    levels = request.levels if request.HasField("levels") else max(DEFAULT_LEVELS, mode.least_levels)
    if not mode.least_levels <= levels <= MAX_LEVELS:
        raise invalid(f"levels must be {mode.least_levels} to {MAX_LEVELS} in mode {mode.name}, not {levels}")
    guidance = request.guidance if request.HasField("guidance") else DEFAULT_GUIDANCE
    if not 0 <= guidance <= MAX_GUIDANCE:  # false for NaN, too
        raise invalid(f"guidance must be 0 to {MAX_GUIDANCE:g}, not {guidance}; 1 is none")
    named = request.solver if request.HasField("solver") else SOLVERS[-1]
    solver = next((solver for solver in SOLVERS if solver == named), None)
    if solver is None:
        raise invalid(f"unknown solver {named[:40]!r}{one_of(named, SOLVERS)}")
    codec = request.codec if request.HasField("codec") else mode.default_codec
    if codec not in mode.codecs:
        raise invalid(f"mode {mode.name} has no codec {codec[:40]!r}; choose from {', '.join(mode.codecs)}")
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
    raise invalid(f"unknown class {name[:40]!r}{one_of(name, list(info.classes))}")


def _served(modes: Modes) -> str:
    served = [name for name, mode in modes.items() if mode.info is not None]
    return f"served here: {', '.join(served)}" if served else "no weights here draw: serve a bundle of pictures"
