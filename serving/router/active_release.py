"""One release as the router serves it: the hosts' weights, its own model, and the modes over both."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.drawing.modes import DrawingMode, FirstHost, LocalDrawing, drawing_modes
from serving.modes.ar import ArMode
from serving.modes.auto import AutoMode, Guide
from serving.modes.base import Mode
from serving.modes.chunked import ChunkedMode, SweepMode
from serving.modes.drafters.local_model import LocalModel, read_local_model
from serving.modes.frontier import Frontier, LatencyModel, read_frontier
from serving.modes.local import LocalMode
from serving.modes.pretrained_tokenizer import read_tokenizers
from serving.modes.resample import ResampleMode
from serving.modes.speculative import SpeculativeMode
from serving.modes.tokenizer import NO_TOKENIZERS, Tokenizers
from serving.router.ring import RingView
from stages.checkpoint.bundle import FRONTIER_NAME, bundle_draws, find_bundle
from stages.errors import InputError
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterParts:
    """The router's own parts of a release."""

    # The drafter, and what mode `local` is.
    local: LocalModel | None
    guide: Guide
    # The bundle.
    directory: Path | None
    tokenizers: Tokenizers = NO_TOKENIZERS
    drawing: LocalDrawing | None = None
    first: FirstHost | None = None

    @classmethod
    def read(cls, directory: Path | None, frontier: Path | None = None) -> Self:
        """Blocks. Raises OnesweepError for a damaged model, or a frontier that the user named.

        :param frontier: what `auto` chooses from; None = the bundle's, if it has one: a bad one stops `auto` only.
        """
        if directory is not None and bundle_draws(directory):
            experts = find_bundle(directory).experts
            first = FirstHost(experts) if experts else None
            return cls(None, Guide(), directory, drawing=LocalDrawing(directory), first=first)
        local = read_local_model(directory) if directory else None
        digest = local.digest if local else ""
        tokenizers = read_tokenizers(directory) if directory else NO_TOKENIZERS
        guide, path = Guide(), directory / FRONTIER_NAME if directory else None
        if frontier is not None:
            guide = Guide(read_frontier(frontier), local_digest=digest)
        elif path is not None and path.exists():
            try:
                guide = Guide(read_frontier(path), local_digest=digest)
            except InputError as error:
                log.warning("%s", error)
                guide = Guide(problem=str(error))
        return cls(local, guide, directory, tokenizers)


@dataclass(eq=False)
class ActiveRelease:
    """The release that a request uses from its start to its end."""

    view: RingView
    modes: dict[str, Mode]
    drawing: dict[str, DrawingMode]
    conditions: LatencyModel
    directory: Path | None
    # Empty where the hosts brought the weights, until one of them says what it calls them.
    name: str
    # Under way.
    requests: int = 0

    @classmethod
    def over(cls, view: RingView, own: RouterParts, name: str = "") -> Self:
        conditions = LatencyModel(view.rtts_ms)
        drawing = drawing_modes(view, own.drawing, own.first)
        return cls(view, all_modes(view, own, conditions), drawing, conditions, own.directory, name)

    @property
    def release(self) -> str:
        return self.name or self.view.release

    @property
    def frontier(self) -> Frontier | None:
        """The options of `auto`; None while there are none for these weights."""
        auto = self.modes[AutoMode.name]
        return auto.guide.frontier if isinstance(auto, AutoMode) and not auto.problem else None

    @property
    def served_modes(self) -> list[str]:
        return [name for name, mode in self.modes.items() if not mode.problem]

    @property
    def drawing_modes(self) -> list[str]:
        return [name for name, mode in self.drawing.items() if mode.info is not None]

    @property
    def pictures(self) -> stage_pb2.PictureInfo | None:
        """The pictures that can be drawn; None where the weights write."""
        return next((mode.info for mode in self.drawing.values() if mode.info is not None), None)


def all_modes(ring: RingView, own: RouterParts, conditions: LatencyModel) -> dict[str, Mode]:
    """Every mode over a ring and the router's own models; `auto` chooses by its guide and `conditions`."""
    local, tokenizers = own.local, own.tokenizers
    fixed: list[Mode] = [
        SweepMode(ring, tokenizers),
        ChunkedMode(ring, tokenizers),
        ResampleMode(ring, local, tokenizers),
        ArMode(ring, tokenizers),
        SpeculativeMode(ring, local, tokenizers),
        LocalMode(local, tokenizers),
    ]
    modes = {mode.name: mode for mode in fixed}
    return modes | {AutoMode.name: AutoMode(ring, modes, own.guide, conditions)}
