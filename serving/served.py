"""One release as the router serves it: the hosts' weights, its own model, and the modes over both."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.conditions import Conditions
from serving.drafters import NO_DRAFTERS, Drafters, read_drafters
from serving.frontier import read_frontier
from serving.modes import Mode, all_modes
from serving.modes.auto import Guide
from serving.spellings import NO_TOKENS, Spellings, read_spellings
from serving.view import RingView
from stages.bundle import FRONTIER_NAME
from stages.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnParts:
    """What the router itself has of a release."""

    drafters: Drafters
    guide: Guide
    directory: Path | None
    """The bundle."""
    spellings: Spellings = NO_TOKENS

    @classmethod
    def read(cls, directory: Path | None, frontier: Path | None = None) -> Self:
        """Blocks. Raises OnesweepError for a damaged model, or a frontier that the user named.

        :param frontier: what `auto` chooses from; None = the bundle's, if it has one: a bad one stops `auto` only.
        """
        drafters = read_drafters(directory) if directory else NO_DRAFTERS
        digest = drafters.local.digest if drafters.local else ""
        spellings = read_spellings(directory) if directory else NO_TOKENS
        if frontier is not None:
            return cls(drafters, Guide(read_frontier(frontier), local_digest=digest), directory, spellings)
        path = directory / FRONTIER_NAME if directory else None
        if path is None or not path.exists():
            return cls(drafters, Guide(), directory, spellings)
        try:
            return cls(drafters, Guide(read_frontier(path), local_digest=digest), directory, spellings)
        except InputError as error:
            log.warning("%s", error)
            return cls(drafters, Guide(problem=str(error)), directory, spellings)


@dataclass(eq=False)
class Served:
    """What requests use that begin while it is the current one, to their end."""

    view: RingView
    modes: dict[str, Mode]
    conditions: Conditions
    directory: Path | None
    name: str
    """Empty where the hosts brought the weights, until one of them says what it calls them."""
    requests: int = 0
    """Under way."""

    @classmethod
    def over(cls, view: RingView, own: OwnParts, name: str = "") -> Self:
        conditions = Conditions(view.rtts_ms)
        modes = all_modes(view, own.drafters, own.guide, conditions, own.spellings)
        return cls(view, modes, conditions, own.directory, name)

    @property
    def release(self) -> str:
        return self.name or self.view.release

    @property
    def served_modes(self) -> list[str]:
        return [name for name, mode in self.modes.items() if not mode.problem]
