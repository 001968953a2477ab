"""The models on the router's own machine, by the name that a request has for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onesweep.serving.modes.drafters.base import LocalModel
from onesweep.serving.modes.drafters.neural import NeuralModel
from onesweep.serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer
from onesweep.stages.checkpoint.bundle import find_bundle

MODEL = "model"


@dataclass(frozen=True)
class Drafters:
    """The drafters on the router's own machine."""

    models: Mapping[str, LocalModel] = field(default_factory=dict)

    @property
    def local(self) -> LocalModel | None:
        """The one that mode `local` is."""
        return self.models.get(MODEL)

    def fitting(self, tokenizer: Tokenizer) -> dict[str, LocalModel]:
        """Drafters that write a tokenizer's symbols, the default first."""
        return {name: model for name, model in self.models.items() if not misfit(model, tokenizer)}

    def problem(self, tokenizer: Tokenizer) -> str:
        """Why none writes in the tokenizer of the hosts' model; empty where one does."""
        if self.fitting(tokenizer):
            return ""
        others = [f"its {name} {misfit(model, tokenizer)}" for name, model in self.models.items()]
        why = f" ({', '.join(others)})" if others else ""
        if tokenizer is BYTE_TOKENIZER:
            return f"the router has no drafter that writes bytes{why}: start it with a bundle that has local/"
        return (
            f"the router has no drafter that writes the hosts' tokens{why}: make one with "
            "`onesweep distill`, and start the router with that checkpoint"
        )


NO_DRAFTERS = Drafters()


def misfit(model: LocalModel, tokenizer: Tokenizer) -> str:
    """Why what `model` writes is not in `tokenizer`; empty where it is."""
    if model.alphabet != tokenizer.alphabet:
        return f"has {model.alphabet.size} symbols and the hosts' model {tokenizer.alphabet.size}"
    return "" if model.tokenizer_id == tokenizer.id else "has another tokenizer than the hosts' model"


def read_drafters(directory: Path) -> Drafters:
    """Read a bundle's or a checkpoint's drafters. Blocks. Raises OnesweepError for one that is damaged."""
    local = find_bundle(directory).local
    return Drafters({MODEL: NeuralModel(local)} if local else {})
