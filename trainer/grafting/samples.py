"""What a grafted chain writes after held-out prompts, beside the pretrained model's text and the author's own.

The judge is the pretrained model itself: it sees what it would hardly have written, but likes what repeats itself, so
distinct pairs stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.alphabet import Alphabet
from stages.ar import new_caches
from stages.families import PipelineStage
from stages.randomness import sample_symbols
from trainer.data import Corpus
from trainer.grafting.model import GraftModel
from trainer.grafting.sweep import write

Writer = Callable[[list[int], int], list[int]]
"""Goes on with a prompt; the number is a seed."""


@dataclass(frozen=True)
class Writing:
    """How and how much is written."""

    prompts: int
    prompt_symbols: int = 32
    symbols: int = 32
    steps: int = 4
    """Euler steps a block."""
    temperature: float = 1.0
    chunks: tuple[int, ...] = (1, 4, 8, 32)


@dataclass(frozen=True)
class Row:
    """Of one way of writing."""

    name: str
    sweeps: int
    """Trips along the hosts that a text would take."""
    judge_nats: float
    """Mean loss of a symbol under the pretrained model."""
    distinct_2: float
    """Share of a text's pairs of neighbours that are different, mean over texts."""
    texts: list[list[int]]


@torch.inference_mode()
def panel(model: GraftModel, judge: list[PipelineStage], corpus: Corpus, writing: Writing) -> list[Row]:
    """A row for the author, the judge's own text, and the chain in chunks of each size.

    judge: the stages of the pretrained model.
    """
    w = writing
    windows = corpus.valid_batch(w.prompts, w.prompt_symbols + w.symbols)
    prompts: list[list[int]] = windows[:, : w.prompt_symbols].tolist()
    rows = [_row("author", 0, judge, prompts, windows[:, w.prompt_symbols :].tolist())]

    def written(name: str, sweeps: int, writer: Writer) -> Row:
        return _row(name, sweeps, judge, prompts, [writer(prompt, seed) for seed, prompt in enumerate(prompts)])

    rows.append(written("ar", w.symbols, lambda prompt, seed: _next_by_next(judge, prompt, w, seed)))
    for chunk in w.chunks:

        def writer(prompt: list[int], seed: int, chunk: int = chunk) -> list[int]:
            return write(model, prompt, w.symbols, chunk, steps=w.steps, temperature=w.temperature, seed=seed)

        rows.append(written(f"chunks of {chunk}", -(-w.symbols // chunk), writer))
    return rows


def distinct_pairs(symbols: list[int]) -> float:
    """Share of pairs of neighbours that are different; 1 for a text without pairs."""
    pairs = list(pairwise(symbols))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def _row(name: str, sweeps: int, judge: list[PipelineStage], prompts: list[list[int]], texts: list[list[int]]) -> Row:
    nats = [_judge_nats(judge, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    count = len(texts)
    return Row(name, sweeps, sum(nats) / count, sum(map(distinct_pairs, texts)) / count, texts)


def _judge_nats(judge: list[PipelineStage], prompt: list[int], text: list[int]) -> float:
    known = torch.tensor([prompt + text], device=judge[0].rotary.device)
    x = known[:, :-1]
    for stage in judge:
        x = stage.read(x)
    logits = judge[-1].next_byte(x[:, len(prompt) - 1 :])
    return float(F.cross_entropy(logits[0], known[0, len(prompt) :]))


def _next_by_next(judge: list[PipelineStage], prompt: list[int], writing: Writing, seed: int) -> list[int]:
    """The pretrained model's own text."""
    a = judge[0].architecture
    capacity = len(prompt) + writing.symbols
    device = judge[0].rotary.device
    caches = [new_caches(a.layers_in(i), a, capacity, device=device) for i in range(a.parts)]
    text: list[int] = []
    unread = prompt
    while len(text) < writing.symbols:
        x: Tensor = torch.tensor([unread], device=device)
        for stage, cache in zip(judge, caches, strict=True):
            x = stage.read(x, cache)
        position = len(prompt) + len(text) - 1
        drawn = sample_symbols(judge[-1].next_byte(x[:, -1:])[0], writing.temperature, seed, position)
        unread = Alphabet(a.vocabulary).symbols(drawn)
        text += unread
    return text
