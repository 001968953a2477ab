"""From rounds to serving: writes the newest weights as a checkpoint for hosts, after the usual check."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from stages.checkpoint.checkpoint import save_part, save_parts
from stages.checkpoint.gate import Measures, probe_block, probe_stage
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from stages.model.architecture import VOCABULARY
from trainer.blocks.checkpoint_dir import add_metrics
from trainer.blocks.data import Corpus
from trainer.blocks.train import diagnose
from trainer.rounds.codecs import Tensors
from trainer.rounds.spec import RunSpec

MAX_NATS = math.log(VOCABULARY) + 1.0  # untrained weights have ln 256; far above that, a model is confidently wrong


class Publisher:
    """Writes the checkpoint in `out`, whose manifest dates from the run's start."""

    def __init__(self, spec: RunSpec, out: Path, corpus: Corpus) -> None:
        self.spec, self.out, self.corpus = spec, out, corpus
        # not the checkpoint's English probe: a model of another alphabet gives its letters no chance
        self._known = corpus.valid_batch(1, spec.config.architecture.context_length)
        # The version of each part in the checkpoint, if this process put it there.
        self.published: dict[str, int] = {}

    def publish(self, versions: Mapping[str, tuple[int, Tensors]], last: bool) -> None:
        """Put versions into the checkpoint; after the last round, also measure the whole model.

        Raises CheckpointError if the loss on validation text is too high for a model (the checkpoint stays as it was)
        or if it cannot be stored (every file is whole, and some may be new).
        """
        numbers = {part: number for part, (number, _) in versions.items()}
        weights = {part: tensors for part, (_, tensors) in versions.items()}
        chain = self.spec.config.rounds.model == "chain"
        if self.published != numbers:
            (self._publish_chain if chain else self._publish_pipeline)(weights)
            self.published = numbers
        if not last:
            return
        losses = self.spec.evaluate(weights, self.corpus)
        add_metrics(self.out, {"valid": losses, "rounds": numbers})
        if chain and "chain" not in read_manifest(self.out).metrics:
            diagnose(self.spec.config, self.corpus, self.out, read_manifest(self.out))
        elif not chain:
            nats = losses["next_byte"]
            add_metrics(self.out, {"ar": {"valid_next_byte_nats": nats, "valid_next_byte_bits": nats / math.log(2)}})

    def _publish_chain(self, weights: Mapping[str, Tensors]) -> None:
        manifest, blocks = self.spec.checkpoint, self.spec.chain(weights)
        assert manifest.partition is not None
        for part, block in zip(self.spec.parts, blocks, strict=True):
            _check(part, probe_block(block, manifest.partition, self._known))
        for block in blocks:
            save_part(self.out, block)

    def _publish_pipeline(self, weights: Mapping[str, Tensors]) -> None:
        model = self.spec.pipeline(weights)
        hidden: Tensor | None = None
        for stage in model.stages:
            measures, hidden = probe_stage(stage, self._known, hidden)
            if stage.is_last:
                _check("the pipeline", measures)
        save_parts(self.out, model.stages)


def _check(what: str, measures: Measures) -> None:
    for name, nats in measures.items():
        if not nats <= MAX_NATS:  # true for NaN too
            raise CheckpointError(
                f"{what} is not published: {name} on the validation text is {nats:.3f}, but untrained weights give "
                f"{math.log(VOCABULARY):.3f}; the checkpoint is unchanged"
            )
