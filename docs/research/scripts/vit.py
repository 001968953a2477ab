"""A picture classifier (ViT) whose blocks are trained alone, beside the same net trained whole.

    python vit.py fashion.npz OUT STEPS SEED[,SEED] ARM[,ARM]

Six layers of width 64 over 16 patches and one token more. Every arm has as many layers x pictures: `whole`, all layers by
back-propagation, STEPS batches of 128; the others train a block of two layers a turn, three turns of STEPS batches.
`own`: each block by a head of its own, on features that its loss does not reach. `blocks`: DiffusionBlocks, the extra token
is the label's embedding with noise, a block takes a third of the noise levels. `noprop`: NoProp-CT, one net of two layers
for all noise levels, squared error weighted by the change of the ratio of signal to noise (`even`: all alike). `forward`: Forward-Forward, each layer by the
squares of its own activations, true labels against wrong ones.
"""

import json
import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.set_num_threads(1)
WIDTH, HEADS, LAYERS, PARTS, CLASSES, PATCH, BATCH = 64, 4, 6, 3, 10, 7, 128
# A noisy embedding alone tells half of the labels at sigma = 5.4 (8 along its own axis, 1.485 sigma is the largest of nine).
SIGMA_MIN, SIGMA_MAX, P_MEAN, P_STD, OVERLAP = 0.3, 80.0, math.log(5.4), 1.0, 0.05
EULER_STEPS = 6  # of the whole chain: two a block


class Layer(nn.Module):
    """Attention and a gated sum, whose norms a condition may shift and scale."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        shifts = [torch.zeros(())] * 4 if condition is None else self.modulation(condition)[:, None].chunk(4, -1)
        b, n, _ = x.shape
        h = F.layer_norm(x, (WIDTH,)) * (1 + shifts[0]) + shifts[1]
        q, k, v = self.qkv(h).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, WIDTH))
        h = F.layer_norm(x, (WIDTH,)) * (1 + shifts[2]) + shifts[3]
        return x + self.down(F.gelu(self.up(h)))


class Net(nn.Module):
    """Patches and one token more, through some layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(17, WIDTH))
        self.token, self.noise = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def tokens(self, pictures: Tensor, extra: Tensor | None) -> Tensor:
        first = torch.zeros(len(pictures), 1, WIDTH) if extra is None else self.token(extra)[:, None]
        return torch.cat([first, self.patches(pictures)], 1) + self.places

    def forward(self, pictures: Tensor, extra: Tensor | None = None, level: Tensor | None = None) -> Tensor:
        condition = None if level is None else F.silu(self.noise(waves(level)))
        x = self.tokens(pictures, extra)
        for layer in self.layers:
            x = layer(x, condition)
        return self.head(F.layer_norm(x[:, 0], (WIDTH,)))


def waves(level: Tensor) -> Tensor:
    frequencies = torch.exp(torch.linspace(0, 5, WIDTH // 2)) * level[:, None]
    return torch.cat([frequencies.cos(), frequencies.sin()], 1)


def label_embeddings() -> Tensor:
    """Of norm sqrt(WIDTH): each coordinate has about unit variance. The same in every arm and seed."""
    rows = torch.linalg.qr(torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0)))[0].T
    return rows * math.sqrt(WIDTH)


EMBEDDINGS = label_embeddings()


class Pictures:
    def __init__(self, path: str) -> None:
        data = np.load(path)
        self.train_x, self.train_y = patches_of(data["train_x"]), torch.from_numpy(data["train_y"].astype("int64"))
        self.test_x, self.test_y = patches_of(data["test_x"]), torch.from_numpy(data["test_y"].astype("int64"))

    def batch(self, seed: int, turn: int, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.Generator().manual_seed(seed * 1_000_003 + turn * 100_003 + step)
        rows = torch.randint(len(self.train_y), (BATCH,), generator=chosen)
        return self.train_x[rows], self.train_y[rows]


def patches_of(pictures: np.ndarray) -> Tensor:
    x = torch.from_numpy(pictures.reshape(-1, 28, 28).astype("float32")) / 255
    x = (x - 0.286) / 0.353
    return x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(x), 16, PATCH * PATCH)


def train(parameters, loss_of, steps: int, turn: int, seed: int, data: Pictures, rate: float = 2e-3) -> None:
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.05)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        optimizer.zero_grad()
        loss_of(*data.batch(seed, turn, step)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def accuracy(classify, data: Pictures) -> float:
    with torch.inference_mode():
        found = [classify(x) for x in data.test_x.split(1000)]
    return float((torch.cat(found) == data.test_y).float().mean())


def from_noise(classify, data: Pictures) -> dict[str, float]:
    """Of a chain that begins with noise and so draws a label: of one draw, the label that most of nine draws have, and
    where it begins with the noise's mean."""

    def drawn(x: Tensor, seed: int) -> Tensor:
        return classify(x, torch.randn(len(x), WIDTH, generator=torch.Generator().manual_seed(seed)))

    def most(x: Tensor) -> Tensor:
        return F.one_hot(torch.stack([drawn(x, seed) for seed in range(9)]), CLASSES).sum(0).argmax(1)

    return {
        "one draw": accuracy(lambda x: drawn(x, 0), data),
        "most of nine": accuracy(most, data),
        "from the mean": accuracy(lambda x: classify(x, torch.zeros(len(x), WIDTH)), data),
    }


def whole(data: Pictures, steps: int, seed: int) -> float:
    net = Net(LAYERS)
    train(net.parameters(), lambda x, y: F.cross_entropy(net(x), y), steps, 0, seed, data)
    return accuracy(lambda x: net(x).argmax(1), data)


def own(data: Pictures, steps: int, seed: int) -> float:
    net = Net(LAYERS)
    heads = [net.head, nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)]
    size = LAYERS // PARTS

    def features(x: Tensor, part: int) -> Tensor:
        h = net.tokens(x, None)
        for layer in net.layers[: part * size]:
            h = layer(h, None)
        return h

    for part in range(PARTS):

        def loss(x: Tensor, y: Tensor, part: int = part) -> Tensor:
            if part:
                with torch.no_grad():
                    h = features(x, part)
            else:
                h = net.tokens(x, None)
            for layer in net.layers[part * size : (part + 1) * size]:
                h = layer(h, None)
            return F.cross_entropy(heads[part](F.layer_norm(h[:, 0], (WIDTH,))), y)

        moved = [*net.layers[part * size : (part + 1) * size].parameters(), *heads[part].parameters()]
        first = [*net.patches.parameters(), net.places] if part == 0 else []
        train([*moved, *first], loss, steps, part, seed, data)
    return accuracy(lambda x: heads[-1](F.layer_norm(features(x, PARTS)[:, 0], (WIDTH,))).argmax(1), data)


# DiffusionBlocks


def quantile(share: Tensor) -> Tensor:
    """Sigma below which this share of the log-normal draws lies, within its bounds."""
    normal = torch.distributions.Normal(0.0, 1.0)
    low, high = (normal.cdf(torch.tensor((math.log(s) - P_MEAN) / P_STD)) for s in (SIGMA_MIN, SIGMA_MAX))
    return torch.exp(P_MEAN + P_STD * normal.icdf(low + (high - low) * share))


def denoised(net: Net, x: Tensor, noisy: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Expected label embedding, and the logits of the labels."""
    scaled = noisy / torch.sqrt(1 + sigma[:, None] ** 2)
    logits = net(x, scaled, sigma.log() / 4)
    return logits.softmax(-1) @ EMBEDDINGS, logits


def blocks(data: Pictures, steps: int, seed: int) -> dict[str, float]:
    nets = []
    for part in range(PARTS):  # the first takes the highest noise
        net = Net(LAYERS // PARTS)
        high, low = 1 - part / PARTS, 1 - (part + 1) / PARTS
        reach = OVERLAP / PARTS
        draws = torch.Generator().manual_seed(seed * 7 + part)

        def loss(x: Tensor, y: Tensor, net: Net = net, low: float = low, high: float = high, draws=draws) -> Tensor:
            share = low - reach + (high - low + 2 * reach) * torch.rand(len(y), generator=draws)
            sigma = quantile(share.clamp(0, 1))
            noisy = EMBEDDINGS[y] + sigma[:, None] * torch.randn(len(y), WIDTH, generator=draws)
            return F.cross_entropy(denoised(net, x, noisy, sigma)[1], y)

        train(net.parameters(), loss, steps, part, seed, data)
        nets.append(net)

    def classify(x: Tensor, noise: Tensor) -> Tensor:
        edges = quantile(torch.linspace(1, 0, EULER_STEPS + 1))
        z = edges[0] * noise
        for i, (sigma, following) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            clean, logits = denoised(nets[i * PARTS // EULER_STEPS], x, z, sigma.expand(len(x)))
            z = clean + following / sigma * (z - clean)
        return logits.argmax(1)

    return from_noise(classify, data)


# NoProp-CT


def signal(t: Tensor) -> Tensor:
    """Share of the label's embedding at a time from 0 (noise) to 1; as many labels are told in its middle."""
    return torch.sigmoid(8 * (t - 0.5) - 2 * math.log(5.4))


def noprop(data: Pictures, steps: int, seed: int, is_even: bool = False) -> dict[str, float]:
    net = Net(LAYERS // PARTS)
    net.head = nn.Linear(WIDTH, WIDTH)
    draws = torch.Generator().manual_seed(seed * 7)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        t = torch.rand(len(y), generator=draws)
        share = signal(t)[:, None]
        noisy = share.sqrt() * EMBEDDINGS[y] + (1 - share).sqrt() * torch.randn(len(y), WIDTH, generator=draws)
        ratio = share[:, 0] / (1 - share[:, 0])  # exp(8 t + constant): its derivative is 8 times itself
        weight = torch.ones(()) if is_even else ratio / 0.235  # its mean over t
        return (weight * (net(x, noisy, t) - EMBEDDINGS[y]).square().mean(-1)).mean()

    train(net.parameters(), loss, PARTS * steps, 0, seed, data)

    def classify(x: Tensor, z: Tensor) -> Tensor:
        times = torch.linspace(0, 1, EULER_STEPS + 1)
        for now, later in zip(times[:-1], times[1:], strict=True):  # DDIM's step, as its ODE has it
            share, following = signal(now), signal(later)
            clean = net(x, z, now.expand(len(x)))
            noise = (z - share.sqrt() * clean) / (1 - share).sqrt()
            z = following.sqrt() * clean + (1 - following).sqrt() * noise
        return (clean @ EMBEDDINGS.T).argmax(1)

    return from_noise(classify, data)


# Forward-Forward


def forward(data: Pictures, steps: int, seed: int) -> float:
    net = Net(LAYERS)
    draws = torch.Generator().manual_seed(seed * 7)

    def normal(h: Tensor) -> Tensor:
        return h / (h.square().mean((1, 2), keepdim=True).sqrt() + 1e-6)

    def goodness(h: Tensor) -> Tensor:
        return h.square().mean((1, 2))

    def at(x: Tensor, y: Tensor, depth: int) -> Tensor:
        h = normal(net.tokens(x, EMBEDDINGS[y]))
        for layer in net.layers[:depth]:
            h = normal(layer(h, None))
        return h

    size = LAYERS // PARTS
    for part in range(PARTS):

        def loss(x: Tensor, y: Tensor, part: int = part) -> Tensor:
            wrong = (y + torch.randint(1, CLASSES, y.shape, generator=draws)) % CLASSES
            total = torch.zeros(())
            with torch.set_grad_enabled(part == 0):
                pair = at(x, y, part * size), at(x, wrong, part * size)
            for layer in net.layers[part * size : (part + 1) * size]:
                pair = tuple(layer(h, None) for h in pair)
                good, bad = map(goodness, pair)
                total = total + F.softplus(2 - good).mean() + F.softplus(bad - 2).mean()
                pair = tuple(normal(h).detach() for h in pair)
            return total

        moved = [*net.layers[part * size : (part + 1) * size].parameters()]
        first = [*net.patches.parameters(), net.places, *net.token.parameters()] if part == 0 else []
        # two passes a picture: half of the steps
        train([*moved, *first], loss, steps // 2, part, seed, data)

    def classify(x: Tensor) -> Tensor:
        scores = []
        for label in range(CLASSES):
            h, score = normal(net.tokens(x, EMBEDDINGS[label].expand(len(x), -1))), torch.zeros(len(x))
            for layer in net.layers:
                h = layer(h, None)
                score = score + goodness(h)
                h = normal(h)
            scores.append(score)
        return torch.stack(scores, 1).argmax(1)

    return accuracy(classify, data)


ARMS = {
    "whole": whole,
    "own": own,
    "blocks": blocks,
    "noprop": noprop,
    "even": partial(noprop, is_even=True),
    "forward": forward,
}

if __name__ == "__main__":
    path, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    pictures = Pictures(path)
    for seed in map(int, sys.argv[4].split(",")):
        for arm in sys.argv[5].split(","):
            torch.manual_seed(seed)
            begin = time.process_time()
            found = ARMS[arm](pictures, steps, seed)
            row = {
                "arm": arm,
                "seed": seed,
                "steps": steps,
                "accuracy": found,
                "cpu_s": round(time.process_time() - begin),
            }
            print(json.dumps(row), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
