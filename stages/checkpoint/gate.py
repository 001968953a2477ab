"""The gate's probe: losses on a text in every checkpoint.

A mis-mapped checkpoint loads and runs cleanly; only a measured loss shows that its weights are mapped right.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.checkpoint.manifest import Manifest
from stages.model.architecture import VOCABULARY
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArStage, PipelineStage
from stages.model.randomness import Purpose, normals
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import in_scale, picture_noise

# The gate detects whatever moves a loss: swapping layers of trained weights costs 0.26 nats or more. Weights that are
# nearly untrained pass in any order, as they have nothing to lose.
PROBE_TEXT = (
    "The letter left the coast before dawn, and it was noon when the rider saw the first roofs of the town. "
    "He had not slept. At the gate a boy asked him what he carried, and he said that he did not know; "
    "it was sealed, and it was only one of three. \n"
)
# A part that reads hidden states carries its own probe input: a host can then measure its part's loss
# without the parts before it. AR stages without a head are gated on the relative error of their output.
PROBE_INPUT = "probe.input"
# Tensors in a part's file: its input and output for the probe text, unless they are bytes or losses.
PROBE_OUTPUT = "probe.output"

Measures = dict[str, float]
# A stage's input, tokens (positions,) or hidden states (positions, width) -> hidden states, and the last one's logits.
ReadProbe = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def probe_tokens(manifest: Manifest) -> Tensor:
    """The probe as the model's input: (1, positions) int64, cut to the context."""
    return torch.tensor([*manifest.probe])[None]


def probe_shapes(part: Block | PipelineStage | PicturePart, positions: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the probe's tensors in the file of `part`. positions: of the probe text, if any."""
    if isinstance(part, PicturePart):
        a = part.architecture
        shapes: dict[str, tuple[int, ...]] = {PROBE_OUTPUT: (a.tokens, a.patch_dim if part.has_head else a.features)}
        return shapes if part.reads_patches else shapes | {PROBE_INPUT: (a.tokens, a.features)}
    if isinstance(part, Block):
        return {}
    names = [PROBE_INPUT] if part.embedding is None else []
    if not part.is_last:
        names.append(PROBE_OUTPUT)
    return dict.fromkeys(names, (positions, part.architecture.width))


def measured(
    part: Block | PipelineStage | PicturePart,
    manifest: Manifest,
    hidden: Tensor | None = None,
    recorded: Tensor | None = None,
) -> tuple[Measures, Tensor | None]:
    """Measures of a part on the probe, and its output for the next part.

    hidden: input of a part that reads hidden states; recorded: its output when it was saved.
    """
    if isinstance(part, Block):
        assert manifest.partition is not None
        return probe_block(part, manifest.partition, probe_tokens(manifest).to(part.codes.device)), None
    if isinstance(part, PicturePart):
        assert manifest.partition is not None
        return probe_picture(part, manifest.partition, hidden, recorded)
    return probe_stage(part, probe_tokens(manifest).to(part.rotary.device), hidden, recorded)


@torch.inference_mode()
def probe_block(block: Block, partition: NoisePartition, known: Tensor) -> Measures:
    """Cross-entropies (nats) of both heads of a block on a text. known: (1, positions) int64, as `probe_tokens`."""
    clean, memory = block.read(known)
    high, low = partition.range(block.index)
    sigma = torch.full((1, 1), (high * low) ** 0.5, device=known.device)
    half = known.shape[1] // 2
    target = known[:, half:]
    noise = normals(0, Purpose.INITIAL_NOISE, half, target.shape[1], block.architecture.code_dim)[None].to(known.device)
    prefix = [(keys[:, :, :half], values[:, :, :half]) for keys, values in memory]
    z = block.codes[target] + sigma[..., None] * noise
    denoised = block.denoise(z, torch.zeros_like(z), sigma, prefix, half)
    return {
        "next_byte_nats": _cross_entropy(block.next_byte(clean)[:, :-1], known[:, 1:]),
        "denoise_nats": _cross_entropy(denoised, target),
    }


@torch.inference_mode()
def probe_stage(
    stage: PipelineStage,
    known: Tensor,
    hidden: Tensor | None,
    recorded: Tensor | None = None,
    read: ReadProbe | None = None,
) -> tuple[Measures, Tensor]:
    """Next-token CE (nats) of the last AR stage; for the others, the relative error of hidden states, averaged over all
    positions.

    known: as `probe_tokens`; hidden: the input (positions, width), None for the first stage; recorded: the expected
    output; read: computes the stage, by default with the module itself.
    """
    out, logits = (read or partial(_read, stage))(known[0] if hidden is None else hidden)
    if logits is not None:
        reads_bytes = isinstance(stage, ArStage) and stage.architecture.vocabulary == VOCABULARY
        name = "next_byte_nats" if reads_bytes else "next_token_nats"
        return {name: _cross_entropy(logits[:-1], known[0, 1:].to(logits.device))}, out
    recorded = out if recorded is None else recorded.to(out.device)
    # per position: in most models a few are a thousand times as long, and would hide swapped layers
    errors = (out - recorded).norm(dim=1) / recorded.norm(dim=1).clamp(1e-6)
    return {"hidden_relative_error": float(errors.mean())}, out


def _read(stage: PipelineStage, source: Tensor) -> tuple[Tensor, Tensor | None]:
    out = stage.read(source[None])[0]
    return out, stage.next_byte(out[None])[0] if stage.is_last else None


@torch.inference_mode()
def probe_picture(
    part: PicturePart, partition: NoisePartition, hidden: Tensor | None, recorded: Tensor | None = None
) -> tuple[Measures, Tensor]:
    """Relative error of the part's output for pure noise in the middle of its noise range, and that output.

    hidden: the input (tokens, features), None for a part that reads patches; recorded: the saved output.
    """
    # A picture from the training data would tell more, but we may have no right to distribute it.
    a = part.architecture
    ranges = len(partition.boundaries) - 1
    # Each block of a chain has its own range; every other net covers all noise levels.
    high, low = partition.range(part.index if ranges > 1 else 0)
    sigma = (high * low) ** 0.5
    x = in_scale(sigma) * sigma * picture_noise(a, 0) if hidden is None else hidden
    out = part(x[None], torch.tensor([sigma]), torch.tensor([0]))[0]
    error = 0.0 if recorded is None else float((out - recorded).norm() / recorded.norm().clamp(1e-6))
    return {"picture_relative_error": error}, out


def _cross_entropy(logits: Tensor, target: Tensor) -> float:
    return float(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1)))
