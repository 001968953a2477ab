"""Scores of checkpoints on held-out text, in bits per byte."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from stages.checkpoint.checkpoint import load_ar, load_block
from stages.checkpoint.files import read_companion
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.errors import CheckpointError, InputError
from stages.progress import counted
from trainer.blocks.data import Corpus, TextTokenizer
from trainer.blocks.losses import ROWS, chain_diagnostics, next_byte_nats


@dataclass(frozen=True)
class TextScore:
    """One score and the number of bytes that it averages over."""

    name: str
    bits_per_byte: float
    bytes: int

    @classmethod
    def of(cls, name: str, nats: float, tokens: Tensor, corpus: Corpus) -> Self:
        """:param nats: the mean over these tokens."""
        return cls(name, corpus.bits(nats, tokens), corpus.bytes_in(tokens))


@dataclass(frozen=True)
class CheckpointScores:
    directory: str
    kind: str
    digest: str
    description: str
    trained_on_this_text: bool  # true if the training text next to this validation text is the one in the manifest
    scores: list[TextScore]


@dataclass(frozen=True)
class Scorer:
    """Scores `windows` evenly spaced windows of a model's context, without the first `min_context` bytes of each.

    The same text and settings always give the same numbers.
    """

    corpus: Corpus
    windows: int = 64
    min_context: int = 64
    steps: int = 4  # Euler steps in each block of a chain

    @torch.inference_mode()
    def score(self, directory: Path) -> CheckpointScores:
        """Score one checkpoint. Raises CheckpointError, DataError or InputError."""
        manifest = read_manifest(directory)
        context = manifest.own_architecture.context_length
        if self.min_context >= context:
            raise InputError(
                f"min_context {self.min_context} leaves nothing to score: {directory} reads {context} bytes at once; "
                "give a smaller --min-context"
            )
        corpus = spelled(self.corpus, directory, manifest)
        corpus.require(context + 1)
        # At most as many windows as fit without overlap, so that no token is scored twice.
        text = corpus.valid_batch(min(self.windows, len(corpus.valid) // (context + 1)), context + 1)
        if manifest.kind == "chain":
            scores = self._chain(directory, manifest, text, corpus)
        else:
            scored = text[:, self.min_context :]
            scores = [TextScore.of("next byte", self._nats(load_ar(directory), text), scored, corpus)]
        return CheckpointScores(
            directory=str(directory),
            kind=manifest.kind,
            digest=manifest.digest(),
            description=_describe(manifest),
            trained_on_this_text=manifest.data.get("train_sha256") == corpus.digest(),
            scores=scores,
        )

    def _nats(self, predict: Callable[[Tensor], Tensor], text: Tensor) -> float:
        """Mean nats per token, a few windows at a time; :param predict: gives the logits after known text."""
        rows = text.split(ROWS)
        return sum(next_byte_nats(predict(row[:, :-1]), row, self.min_context) * len(row) for row in rows) / len(text)

    def _chain(self, directory: Path, manifest: Manifest, text: Tensor, corpus: Corpus) -> list[TextScore]:
        blocks = [load_block(directory, i) for i, part in enumerate(manifest.parts) if part is not None]
        if not blocks:
            raise CheckpointError(f"no block of {directory} is trained yet")
        scored = text[:, self.min_context :]
        found = {f"next byte, block {block.index}": self._nats(block.predict, text) for block in blocks}
        scores = [TextScore.of(name, nats, scored, corpus) for name, nats in found.items()]
        if len(blocks) == manifest.architecture.parts:
            assert manifest.partition is not None
            losses = chain_diagnostics(blocks, manifest.partition, text, self.steps, self.min_context)
            slots = scored[:, :-1]  # a window's last token is a target of the heads but fills no slot
            scores += [TextScore.of(_DIAGNOSTICS[name], value, slots, corpus) for name, value in losses.items()]
        return scores


_DIAGNOSTICS = {"from_noise_nats": "from noise", "from_noise_sigma1_nats": "from noise, read at sigma 1"}


def spelled(corpus: Corpus, directory: Path, manifest: Manifest) -> Corpus:
    """Convert a text of bytes to the tokens of the checkpoint in `directory`, as `train text --tokenizer` does."""
    if manifest.tokenizer == "bytes":
        return corpus
    return corpus.in_tokens(TextTokenizer(read_companion(directory, manifest, TOKENIZER_NAME).decode()), cut=True)


def _describe(manifest: Manifest) -> str:
    a = manifest.own_architecture
    noun = "stage" if manifest.kind == "ar" else "block"
    return (
        f"{counted(a.parts, noun)} of {counted(a.layers, 'layer')}, width {a.width}, "
        f"context {a.positions} {manifest.tokenizer}"
    )
