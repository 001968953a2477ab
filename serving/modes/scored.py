"""What `resample` and `verified` have in common: a drafter at the router, and hosts that score what it wrote."""

from __future__ import annotations

from collections.abc import Mapping

from serving.local import LocalModel
from serving.modes.base import Generation, Mode
from serving.spellings import BYTES_NAME
from serving.view import RingView
from stages.admission import HIDDEN
from stages.refusal import failed_precondition, invalid
from stages.sessions import Kind

SCORERS: Mapping[str, Kind] = {"chain": "scorer", "ar": "ar"}
"""What can score given bytes, by the name that a request has for it: the model that hosts hold. The first that is
served is the default."""
FOLDERS = {"scorer": "scorer/", "ar": "ar/"}


class ScoredMode(Mode):
    """A mode whose text comes from the drafter, and whose quality from the scorer."""

    codecs = tuple(HIDDEN)

    def __init__(self, ring: RingView, local: LocalModel | None) -> None:
        self.ring, self.local = ring, local

    @property
    def problem(self) -> str:
        if not any(self.ring.model(kind) for kind in SCORERS.values()):
            return "the hosts have no scorer (neither scorer/ nor ar/ in their checkpoint)"
        if not self.served:
            return f"the hosts' models read tokens, and mode {self.name} has drafters that write bytes only"
        return "" if self.local else "the router has no drafter (start it with a bundle that has local/)"

    @property
    def served(self) -> list[str]:
        """Scorers of the hosts that read what the drafter writes, by the name that a request has for them."""
        models = {name: self.ring.model(kind) for name, kind in SCORERS.items()}
        return [name for name, model in models.items() if model and model.tokenizer == BYTES_NAME]

    @property
    def positions(self) -> int:
        models = [self.ring.model(SCORERS[name]) for name in self.served]
        return max((model.positions for model in models if model), default=0)

    def scorer(self, request: Generation) -> str:
        """The scorer that `request` asks for, or the default. Meaningful while there is no `problem`."""
        return request.scorer or self.served[0]

    def check(self, request: Generation) -> None:
        assert self.local is not None
        name = self.scorer(request)
        model = self.ring.model(SCORERS[name])
        if model is None or name not in self.served:
            raise failed_precondition(
                f"scorer {name!r} cannot be served: the hosts have no {FOLDERS[SCORERS[name]]} in their checkpoint; "
                f"choose from {', '.join(self.served)}"
            )
        need = len(request.prompt) + request.max_symbols + self.margin(request)
        for who, context in ((f"scorer {name!r}", model.positions), ("the drafter", self.local.positions)):
            if need > context:
                raise invalid(
                    f"prompt ({len(request.prompt)} bytes) and output ({request.max_symbols}) need a context of {need} "
                    f"bytes in mode {self.name}, {who} has {context}: shorten one of them"
                )

    def margin(self, request: Generation) -> int:
        """Positions that the mode needs beyond prompt and output."""
        return 0
