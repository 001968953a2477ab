"""Distillation of a draft head: it learns to write on from the model's own hidden states."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.checkpoint.checkpoint import file_digest, replace_file
from stages.checkpoint.draft_head import (
    DRAFT_HEAD_NAME,
    DraftHead,
    add_draft_head,
    read_draft_head,
    takes_draft_head,
    write_draft_head,
)
from stages.checkpoint.manifest import read_manifest
from stages.device import check_device
from stages.errors import InputError
from stages.model.architecture import LlamaArchitecture
from stages.model.layers import rotate, seen_keys
from stages.model.llama import LlamaLayer
from trainer.blocks.run import Run, StepLoss
from trainer.blocks.state import json_digest
from trainer.distill.distill import PUBLISH_EVERY_S, Tell
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import OutputHead, Samples, Teacher, tokens_corpus

# In turn, how many tokens in a row a step has the head guess, as it will where it drafts (training-time test, EAGLE-3,
# arXiv 2503.01840).
DEPTHS = (1, 2, 3)
DEPTH_WEIGHT = 0.8  # of a depth's loss, as a share of that of the depth before
# Weight of the cross-entropy beside -ln(acceptance): exp of this, times the acceptance. The gradient of the acceptance
# alone is small where a head still guesses wrongly (LK losses, arXiv 2602.23881).
SHARPNESS = -3.0
# Rows whose logits stay in a processor's cache; a GPU wants large products, and has room for them.
CHUNK_ROWS, GPU_CHUNK_ROWS = 48, 8192
Cache = list[tuple[Tensor, Tensor]]


class _Acceptance(torch.autograd.Function):
    """Mean loss of guesses; the gradient by the head's states comes with the same pass, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, task: HeadTask, probs: Tensor) -> Tensor:  # noqa: ANN401
        """states: (rows, width), normed; probs: the teacher's, (rows, tokens)."""
        gradient, accepted = torch.empty_like(states), 0.0
        cross = math.exp(SHARPNESS * task.acceptance)
        size = CHUNK_ROWS if states.is_cpu else GPU_CHUNK_ROWS
        for begin in range(0, len(states), size):
            chunk = slice(begin, begin + size)
            p, q = probs[chunk].float(), (states[chunk].to(task.rows.dtype) @ task.rows.T).float().softmax(-1)
            shared = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=1e-4)
            accepted += float(shared.sum())
            # d CE / d logits = q sum(p) - p; d -ln(shared) / d logits = (q sum(q below p) - q below p) / shared
            below = torch.where(q < p, q, 0.0)
            by_logits = (q * p.sum(-1, keepdim=True) - p) * cross
            by_logits += (q * below.sum(-1, keepdim=True) - below) * ((1 - cross) / shared)
            gradient[chunk] = by_logits.to(task.rows.dtype) @ task.rows
        ctx.save_for_backward(gradient / len(states))
        return states.new_tensor(1 - accepted / len(states))

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None


class HeadTask:
    """A draft head that learns to guess what its model writes next."""

    name = "draft-head"

    def __init__(self, samples: Samples, count: int, layers: Sequence[int], start: DraftHead | None = None) -> None:
        """:param count: the most frequent tokens of the text, which the head guesses.
        :param layers: of the teacher, which the head's begin as copies of.
        :param start: a head to continue, with its tokens. The layers come before its own, and add nothing at first."""
        teacher, last = samples.teacher, samples.teacher.stages[-1]
        architecture = last.architecture
        assert isinstance(architecture, LlamaArchitecture)
        assert last.norm is not None
        frequency = torch.bincount(samples.corpus.train.long(), minlength=architecture.vocabulary)
        tokens = frequency.argsort(descending=True, stable=True)[:count].sort()[0] if start is None else start.tokens
        tokens, own = tokens.long().to(teacher.device), 0 if start is None else len(start.stage.layers)
        self.head = DraftHead(architecture, len(tokens), len(layers) + own).to(teacher.device)
        sources = [layer for stage in teacher.stages for layer in stage.layers]
        self.samples, self.held_out, self.full = samples, samples.held_out(), OutputHead.of(last)
        self.rows = self.full.weight[tokens]
        self.acceptance = 0.0  # of late
        with torch.no_grad():
            self.head.tokens.copy_(tokens)
            for norm in (self.head.model_norm, self.head.stage.norm):
                assert norm is not None
                norm.weight.copy_(last.norm.weight)
            for layer, index in zip(self.head.stage.layers, layers, strict=False):
                layer.load_state_dict(sources[index].state_dict())
            if start is None:
                eye = torch.eye(architecture.width)
                self.head.join.weight.copy_(torch.cat([0.3 * eye, 0.7 * eye], dim=1))
            else:
                self._continue(start, len(layers))
        self.head.model_norm.requires_grad_(False)
        assert self.head.stage.head is not None
        self.head.stage.head.requires_grad_(False)
        self.module: nn.Module = self.head
        self.trained = [self.module]

    def _continue(self, start: DraftHead, added: int) -> None:
        """Take the numbers of `start`, whose layers come after those that were added."""
        for layer in self.head.stage.layers[:added]:
            for matrix in (layer.attention_out, layer.mlp_out):
                nn.init.zeros_(matrix.weight)
        for layer, source in zip(self.head.stage.layers[added:], start.stage.layers, strict=True):
            layer.load_state_dict(source.state_dict())
        rest = {name: tensor for name, tensor in start.stored().items() if not name.startswith("stage.layers.")}
        self.head.load_state_dict(rest, strict=False)

    def probs(self, seen: Tensor) -> Tensor:
        """The teacher's, of the tokens that can be guessed: (rows, positions, tokens), in the type of its products.
        seen: (rows, positions, width), normed."""
        states, found = seen.flatten(0, 1), list[Tensor]()
        for chunk in self.full.chunks(len(states)):
            logits = self.full.logits(states[chunk])
            of_all = logits.logsumexp(-1, keepdim=True)
            found.append((logits[:, self.head.tokens.long()] - of_all).exp_().to(self.rows.dtype))
        return torch.cat(found).unflatten(0, seen.shape[:2])

    def loss(self, step: int) -> StepLoss:
        tokens, features = self.samples.batch(step)
        seen = features.to(self.samples.teacher.device).float()
        total, refused = seen.new_zeros(()), list[float]()
        probs = self.probs(seen[:, 1:])
        for depth, states in enumerate(self._unrolled(tokens, seen, DEPTHS[step % len(DEPTHS)])):
            missed = _Acceptance.apply(states.flatten(0, 1), self, probs[:, depth:].flatten(0, 1))
            total = total + missed * DEPTH_WEIGHT**depth
            refused.append(float(missed.detach()))
        self.acceptance += 0.1 * (1 - refused[0] - self.acceptance)
        return StepLoss(total, {"total_variation": refused[0]})

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Total variation at each depth on held-out text, by names such as `written_total_variation_1`."""
        found = {}
        for name, (tokens, features) in self.held_out.items():
            seen = features.float()
            probs = self.probs(seen[:, 1:])
            for depth, states in enumerate(self._unrolled(tokens, seen, max(DEPTHS))):
                missed = _Acceptance.apply(states.flatten(0, 1), self, probs[:, depth:].flatten(0, 1))
                found[f"{name}_total_variation_{depth + 1}"] = float(missed)
        return found

    def _unrolled(self, tokens: Tensor, seen: Tensor, depths: int) -> Iterator[Tensor]:
        """For each depth, normed states of the head after as many guesses of its own as come before: (rows, places,
        width). The first place is one later than at the depth before.

        tokens: (rows, positions); seen: the teacher's normed states at all of them.
        """
        stage, states, tokens = self.head.stage, seen, tokens.to(seen.device)
        caches = [Cache() for _ in stage.layers]
        assert stage.norm is not None
        for depth in range(depths):
            places = tokens.shape[1] - 1 - depth
            embedded = self.full.weight[tokens[:, 1 + depth : 1 + depth + places].long()].float()
            states = self.head.joined(states[:, :places], embedded)
            for layer, cache in zip(stage.layers, caches, strict=True):
                states = self._layer(layer, states, depth, cache)
            yield stage.norm(states)

    def _layer(self, layer: LlamaLayer, x: Tensor, depth: int, cache: Cache) -> Tensor:
        """A layer at places that see the first depth's before them, and the later depths' on their own branch."""
        a, places = self.head.stage.architecture, x.shape[1]
        rotary = self.head.stage.rotary[:, depth : depth + places]
        keys = a.kv_heads * a.head_dim
        parts = layer.qkv(layer.attention_norm(x)).split([a.query_width, keys, keys], dim=2)
        q, k, v = (each.unflatten(2, (-1, a.head_dim)).transpose(1, 2) for each in parts)
        q, k = rotate(q, rotary), rotate(k, rotary)
        cache.append((k.repeat_interleave(a.heads // a.kv_heads, 1), v.repeat_interleave(a.heads // a.kv_heads, 1)))
        (first_k, first_v), later = cache[0], cache[1:]
        scores = q @ first_k[:, :, :places].transpose(2, 3) * a.query_scale
        scores = scores.masked_fill(~seen_keys(places, 0, device=q.device), float("-inf"))
        own = [(q * k[:, :, :places]).sum(-1, keepdim=True) * a.query_scale for k, _ in later]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        mixed = weights[..., :places] @ first_v[:, :, :places]
        for at, (_, values) in enumerate(later, places):
            mixed = mixed + weights[..., at : at + 1] * values[:, :, :places]
        x = x + layer.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + layer.mlp(x)


def distill_head(settings: DistillSettings, tell: Tell) -> Path:
    """Make a draft head, or continue one; `tell` gets a line of progress now and then. Returns its file.

    Without `--out` the checkpoint gets it. Raises OnesweepError.
    """
    s, manifest = settings, read_manifest(settings.checkpoint)
    check_device(s.device)
    if not takes_draft_head(manifest):
        raise InputError(f"{s.checkpoint}: a draft head needs an AR model of Llama's layers without an option")
    assert isinstance(manifest.architecture, LlamaArchitecture)
    if manifest.architecture.weights != "float32":  # the head begins as layers of the model
        raise InputError(f"{s.checkpoint}: distil from an import with --weights float32; its head serves all others")
    total = manifest.architecture.total_layers
    s.check_layers(total)
    start = None if s.start is None else read_draft_head(s.start, manifest)
    layers = s.layers or ([] if start else sorted({place % total for place in (0, 1, -2, -1)}))
    corpus = tokens_corpus(s.texts, s.checkpoint, s.window)
    folder = s.out or s.checkpoint / "draft-head"
    began = "" if s.start is None else file_digest(s.start)
    identity = json_digest({"teacher": manifest.digest(), "data": corpus.digest(), "start": began, **s.record()})
    samples = Samples(Teacher(s.checkpoint, s.device, s.bfloat16), corpus, s, folder / "samples", identity)
    task = HeadTask(samples, s.guesses, layers, start)
    file = folder / DRAFT_HEAD_NAME

    def report(run: Run, losses: dict[str, float]) -> None:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
        tell(f"step {run.step}: {shown}")
        replace_file(file, lambda path: write_draft_head(path, task.head))

    budget_s, every_s = 60 * (s.minutes or 1e9), PUBLISH_EVERY_S
    run = Run(task, s.training(), folder, identity, budget_s=budget_s, evaluate_every_s=every_s, evaluated=report)
    report(run, run.train())
    run.finish()
    samples.drop()
    if s.out is None:
        add_draft_head(s.checkpoint, file)
        shutil.rmtree(folder)
        file = s.checkpoint / DRAFT_HEAD_NAME
    return file
