"""Compares an imported model with its source in `transformers`: the next token of the same text."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from stages.backends.whole_model import WholeModel
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.manifest import TOKENIZER_NAME, read_manifest
from stages.errors import InputError, OnesweepError
from stages.importing.speech import open_tokenizer
from stages.model.architecture import LlamaArchitecture

MAX_NATS = 0.01  # largest loss per token that the hosts' form of the weights may add
TOLERANCE = 1e-3  # of a logit, for float32 weights: float32 errs by some 1e-6 of the largest, and layers add up
# The text is Python's own help, in pieces of this many tokens. Both losses cover the same tokens, so few suffice.
PIECE, PIECES = 512, 4


@dataclass(frozen=True)
class SourceComparison:
    """The next token at every position of a text, from the stages as hosts compute them and from `transformers`."""

    places: int
    same: int  # positions at which both find the same token likeliest
    largest_difference: float  # of a logit, over all positions
    lost_nats: float  # per token: the stages' loss minus the source's
    kl_nats: float  # per token: KL(source || stages)
    is_exact: bool  # the weights are the source's own, so the logits should be too

    @property
    def holds(self) -> bool:
        return self.lost_nats <= MAX_NATS and not (self.is_exact and self.largest_difference > TOLERANCE)

    def __str__(self) -> str:
        most = f" (at most {TOLERANCE:.0e})" if self.is_exact else ""
        return (
            f"same next token as transformers: {self.same} of {self.places}; largest logit difference "
            f"{self.largest_difference:.1e}{most}; {self.lost_nats:+.4f} nats a token (at most {MAX_NATS:+g}), "
            f"KL {self.kl_nats:.4f}"
        )


def require_source(checkpoint: Path, source: Path) -> tuple[Path, LlamaArchitecture]:
    """The imported model to compare with `source`, checked before anything takes time. Raises InputError."""
    directory = find_bundle(checkpoint).ar
    if directory is None or not isinstance(architecture := read_manifest(directory).architecture, LlamaArchitecture):
        raise InputError(f"{checkpoint} has no imported model: --source is for checkpoints of `onesweep import`")
    if not source.exists():
        raise InputError(f"no model at {source}: give --source the imported folder or .gguf file")
    if find_spec("transformers") is None:
        raise InputError("--source needs the package transformers: pip install 'onesweep[quality]'")
    return directory, architecture


@torch.inference_mode()
def compare_with_source(directory: Path, architecture: LlamaArchitecture, source: Path) -> SourceComparison:
    """Read a text with an imported model, from `require_source`, and with its source.

    :param source: the Hugging Face folder or .gguf file that it was imported from. Raises OnesweepError.
    """
    theirs, model = _transformers(source), WholeModel(directory)
    places, same, largest, lost, kl = 0, 0, 0.0, 0.0, 0.0
    for tokens in _pieces(directory, architecture.positions):
        expected = theirs(tokens).double()
        if expected.shape[-1] != architecture.vocabulary:
            raise InputError(
                f"{source} has {expected.shape[-1]} tokens, {directory} {architecture.vocabulary}: the checkpoint was "
                "not imported from it"
            )
        found = model.logits(tokens)
        largest = max(largest, float((found - expected).abs().max()))
        same += int((found.argmax(1) == expected.argmax(1)).sum())
        log_p, log_q = expected.log_softmax(1), found.log_softmax(1)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        lost += float((log_p - log_q)[:-1].gather(1, tokens[1:, None]).sum())
        places += len(tokens)
    return SourceComparison(places, same, largest, lost / places, kl / places, architecture.weights == "float32")


def _pieces(directory: Path, positions: int) -> list[Tensor]:
    """Pieces of the text, in the model's tokens: (tokens,) int64 each. Raises CheckpointError."""
    tokenizer, length = open_tokenizer((directory / TOKENIZER_NAME).read_text(encoding="utf-8")), min(PIECE, positions)
    text = "\n".join(topics[name] for name in sorted(topics))
    return list(torch.tensor(tokenizer.encode(text).ids[: PIECES * length]).split(length))


def _transformers(source: Path) -> Callable[[Tensor], Tensor]:
    """From tokens (tokens,) to logits (tokens, vocabulary) float32 for the next tokens. Raises OnesweepError."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    file = {"gguf_file": source.name} if source.is_file() else {}
    directory = source.parent if source.is_file() else source
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), **file, local_files_only=True, dtype=torch.float32
            ).eval()
    except Exception as error:  # of any type: the package has none of its own for it
        reason = next(iter(str(error).splitlines()), "").rstrip(".").replace(str(source), "it") or type(error).__name__
        remedy = "give all files of the model as published, and the newest transformers"
        raise OnesweepError(f"transformers cannot read {source}: {reason}; {remedy}") from None
    return lambda tokens: model(tokens[None]).logits[0]
