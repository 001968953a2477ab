"""Texts written beside plans that were made from pure noise, as a sweep would make them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.ar import ArModel, new_caches
from trainer.ideas.guided import Guide, GuidedLocal
from trainer.ideas.measure import window_nats
from trainer.ideas.planning import Planner

GRAM = 4


@dataclass(frozen=True)
class Writer:
    """A local model and the chain that plans for it."""

    model: GuidedLocal
    planner: Planner
    chunk: int

    @torch.inference_mode()
    def write(self, prompts: Tensor, count: int, sigma_end: float | None, seed: int) -> Tensor:
        """Prompts (rows, positions) int64 continued by `count` bytes, drawn at temperature 1; no plans at None.

        Writers with one seed draw with the same numbers, and plan from the same noise.
        """
        architecture = self.model.stage.architecture
        caches = new_caches(architecture.layers, architecture, prompts.shape[1] + count, len(prompts))
        generator = torch.Generator().manual_seed(seed)
        text, unread = prompts, prompts
        while (left := prompts.shape[1] + count - text.shape[1]) > 0:
            slots = min(self.chunk, left)
            plan = self._plan(text, slots, sigma_end, seed)
            start = text.shape[1]
            for slot in range(slots):
                logits = self.model(unread, self._guide(plan, start, slot, unread.shape[1]), caches)[:, -1]
                race = torch.empty(logits.shape).exponential_(generator=generator)
                unread = (logits.float().softmax(dim=-1) / race).argmax(dim=-1, keepdim=True)
                text = torch.cat([text, unread], dim=1)
        return text

    def _plan(self, text: Tensor, slots: int, sigma_end: float | None, seed: int) -> Tensor | None:
        if sigma_end is None:
            return None
        return self.planner.from_noise(text, slots, sigma_end, seed).float() * self.planner.scale

    def _guide(self, plan: Tensor | None, start: int, slot: int, positions: int) -> Guide | None:
        """What the last of `positions` reads; those before it, a prompt's, have no plan."""
        if plan is None:
            return None
        visible = torch.zeros(1, positions, plan.shape[1], dtype=torch.bool)
        visible[:, -1] = True
        nearest = torch.zeros(len(plan), positions, plan.shape[2])
        nearest[:, -1] = plan[:, slot]
        return Guide(plan, visible, nearest, start)


@torch.inference_mode()
def write_alone(planner: Planner, prompts: Tensor, count: int, chunk: int, seed: int) -> Tensor:
    """The chain's own text, each chunk denoised to the end and read as the nearest codes: nobody writes beside it."""
    text = prompts
    while (left := prompts.shape[1] + count - text.shape[1]) > 0:
        plan = planner.from_noise(text, min(chunk, left), planner.partition.sigma_min, seed)
        text = torch.cat([text, (plan @ planner.blocks[0].codes.T).argmax(dim=-1)], dim=1)
    return text


def judge_nats(judge: ArModel, text: Tensor, prompt_bytes: int) -> Tensor:
    """Nats a byte of each continuation under `judge`: (rows,)."""
    return window_nats(lambda part: judge(part[:, :-1]), text, prompt_bytes)


def entropy_bits(continuations: Tensor, gram: int) -> float:
    """Plug-in entropy of runs of `gram` bytes in all continuations together: compare equal numbers of bytes."""
    rows = [bytes(row) for row in continuations.tolist()]
    counts = Counter(row[i : i + gram] for row in rows for i in range(len(row) - gram + 1))
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())
