"""Masked text by blocks of mask share, by one net, and by one recurrent block, at equal training.

    python masked.py TRAIN VALID ARM STEPS SEED

A text has a share t of its bytes masked; the bound on bits a byte is the mean over t in (0, 1) of the cross-entropy of a
masked byte (MD4, arXiv 2406.04329, linear schedule). ARM: `whole` (six layers, all t), `blocks` (three nets of two
layers, each on a third of t, DiffusionBlocks' row), `shared` (one net of two layers on all t, three times the steps: one
recurrent block trained by denoising), `recurrent` (two layers applied three times, trained through all three). STEPS are
those of `whole`; all arms train as many layers x texts.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH, MASK, EVALUATED = 128, 4, 128, 16, 256, 48
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Net(nn.Module):
    def __init__(self, layers: int, times: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(257, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head, self.times = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256), times
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers * times) if "out." in name or "down." in name else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        begin = x = self.embedding(text) + self.places
        for time in range(self.times):
            x = x + begin if time else x
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


def bound(net: Net, text: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
    """Nats a byte: (1 / t) x the sum over masked bytes, which is unbiased. text: (batch, LENGTH); t: (batch,)."""
    masked = torch.rand(text.shape, generator=generator) < t[:, None]
    nats = F.cross_entropy(net(text.masked_fill(masked, MASK)).flatten(0, 1), text.flatten(), reduction="none")
    return (nats.view(text.shape) * masked).sum(1) / (t * LENGTH)


def shares(low: float, high: float, batch: int, generator: torch.Generator) -> Tensor:
    """Stratified in the range."""
    u = (torch.arange(batch) + torch.rand(batch, generator=generator)) / batch
    return low + (high - low) * u.clamp(1e-3)


def windows(corpus: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    at = torch.randint(len(corpus) - LENGTH, (batch,), generator=generator)
    return torch.stack([corpus[i : i + LENGTH] for i in at.tolist()]).long()


def train(net: Net, corpus: Tensor, low: float, high: float, steps: int, seed: int, name: str) -> None:
    generator, begin = torch.Generator().manual_seed(seed), time.time()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        loss = bound(net, windows(corpus, BATCH, generator), shares(low, high, BATCH, generator), generator).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(json.dumps({"net": name, "step": step, "bits": round(loss.item() / math.log(2), 3),
                              "s": round(time.time() - begin)}), flush=True)


def main(train_path: str, valid_path: str, arm: str, steps: int, seed: int) -> None:
    corpus, held_out = (torch.frombuffer(bytearray(Path(p).read_bytes()), dtype=torch.uint8) for p in (train_path, valid_path))
    torch.manual_seed(seed)
    thirds = [(i / 3, (i + 1) / 3) for i in range(3)]
    plan = {
        "whole": [(Net(6, 1), (0.0, 1.0), steps)],
        "blocks": [(Net(2, 1), third, steps) for third in thirds],
        "shared": [(Net(2, 1), (0.0, 1.0), 3 * steps)],
        "recurrent": [(Net(2, 3), (0.0, 1.0), steps)],
    }[arm]
    for i, (net, (low, high), count) in enumerate(plan):
        train(net, corpus, low, high, count, 1000 * seed + i, f"{arm}-{i}")
    rows = []
    with torch.no_grad():
        for low, high in thirds:
            net = next(net for net, (a, b), _ in plan if a <= low and high <= b)
            generator = torch.Generator().manual_seed(10**6)
            rows.append(torch.cat([
                bound(net, windows(held_out, BATCH, generator), shares(low, high, BATCH, generator), generator)
                for _ in range(EVALUATED)
            ]) / math.log(2))
    means = [float(row.mean()) for row in rows]
    error = math.sqrt(sum(float(row.var()) / len(row) for row in rows)) / 3
    print(json.dumps({"arm": arm, "bits a byte": round(sum(means) / 3, 4), "error": round(error, 4), "thirds of t": [round(x, 4) for x in means],
                      "parameters": sum(p.numel() for net, *_ in plan for p in net.parameters())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
