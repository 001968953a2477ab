"""Measurements of a graft on held-out text: losses in nats a token, and scores of the texts it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.backends import DEFAULT_BACKEND, backend_named
from onesweep.stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from onesweep.stages.grafting.block import Noisy, first_of_chunks
from onesweep.stages.model.codec import Int8
from onesweep.stages.model.families import PipelineStage
from onesweep.stages.model.pipeline import new_caches
from onesweep.stages.model.randomness import sample_symbols
from onesweep.stages.model.samplers import DEFAULT_SAMPLER, SAMPLERS, step_sigmas
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.blocks.diagnostics import PathPoint, scrambled
from onesweep.trainer.blocks.losses import ChunkLayout
from onesweep.trainer.grafting.batch import SlotBatch, head_losses, levels_before, read, read_all, slot_losses
from onesweep.trainer.grafting.model import GraftModel

CHUNK = 16  # slots in a chunk, for measurements of slots that see each other
ROWS = 4  # windows at a time


@torch.inference_mode()
def next_nats(model: GraftModel, text: Tensor) -> float:
    """The clean stream's loss through all stages as they are. text: (windows, length + 1) int64."""
    total = 0.0
    for part in text.split(ROWS):
        x = part[:, :-1]
        for stage in model.stages:
            x = stage.read(x)
        logits = model.stages[-1].next_byte(x)
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / text[:, 1:].numel()


@torch.inference_mode()
def range_nats(model: GraftModel, index: int, text: Tensor) -> dict[str, float]:
    """Loss of a block's slots from true states, in chunks of CHUNK: at the most, the middle and the least noise of its
    range; at the most also with every position a chunk of its own, and in chunks with a prefix of another window.

    text: (windows, length + 1) int64.
    """
    block, before, (high, low) = model.blocks[index], model.blocks[:index], model.partition.range(index)
    levels = {
        "high": (high, CHUNK),
        "middle": ((high * low) ** 0.5, CHUNK),
        "low": (low, CHUNK),
        "high_alone": (high, 1),
    }
    totals = dict.fromkeys([*levels, "high_scrambled"], 0.0)
    prefixes = scrambled(text[:, :-1])
    for row, (part, prefix) in enumerate(zip(text.split(ROWS), prefixes.split(ROWS), strict=True)):
        known, target = part[:, :-1], part[:, 1:]
        reading = read(block, before, known)
        for name, (sigma, chunk) in levels.items():
            batch = _steady(model, index, target.shape, sigma, chunk, row)
            totals[name] += float(slot_losses(block, before, model.head, batch, reading, target).sum())
        wrong, batch = read(block, before, prefix), _steady(model, index, target.shape, high, CHUNK, row)
        totals["high_scrambled"] += float(slot_losses(block, before, model.head, batch, wrong, target).sum())
    return {f"{name}_nats": total / text[:, 1:].numel() for name, total in totals.items()}


def _steady(model: GraftModel, index: int, shape: torch.Size, sigma: float, chunk: int, row: int) -> SlotBatch:
    """One noise level everywhere, and the middle of their range for the blocks before."""
    levels = levels_before(model.partition, index, torch.full((index, *shape), 0.5))
    layout, generator = ChunkLayout(shape[1], chunk), torch.Generator().manual_seed(row)
    code_dim = model.architecture.code_dim
    return SlotBatch.of(layout, torch.full(shape, sigma), levels, code_dim, generator, model.device)


@torch.inference_mode()
def from_noise(model: GraftModel, text: Tensor, steps: int, chunk: int, *, is_scrambled: bool) -> list[PathPoint]:
    """Loss of each token while its slot is denoised from pure noise, an evaluation a point.

    text: (windows, length + 1) int64; steps: Euler steps a block; chunk: positions that are denoised together; at 1
    every slot has the true prefix, the papers' metric (BlockTrain, arXiv 2606.24722).
    """
    known, target = text[:, :-1], text[:, 1:]
    prefix = scrambled(known) if is_scrambled else known
    layout = ChunkLayout(known.shape[1], chunk)
    first, mask = first_of_chunks(layout.indices()).to(model.device), layout.mask().to(model.device)
    _, memories = read_all(model.blocks, prefix)
    batch, slots, dim = *known.shape, model.head.codes.shape[1]
    # The sampler works on the CPU, as on hosts.
    sampler = SAMPLERS["ode"](0, 0, batch * slots, dim, model.partition.sigma_max, 1.0)
    features, estimate, path = model.blocks[0].enter(prefix, first), torch.zeros(batch, slots, dim), list[PathPoint]()
    for block, memory in zip(model.blocks, memories, strict=True):
        high, low = model.partition.range(block.index)
        levels: list[tuple[float, float | None]] = list(pairwise(step_sigmas(high, low, steps)))
        if block is model.blocks[-1]:
            levels.append((low, None))  # once more at sigma_min, where the text is read out
        out = features
        for sigma, sigma_next in levels:
            z = sampler.state(estimate.flatten(0, 1), sigma, len(path)).view(estimate.shape)
            there = torch.full((batch, slots), sigma, device=model.device)
            noisy = Noisy(z.to(model.device), estimate.to(model.device), there, first, mask)
            out = block.denoise(features, noisy, memory)
            hidden = block.added.way_out(out).flatten(0, 1)
            path.append(
                PathPoint(sigma, float(head_losses(model.head, hidden, target.flatten(), noisy.likelihood()).mean()))
            )
            if sigma_next is not None:
                point = block.point(out, noisy, model.head, sampler.point_temperature).flatten(0, 1).cpu()
                estimate = sampler.advance(estimate.flatten(0, 1), point, sigma, sigma_next).view(estimate.shape)
        features = out
    return path


Writer = Callable[[list[int], int], list[int]]  # continues a prompt; the number is a seed


@dataclass(frozen=True)
class Writing:
    """Settings of the texts to write."""

    prompts: int
    prompt_symbols: int = 32
    symbols: int = 32
    steps: int = 4  # Euler steps a block
    temperature: float = 1.0
    chunks: tuple[int, ...] = (1, 4, 8, 32)


@dataclass(frozen=True)
class WritingRow:
    """Scores of one way of writing."""

    name: str
    sweeps: int  # trips along the hosts that a text would take
    judge_nats: float  # mean loss of a symbol under the pretrained model
    distinct_2: float  # share of a text's pairs of neighbours that are different, mean over texts
    texts: list[list[int]]


@torch.inference_mode()
def panel(model: GraftModel, judge: list[PipelineStage], corpus: Corpus, writing: Writing) -> list[WritingRow]:
    """A row for the author, the judge's own text, and the chain in chunks of each size, all after held-out prompts.

    judge: the stages of the pretrained model. It notices text that it would hardly have written but likes repetition,
    so the share of distinct pairs stands beside it.
    """
    w = writing
    windows = corpus.valid_batch(w.prompts, w.prompt_symbols + w.symbols)
    prompts: list[list[int]] = windows[:, : w.prompt_symbols].tolist()
    rows = [_row("author", 0, judge, prompts, windows[:, w.prompt_symbols :].tolist())]

    def written(name: str, sweeps: int, writer: Writer) -> WritingRow:
        return _row(name, sweeps, judge, prompts, [writer(prompt, seed) for seed, prompt in enumerate(prompts)])

    rows.append(written("ar", w.symbols, lambda prompt, seed: _next_by_next(judge, prompt, w, seed)))
    for chunk in w.chunks:

        def writer(prompt: list[int], seed: int, chunk: int = chunk) -> list[int]:
            return write(model, prompt, w.symbols, chunk, steps=w.steps, temperature=w.temperature, seed=seed)

        rows.append(written(f"chunks of {chunk}", -(-w.symbols // chunk), writer))
    return rows


def write(
    model: GraftModel,
    prompt: Sequence[int],
    count: int,
    chunk: int,
    *,
    steps: int = 4,
    sampler: str = DEFAULT_SAMPLER,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """`count` symbols after `prompt`, `chunk` of them a sweep: as hosts write them, by the same code."""
    a, alphabet = model.architecture, Alphabet(model.architecture.vocabulary)
    backend = backend_named(DEFAULT_BACKEND)
    runners = [backend.block(part) for part in model.parts()]
    caches = [new_caches(a.layers_in(i), a, len(prompt) + count, device=model.device) for i in range(a.parts)]
    clean, written, read = alphabet.encode(list(prompt)), list[int](), 0
    while len(written) < count:
        read += alphabet.count(clean)
        plan = SweepPlan(seed, read, min(chunk, count - len(written)), steps, temperature, sampler)
        outcome: Boundary | bytes | None = None
        for index, runner in enumerate(runners):
            assert not isinstance(outcome, bytes)
            work = BlockWork(a, index, model.partition, caches[index], plan, Int8(), alphabet.decode(clean), outcome)
            outcome = run_unbatched(work, runner)
        assert isinstance(outcome, bytes)
        clean, written = outcome, written + alphabet.symbols(outcome)
    return written


def distinct_pairs(symbols: list[int]) -> float:
    """Share of pairs of neighbours that are different; 1 for a text without pairs."""
    pairs = list(pairwise(symbols))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def _row(
    name: str, sweeps: int, judge: list[PipelineStage], prompts: list[list[int]], texts: list[list[int]]
) -> WritingRow:
    nats = [_judge_nats(judge, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    count = len(texts)
    return WritingRow(name, sweeps, sum(nats) / count, sum(map(distinct_pairs, texts)) / count, texts)


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
