"""An imported model beside `transformers`, which reads the same files."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.gate import probe_symbols
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.model.llama import LlamaArchitecture

TOLERANCE = 1e-3  # most that a logit may differ: float32 has some 1e-6 of the largest, and layers add up


@dataclass(frozen=True)
class SourceComparison:
    """The next token at every place of the probe text, by the imported stages and by `transformers`."""

    places: int
    same: int  # places at which both find the same token the likeliest
    largest_difference: float  # of a logit, over all places

    @property
    def holds(self) -> bool:
        return self.same == self.places and self.largest_difference <= TOLERANCE

    def __str__(self) -> str:
        return (
            f"next tokens as transformers: {self.same} of {self.places}; largest difference of a logit "
            f"{self.largest_difference:.1e} (at most {TOLERANCE:.0e})"
        )


@torch.inference_mode()
def compare_with_source(checkpoint: Path, source: Path) -> SourceComparison:
    """Read the probe text of an imported model with both.

    :param source: the Hugging Face folder or .gguf file that it was imported from. Raises OnesweepError.
    """
    directory = find_bundle(checkpoint).ar
    if directory is None or not isinstance(read_manifest(directory).architecture, LlamaArchitecture):
        raise InputError(f"{checkpoint} has no imported model: --source is for what `onesweep import` makes")
    if not source.exists():
        raise InputError(f"no model at {source}: --source is what was imported, a folder or a .gguf file")
    manifest = read_manifest(directory)
    tokens = probe_symbols(manifest)
    theirs = _transformers_logits(source, tokens)
    vocabulary = manifest.text_architecture.vocabulary
    if theirs.shape[-1] != vocabulary:
        raise InputError(
            f"{source} has {theirs.shape[-1]} tokens, {directory} {vocabulary}: the checkpoint was not imported from it"
        )
    x = tokens
    for index in range(manifest.architecture.parts):
        stage = load_stage(directory, index)
        x = stage.read(x)
    ours = stage.next_byte(x)[0]
    same = int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    return SourceComparison(len(ours), same, float((ours - theirs).abs().max()))


def _transformers_logits(source: Path, tokens: Tensor) -> Tensor:
    """(places, vocabulary) float32."""
    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError as error:
        raise InputError(
            f"--source needs the package transformers ({error}): pip install 'onesweep[quality]'"
        ) from None
    logging.set_verbosity_error()
    file = {"gguf_file": source.name} if source.is_file() else {}
    directory = source.parent if source.is_file() else source
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), **file, local_files_only=True, dtype=torch.float32
            ).eval()
    except Exception as error:  # of any type: the package has none of its own for it
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise OnesweepError(f"transformers cannot read {source}: {reason}") from None
    logits: Tensor = model(tokens).logits[0]
    return logits
