"""A picture request: one dataclass whose fields define the message, the command's flags and the HTTP fields.

Clients and the command line import this module, so it must not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.modes import DEFAULT_GUIDANCE, DEFAULT_LEVELS, DRAWING_MODES, MAX_PICTURES
from serving.v1 import router_pb2
from stages.errors import InputError, RequestError, quoted
from stages.limits import MAX_COUNT, MAX_SEED
from stages.settings import check, setting
from stages.wire.status import CALLS


@dataclass(frozen=True, kw_only=True)
class DrawingRequest:
    """The pictures to draw, and their settings. None leaves a setting to the router."""

    # Class names or numbers; "" for any class.
    classes: Sequence[str]
    pictures: int = setting(1, "pictures of each class", minimum=1, maximum=MAX_PICTURES, metavar="N")
    mode: str = setting("chain", ", ".join(DRAWING_MODES), metavar="M")
    # Each further picture has the next seed.
    seed: int = setting(0, "the same seed gives the same picture", minimum=0, maximum=MAX_SEED, metavar="S")
    levels: int | None = setting(
        None, f"steps from noise to picture ({DEFAULT_LEVELS})", minimum=1, maximum=MAX_COUNT, metavar="K"
    )
    solver: str | None = setting(None, "euler, 2m (2m)", rare=True)
    guidance: float | None = setting(None, f"pull towards the class; 1 = off ({DEFAULT_GUIDANCE:g})", metavar="G")
    codec: str | None = setting(None, "encoding on the wire: fp32, int8, int4 (int8; steps: fp32, int8)", rare=True)

    # Checks the message's bounds; the router knows the model and checks the rest.
    def __post_init__(self) -> None:
        try:
            check(self)
        except InputError as error:
            raise RequestError(str(error)) from None

    def message(self, previews: bool = False) -> router_pb2.DrawRequest:
        """The gRPC message. Raises InputError for a value that no message can carry."""
        for word in (self.mode, self.solver or "", self.codec or ""):
            if not word.isascii():
                raise RequestError(f"{quoted(word)} has characters that no mode, solver or codec has")
        try:
            return router_pb2.DrawRequest(**vars(self), previews=previews, protocol=CALLS)
        except (TypeError, ValueError) as error:
            raise RequestError(f"invalid request: {error}") from None


def drawing_message(
    classes: str | Sequence[str], settings: Mapping[str, Any], *, previews: bool
) -> router_pb2.DrawRequest:
    """Make the message for pictures of one class or several. Raises InputError."""
    names = (classes,) if isinstance(classes, str) else tuple(classes)
    return DrawingRequest(classes=names, **settings).message(previews)
