"""The pipeline that is distilled, in one process, and distances of a drafter from it."""

# Both use the same head over their features, a chunk of positions at a time: the logits of all would fill the memory.

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import Manifest
from stages.memory import require_memory
from stages.model.layers import LayerCache
from stages.model.pipeline import PipelineStage, new_caches

# Logits of a chunk in float32: they stay in a processor's cache; a GPU wants large products.
CHUNK_BYTES, GPU_CHUNK_BYTES = 25 << 20, 2 << 30
DRAFT = 8  # draft tokens in a row, for the mean number that is accepted


@dataclass(frozen=True)
class OutputHead:
    """A model's last matrix."""

    weight: Tensor  # (vocabulary, width), in the type that products are computed in
    bias: Tensor | None = None

    @staticmethod
    def of(stage: PipelineStage) -> OutputHead:
        """That of a pipeline's last stage."""
        assert stage.head is not None
        return OutputHead(stage.head.weight, stage.head.bias)

    def logits(self, features: Tensor) -> Tensor:
        """features: (places, width). Returns (places, vocabulary) float32."""
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias).float()

    def chunks(self, places: int) -> Iterator[slice]:
        most = CHUNK_BYTES if self.weight.is_cpu else GPU_CHUNK_BYTES
        size = max(1, most // (4 * len(self.weight)))
        return (slice(begin, begin + size) for begin in range(0, places, size))


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher || student) in nats; the gradients, from d KL / d logits = q - p, come with the same pass."""

    # Three products with the head are almost half of a step's time, so the gradient does not cost a second pass. The
    # head's Fisher metric needs no logits, but is worse: 3.26 bits where the full KL has 3.01.
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Tensor,
        head: OutputHead,
    ) -> Tensor:
        own = OutputHead(weight.to(head.weight.dtype), None if bias is None else bias.to(head.weight.dtype))
        gradient, total = torch.empty_like(student), student.new_zeros((), dtype=torch.float32)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in head.chunks(len(student)):
            log_p = head.logits(teacher[chunk]).log_softmax(-1)
            log_q = own.logits(student[chunk]).log_softmax(-1)
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum()
            difference = log_q.exp_().sub_(p).to(own.weight.dtype)
            gradient[chunk] = (difference @ own.weight).to(gradient.dtype)
            if by_weight is not None:
                by_weight += difference.T @ student[chunk].to(difference.dtype)
            if by_bias is not None:
                by_bias += difference.sum(0)
        ctx.save_for_backward(
            *(None if each is None else each / len(student) for each in (gradient, by_weight, by_bias))
        )
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *(None if each is None else each * outputs[0] for each in ctx.saved_tensors), None, None


def mean_kl(student: Tensor, own: OutputHead, teacher: Tensor, head: OutputHead) -> Tensor:
    """Mean KL(teacher || student) in nats a position, differentiable by `student` and its head.

    student, teacher: features (..., width), each with its model's own width. own: the student's head.
    """
    rows = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    result: Tensor = _Divergence.apply(rows[0], own.weight, own.bias, rows[1], head)
    return result


@dataclass(frozen=True)
class Distance:
    """Means over the positions of a text; p is the teacher, q the drafter, both at temperature 1."""

    kl_bits: float  # KL(p || q)
    total_variation: float  # share of draft tokens that is refused
    accepted: float  # draft tokens accepted of 8 in a row


def distance(student: Tensor, own: OutputHead, teacher: Tensor, head: OutputHead) -> Distance:
    """Distance of the student from the teacher. Both: (rows, positions, width) features of the same text."""
    rows, positions = student.shape[:2]
    kl, stays = torch.empty(rows * positions), torch.empty(rows * positions)
    pairs = ((head, teacher.flatten(0, 1)), (own, student.flatten(0, 1)))
    for chunk in head.chunks(rows * positions):
        log_p, log_q = (each.logits(features[chunk]).log_softmax(-1) for each, features in pairs)
        p = log_p.exp()
        kl[chunk] = (p * (log_p - log_q)).sum(-1).cpu()
        stays[chunk] = torch.minimum(p, log_q.exp()).sum(-1).cpu()
    return Distance(float(kl.mean()) / math.log(2), 1 - float(stays.mean()), run_length(stays.view(rows, positions)))


def run_length(stays: Tensor, count: int = DRAFT) -> float:
    """Mean number of draft tokens accepted of `count` in a row. stays: (rows, positions), each one's probability.

    At every position where a whole run fits: the sum over k of the product of the first k probabilities (arXiv
    2211.17192, eq. 1, with each position's own probability in place of their mean).
    """
    count = min(count, stays.shape[1])
    return float(stays.unfold(1, count, 1).cumprod(-1).sum(-1).mean())


class Teacher:
    """All stages, frozen, in the data type that they compute in."""

    def __init__(self, directory: Path, manifest: Manifest, device: str, dtype: torch.dtype) -> None:
        """Load the stages, one after the other. Raises CheckpointError."""
        sizes = [part.bytes if part else 0 for part in manifest.parts]
        share = 0.5 if dtype == torch.bfloat16 else 1.0
        needed = share * sum(sizes) + max(sizes) if device == "cpu" else max(sizes)
        require_memory(int(needed), f"the model in {directory}")
        self.dtype, self.device = dtype, device
        self.stages: list[PipelineStage] = []
        for index in range(manifest.architecture.parts):
            self.stages.append(load_stage(directory, index).to(device=device, dtype=dtype))

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.stages[-1])

    def read(self, symbols: Tensor) -> Tensor:
        """The head's input at every position: (rows, positions, width). symbols: (rows, positions) int64."""
        with self._alone():
            return self._features(symbols.to(self.device), None)

    def write(self, prompts: Tensor, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Continue `prompts` (rows, positions) int64 at temperature 1 until there are `length` symbols.

        Returns the texts (rows, length) and the head's input at every position (rows, length, width).
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        head = self.head
        with self._alone():
            caches = self._caches(length, len(prompts))
            text = prompts.to(self.device)
            features = [self._features(text, caches)]
            while text.shape[1] < length:
                odds = head.logits(features[-1][:, -1]).softmax(-1)
                drawn = torch.multinomial(odds, 1, generator=generator)
                text = torch.cat([text, drawn], dim=1)
                features.append(self._features(drawn, caches))
            return text, torch.cat(features, dim=1)

    def _features(self, symbols: Tensor, caches: list[list[LayerCache]] | None) -> Tensor:
        x = symbols
        for i, stage in enumerate(self.stages):
            x = stage.read(x, caches[i] if caches else None)
        norm = self.stages[-1].norm
        assert norm is not None
        features: Tensor = norm(x)
        return features

    def _caches(self, capacity: int, rows: int) -> list[list[LayerCache]]:
        """Empty ones for every stage, as the stages compute."""
        return [
            [
                LayerCache(cache.keys.to(self.dtype), cache.values.to(self.dtype))
                for cache in new_caches(
                    len(stage.layers), stage.architecture, capacity, rows, torch.device(self.device)
                )
            ]
            for stage in self.stages
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Without gradients and autocast, whatever a training step around it has switched on."""
        with torch.no_grad(), torch.autocast(torch.device(self.device).type, enabled=False):
            yield
