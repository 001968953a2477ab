"""Masked text: an undivided net, blocks of mask share, and a recurrent block, at equal layers x texts.

    python masked.py TRAIN VALID OUT STEPS SEED[,SEED] [ARM[,ARM]]

A text has a share t of its bytes masked. The bound on nats a byte is the mean over t in (0, 1) of the cross-entropy of
a masked byte (MD4, arXiv 2406.04329, linear schedule). Arms: `whole` (four layers, all t), `blocks` (two nets of two
layers, one for each half of t: the rows of DiffusionBlocks, arXiv 2506.14202), `one` (two layers, all t, twice the
steps: one recurrent block without unrolling), `unrolled` (two layers applied twice, trained through both). STEPS are
those of `whole`. OUT has the results, and each net that is trained: a run that was stopped continues after the last of
them. WIDTH, LAYERS, LENGTH and BATCH of the environment are the shape, DEVICE is where the nets are trained.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.layers import rotary_table, rotate

WIDTH, LAYERS, LENGTH, BATCH = (
    int(os.environ.get(name, usual)) for name, usual in (("WIDTH", 64), ("LAYERS", 4), ("LENGTH", 64), ("BATCH", 32))
)
DEVICE = os.environ.get("DEVICE", "cpu")
HEADS, MASK, EVALUATED = WIDTH // 16, 256, 64
LEARNING_RATE = 4e-3 * 64 / WIDTH
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.between(x))).square())


class Net(nn.Module):
    def __init__(self, layers: int, times: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, WIDTH)
        # Without it, when a net begins to look at neighbours is a matter of chance.
        self.near = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head, self.times = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256), times
        self.register_buffer("rotary", rotary_table(LENGTH, WIDTH // HEADS), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for layer in self.layers:
            for out in (layer.out, layer.down):
                nn.init.zeros_(out.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        begin = x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        for turn in range(self.times):
            x = x + begin if turn else x
            for layer in self.layers:
                x = layer(x, self.rotary)
        return self.head(self.norm(x))


def masks(text: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(text.shape, generator=generator) < t[:, None]


def masked_nats(logits: Tensor, text: Tensor, masked: Tensor) -> Tensor:
    """Sum of the cross-entropies of masked bytes of each text: (batch,)."""
    return (F.cross_entropy(logits.flatten(0, 1), text.flatten(), reduction="none").view(text.shape) * masked).sum(1)


def shares(low: float, high: float, generator: torch.Generator) -> Tensor:
    """A batch of t, stratified in the range."""
    return low + (high - low) * ((torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) / BATCH).clamp(1e-3)


def windows(corpus: Tensor, generator: torch.Generator) -> Tensor:
    at = torch.randint(len(corpus) - LENGTH, (BATCH,), generator=generator)
    return corpus[at[:, None] + torch.arange(LENGTH)].long()


def train(net: Net, corpus: Tensor, low: float, high: float, steps: int, seed: int, name: str, state: Path) -> float:
    """Returns processor seconds. A net that was trained before is read from its file."""
    done, begin = state / f"{name}.pt", time.process_time()
    if done.exists():
        net.load_state_dict(torch.load(done, weights_only=True))
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            left = 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 100) * left
        text = windows(corpus, generator)
        t = shares(low, high, generator)
        masked = masks(text, t, generator)
        # A text counts by its mean over masked bytes: the bound's weight 1 / t, without the noise of their number.
        text, masked = text.to(DEVICE), masked.to(DEVICE)
        loss = (masked_nats(net(text.masked_fill(masked, MASK)), text, masked) / masked.sum(1).clamp(1)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if step % 200 == 199:
            seconds = round(time.process_time() - begin)
            print(
                json.dumps({"net": name, "step": step + 1, "nats": round(total / 200, 4), "cpu_s": seconds}), flush=True
            )
            total = 0.0
    torch.save(net.state_dict(), done)
    return time.process_time() - begin


def by_table(corpus: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log probabilities of a byte alone (256,), given the byte before, and given the one after: (256, 256) each."""
    counts = torch.bincount(corpus.long(), minlength=256).float()
    alone = (counts + 0.1) / (counts + 0.1).sum()
    pairs = torch.bincount(corpus[:-1].long() * 256 + corpus[1:].long(), minlength=65536).view(256, 256).float()
    after = (pairs + 5 * alone) / (pairs.sum(1, keepdim=True) + 5)
    before = (pairs.T + 5 * alone) / (pairs.sum(0)[:, None] + 5)
    return alone.log(), after.log(), before.log()


def table_logits(tables: tuple[Tensor, Tensor, Tensor], text: Tensor) -> Tensor:
    """A masked byte by its two neighbours as far as they are seen, as if they were independent given it."""
    alone, after, before = tables
    logits = alone.expand(*text.shape, 256).clone()
    left, right = text[:, :-1], text[:, 1:]
    logits[:, 1:] += torch.where((left != MASK)[..., None], after[left.clamp(max=255)] - alone, 0)
    logits[:, :-1] += torch.where((right != MASK)[..., None], before[right.clamp(max=255)] - alone, 0)
    return logits


@torch.no_grad()
def evaluate(answers: list, held_out: Tensor) -> list[list[float]]:
    """Bound in nats a byte on each half of t, of `answers`: functions of (half, text). The same masks for all."""
    sums = [[0.0, 0.0] for _ in answers]
    for half in range(2):
        generator = torch.Generator().manual_seed(10**6)
        for _ in range(EVALUATED):
            text = windows(held_out, generator)
            t = shares(half / 2, half / 2 + 0.5, generator)
            masked = masks(text, t, generator)
            for i, answer in enumerate(answers):
                logits = answer(half, text.masked_fill(masked, MASK).to(DEVICE)).cpu()
                nats = masked_nats(logits, text, masked) / (t * LENGTH)
                sums[i][half] += float(nats.mean()) / EVALUATED
    return sums


def plan(arm: str, steps: int) -> list[tuple[Net, tuple[float, float], int]]:
    few, every = LAYERS // 2, (0.0, 1.0)
    return {
        "whole": lambda: [(Net(LAYERS, 1), every, steps)],
        "blocks": lambda: [(Net(few, 1), (i / 2, i / 2 + 0.5), steps) for i in range(2)],
        "one": lambda: [(Net(few, 1), every, 2 * steps)],
        "unrolled": lambda: [(Net(few, 2), every, steps)],
    }[arm]()


def bytes_of(path: str) -> Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def main(train_path: str, valid_path: str, out: Path, steps: int, seeds: list[int], arms: list[str]) -> None:
    corpus, held_out = bytes_of(train_path), bytes_of(valid_path)
    out.mkdir(parents=True, exist_ok=True)
    alone, after, before = (table.to(DEVICE) for table in by_table(corpus))
    tables = (alone, after, before)
    usual = [lambda _, x: alone.expand(*x.shape, 256), lambda _, x: table_logits(tables, x)]
    print(json.dumps(dict(zip(("bytes alone", "two neighbours"), evaluate(usual, held_out), strict=True))), flush=True)
    for seed, arm in ((seed, arm) for seed in seeds for arm in arms):
        torch.manual_seed(seed)
        nets = [(net.to(DEVICE), span, count) for net, span, count in plan(arm, steps)]
        # The first net of each arm has the same texts and masks as far as it goes.
        spent = sum(
            train(net, corpus, *span, count, 1000 * seed + i, f"{arm}-{i}-seed-{seed}-{steps}", out)
            for i, (net, span, count) in enumerate(nets)
        )
        by_half = [nets[0][0], nets[-1][0]]
        (halves,) = evaluate([lambda half, x, by_half=by_half: by_half[half](x)], held_out)
        row = {"arm": arm, "seed": seed, "steps": steps, "nats": sum(halves) / 2, "halves": halves}
        row |= {"cpu_s": round(spent), "parameters": sum(p.numel() for net, *_ in nets for p in net.parameters())}
        print(json.dumps(row), flush=True)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    chosen = sys.argv[6:7] or ["whole,blocks,one,unrolled"]
    main(*sys.argv[1:3], Path(sys.argv[3]), int(sys.argv[4]), [*map(int, sys.argv[5].split(","))], chosen[0].split(","))
