"""The models on the router's own machine, by the name that a request has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.local import LocalModel
from serving.neural import NeuralModel
from serving.ngram.drafter import NgramDrafter
from serving.spelling import IN_BYTES, Spelling
from serving.spellings import tokenizer_of
from stages.bundle import NGRAM_NAME, find_bundle
from stages.manifest import read_manifest

MODEL, NGRAM = "model", "ngram"


@dataclass(frozen=True)
class Drafters:
    """What drafts beside the hosts."""

    models: Mapping[str, LocalModel] = field(default_factory=dict)

    @property
    def local(self) -> LocalModel | None:
        """The one that mode `local` is."""
        return self.models.get(MODEL)

    def fitting(self, spelling: Spelling) -> dict[str, LocalModel]:
        """Those that write in a spelling, the default first."""
        return {name: model for name, model in self.models.items() if not misfit(model, spelling)}

    def problem(self, spelling: Spelling) -> str:
        """Why none writes in the spelling of the hosts' model; empty where one does."""
        if self.fitting(spelling):
            return ""
        others = [f"its {name} {misfit(model, spelling)}" for name, model in self.models.items()]
        why = f" ({', '.join(others)})" if others else ""
        if spelling is IN_BYTES:
            return f"the router has no drafter that writes bytes{why}: start it with a bundle that has local/"
        return (
            f"the router has no drafter that writes the hosts' tokens{why}: make one with `onesweep distill` or "
            "`onesweep ngram`, and start the router with that checkpoint"
        )


NO_DRAFTERS = Drafters()


def misfit(model: LocalModel, spelling: Spelling) -> str:
    """Why what `model` writes is not in `spelling`; empty where it is."""
    if model.alphabet != spelling.alphabet:
        return f"has {model.alphabet.size} symbols and the hosts' model {spelling.alphabet.size}"
    return "" if model.tokenizer == spelling.tokenizer else "has another tokenizer than the hosts' model"


def read_drafters(directory: Path) -> Drafters:
    """Those of a bundle, or of a single checkpoint. Blocks. Raises OnesweepError for one that is damaged."""
    bundle, ngrams = find_bundle(directory), directory / NGRAM_NAME
    models = dict[str, LocalModel]()
    if bundle.local:
        models[MODEL] = NeuralModel(bundle.local)
    pipeline = bundle.ar or bundle.scorer
    if pipeline and ngrams.exists():
        manifest = read_manifest(pipeline)
        models[NGRAM] = NgramDrafter(ngrams, manifest.architecture.vocabulary, tokenizer_of(manifest))
    return Drafters(models)
