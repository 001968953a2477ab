"""The chain as a map from a request's random numbers to the text that `ar` writes with them.

    python gumbel.py WEIGHTS TEXT OUT [STEPS]

Teacher: x_t = argmax(logits_ar(x_<t) / T + g_t), g Gumbel numbers of (seed, text, t, symbol). Every block begins as
`local`; its slots read the block before's features, the numbers and an estimate of the text, which it renews EVALUATIONS
times. It learns x_t from softmax(logits / T + g_t), after 0 to EVALUATIONS - 1 evaluations of its own, the blocks before
frozen. Reported: mean number of first bytes that are those of `ar` (of LENGTH), after each block, and of `local` with the
same numbers.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from onesweep.stages.checkpoint.checkpoint import load_ar
from onesweep.stages.model.pipeline import new_caches
from onesweep.trainer.blocks.data import load_corpus

PROMPT, LENGTH, T, EVALUATIONS = 64, 24, 0.8, 8
SEQUENCES, HELD_OUT = 64, 512
torch.set_num_threads(1)


def gumbel(seed: int, rows: int) -> torch.Tensor:
    u = torch.rand(rows, LENGTH, 256, generator=torch.Generator().manual_seed(seed)).clamp(1e-9, 1 - 1e-7)
    return -(-u.log()).log()


@torch.no_grad()
def write(model, prompts: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    a = model.architecture
    caches = [new_caches(a.layers, a, PROMPT + LENGTH, len(prompts)) for _ in range(a.parts)]
    logits, out = model(prompts, caches)[:, -1], []
    for t in range(LENGTH):
        out.append((logits / T + g[:, t]).argmax(-1))
        if t + 1 < LENGTH:
            logits = model(out[-1][:, None], caches)[:, -1]
    return torch.stack(out, 1)


class MapBlock(nn.Module):
    def __init__(self, local) -> None:
        super().__init__()
        (stage,) = local.stages
        width = stage.architecture.width
        self.layers, self.rotary, self.embedding = stage.layers, stage.rotary, stage.embedding
        self.norm, self.head = stage.norm, stage.head
        self.numbers, self.mix = nn.Linear(256, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.numbers.weight)
        nn.init.zeros_(self.mix.weight)

    def forward(self, prompt, y, g, features):
        """Logits of each slot (rows, LENGTH, 256), features (rows, PROMPT + LENGTH - 1, width)."""
        x = torch.cat([self.embedding(prompt), y[:, :-1] @ self.embedding.weight], 1)
        ahead = torch.cat([torch.zeros(len(g), PROMPT - 1, 256), (g - 0.577) / 1.28], 1)
        x = x + self.numbers(ahead)
        if features is not None:
            x = x + self.mix(features)
        for layer in self.layers:
            x, *_ = layer.clean(x, self.rotary[:, : x.shape[1]])
        return self.head(self.norm(x[:, PROMPT - 1 :])), x


def settle(block, prompt, y, g, features, evaluations: int):
    x = None
    for _ in range(evaluations):
        logits, x = block(prompt, y, g, features)
        y = drawn(logits / T + g)
    return y, x


def drawn(scores):
    return F.one_hot(scores.argmax(-1), 256).float()


def prefix(texts, y) -> torch.Tensor:
    return (y.argmax(-1) == texts if y.dim() == 3 else y == texts).cumprod(1).sum(1).float()


def told(name, runs, **more):
    error = runs.std() / math.sqrt(len(runs))
    print(json.dumps({"what": name, "prefix": round(float(runs.mean()), 3), "error": round(float(error), 3)} | more), flush=True)


def main(weights: Path, text: Path, out: Path, steps: int) -> None:
    ar, local = load_ar(weights / "ar").eval(), load_ar(weights / "local").eval()
    corpus = load_corpus(text)
    out.mkdir(parents=True, exist_ok=True)
    prompts = corpus.valid_batch(HELD_OUT, PROMPT)
    g = gumbel(10**9, HELD_OUT)
    texts = write(ar, prompts, g)
    drafted = prefix(texts, write(local, prompts, g))
    told("local", drafted)
    start = torch.full((1, LENGTH, 256), 0.0)
    counts = torch.bincount(corpus.train.long(), minlength=256).float() + 1
    unigram = (counts / counts.sum()).log()
    first = lambda g: drawn(unigram / T + g)
    blocks: list[MapBlock] = []
    for index in range(3):
        torch.manual_seed(index)
        block = MapBlock(load_ar(weights / "local"))
        path = out / f"block-{index}.pt"
        blocks.append(block)
        if path.exists():
            block.load_state_dict(torch.load(path, weights_only=True))
        else:
            train(blocks, index, ar, corpus, first, steps)
            torch.save(block.state_dict(), path)
        with torch.no_grad():
            y, features = first(g), None
            for each in blocks:
                y, features = settle(each, prompts, y, g, features, EVALUATIONS)
            told(f"after block {index}", prefix(texts, y))
            y2, _ = settle(blocks[-1], prompts, y, g, features_before(blocks, prompts, first(g), g), LENGTH)
            told(f"after block {index}, {LENGTH} more evaluations", prefix(texts, y2))


def features_before(blocks, prompts, y, g):
    features = None
    for each in blocks[:-1]:
        y, features = settle(each, prompts, y, g, features, EVALUATIONS)
    return features


def train(blocks, index: int, ar, corpus, first, steps: int) -> None:
    *before, block = blocks
    fresh = [p for n, p in block.named_parameters() if not n.startswith("layers")]
    optimizer = torch.optim.AdamW(
        [{"params": block.layers.parameters(), "lr": 1e-3}, {"params": fresh, "lr": 3e-3}], weight_decay=0.01
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator, begin = torch.Generator().manual_seed(index), time.time()
    pool = []
    for step in range(steps):
        if step % 4 == 0:  # four batches are written side by side
            prompts = corpus.batch(1 + index, step, 4 * SEQUENCES, PROMPT)
            g = gumbel(1000 * (1 + index) + step, len(prompts))
            pool = list(zip(prompts.split(SEQUENCES), g.split(SEQUENCES), write(ar, prompts, g).split(SEQUENCES)))
        prompt, g, texts = pool[step % 4]
        share = min(1, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * share
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                y, features = first(g), None
                for each in before:
                    y, features = settle(each, prompt, y, g, features, EVALUATIONS)
                n = int(torch.randint(0, EVALUATIONS, (), generator=generator))
                y, _ = settle(block, prompt, y, g, features, n)
            logits, _ = block(prompt, y, g, features)
        loss = F.cross_entropy((logits.float() / T + g).flatten(0, 1), texts.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(json.dumps({"block": index, "step": step, "loss": round(loss.item(), 4),
                              "s": round(time.time() - begin)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1500)
