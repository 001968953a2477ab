"""Trains six small ViT layers to name classes, by backprop and by blocks, at equal layers x pictures.

`python trial_vit.py DATA OUT --steps 800 --seeds 0,1,2` appends one JSON line an arm and seed to OUT.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onesweep.stages.model.partition import NoisePartition, equal_probability
from onesweep.trainer.pictures.data import PictureSet, load_pictures

WIDTH, HEADS, PATCH, CLASSES, SIDE = 64, 4, 4, 10, 28
PATCHES = (SIDE // PATCH) ** 2
BLOCKS, LAYERS = 3, 2  # layers of one block
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0
LABEL_STD = 0.3  # of the entries of a one-hot vector of ten
WRONG_SHARE = 0.3  # of the labels that arm `wrong` shows a later block

Noisy = tuple[Tensor, Tensor]  # z (pictures, classes) and sigma (pictures,)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (pictures, tokens, WIDTH)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Net(nn.Module):
    """Patches and one token that holds a noisy label, through some layers, to the class's logits.

    Labels are one-hot: ten orthonormal vectors in more dimensions would tell a block just as much. For an ordinary
    ViT the label is zero, and the token is a learned one.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches, self.label = nn.Linear(PATCH**2, WIDTH), nn.Linear(CLASSES, WIDTH)
        self.level = nn.Sequential(nn.Linear(1, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES + 1, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def tokens(self, pictures: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
        scaled = z / (sigma**2 + LABEL_STD**2).sqrt()[:, None]
        label = self.label(scaled) + self.level(sigma.log()[:, None] / 4)
        return torch.cat([label[:, None], self.patches(pictures)], 1) + self.positions

    def forward(self, pictures: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
        """pictures: (pictures, PATCHES, PATCH**2)."""
        x = self.tokens(pictures, z, sigma)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


Draw = Callable[[Tensor, Tensor, torch.Generator], Noisy]  # pictures and labels to what a block is shown
Scores = Callable[[Tensor, torch.Generator], dict[str, Tensor]]  # pictures to logits, a row of the table each


def nothing(pictures: Tensor, labels: Tensor | None, generator: torch.Generator) -> Noisy:
    """No label at all, as for an ordinary ViT."""
    return pictures.new_zeros(len(pictures), CLASSES), pictures.new_full((len(pictures),), SIGMA_MAX)


def noisy(labels: Tensor, sigma: Tensor, generator: torch.Generator) -> Noisy:
    return F.one_hot(labels, CLASSES) + sigma[:, None] * torch.randn(len(labels), CLASSES, generator=generator), sigma


def clean(partition: NoisePartition, block: int, wrong: float = 0.0) -> Draw:
    """The true label under the noise of a block's range; a share `wrong` of the labels is another class's."""

    def draw(pictures: Tensor, labels: Tensor, generator: torch.Generator) -> Noisy:
        n = len(labels)
        is_wrong = torch.rand(n, generator=generator) < wrong
        shown = (labels + is_wrong * torch.randint(1, CLASSES, (n,), generator=generator)) % CLASSES
        return noisy(shown, partition.sample(block, torch.rand(n, generator=generator)), generator)

    return draw


def fed(partition: NoisePartition, earlier: Sequence[Net], share: float = 1.0) -> Draw:
    """What the chain of earlier blocks hands on; a share of 1 - `share` sees the true label under noise instead."""
    block = len(earlier)
    from_label = clean(partition, block)

    @torch.no_grad()
    def draw(pictures: Tensor, labels: Tensor, generator: torch.Generator) -> Noisy:
        z, sigma = from_label(pictures, labels, generator)
        is_fed = torch.rand(len(labels), generator=generator) < share
        *_, (_, handed) = chain(earlier, partition, pictures, torch.randn(len(labels), CLASSES, generator=generator))
        high = torch.full_like(sigma, partition.range(block)[0])
        return torch.where(is_fed[:, None], handed, z), torch.where(is_fed, high, sigma)

    return draw


def chain(
    blocks: Sequence[Net], partition: NoisePartition, pictures: Tensor, noise: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """One Euler step a block, from the top of its range to its bottom: its logits, and the label that it hands on."""
    z = SIGMA_MAX * noise
    for block, net in enumerate(blocks):
        high, low = partition.range(block)
        logits = net(pictures, z, z.new_full((len(z),), high))
        z = z * low / high + (1 - low / high) * logits.softmax(-1)
        yield logits, z


class Trial:
    """Data, seed and length of training, shared by all arms."""

    def __init__(self, pictures: PictureSet, options: argparse.Namespace) -> None:
        self.moments, self.options = (pictures.pixel_mean, pictures.pixel_deviation), options
        self.train, self.held = pictures.train, pictures.test if options.part == "test" else pictures.valid
        self.partition = equal_probability(BLOCKS, SIGMA_MIN, SIGMA_MAX)
        self.seed = 0

    def patched(self, pixels: Tensor) -> Tensor:
        mean, deviation = self.moments
        cut = F.unfold((pixels.float() / 255 - mean) / deviation, PATCH, stride=PATCH)
        return cut.transpose(1, 2)

    def net(self, layers: int, number: int = 0) -> Net:
        torch.manual_seed(1000 * self.seed + number)
        return Net(layers)

    def batches(self, steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same pictures in the same order for all arms of one seed."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.cat([torch.randperm(len(self.train), generator=generator) for _ in range(8)])
        for indices in order[: steps * size].split(size):
            yield self.patched(self.train.pixels[indices]), self.train.labels[indices]

    def optimizer(self, parameters: Iterator[nn.Parameter], steps: int) -> tuple[torch.optim.Optimizer, Callable]:
        """AdamW, with a warm-up over 5 % of the steps and a cosine to zero."""
        chosen = torch.optim.AdamW(parameters, self.options.rate, weight_decay=0.01)

        def factor(step: int) -> float:
            return min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))

        return chosen, torch.optim.lr_scheduler.LambdaLR(chosen, factor).step

    def learn(self, net: Net, steps: int, draw: Draw, loss: Callable = F.cross_entropy) -> Net:
        optimizer, schedule = self.optimizer(net.parameters(), steps)
        generator = torch.Generator().manual_seed(7 + self.seed)
        for pictures, labels in self.batches(steps, self.options.batch):
            z, sigma = draw(pictures, labels, generator)
            optimizer.zero_grad()
            loss(net(pictures, z, sigma), labels).backward()
            optimizer.step()
            schedule()
        return net.eval()

    @torch.no_grad()
    def measure(self, scores: Scores, most: int = 10_000) -> dict[str, float]:
        generator = torch.Generator().manual_seed(99)
        held = self.held.take(torch.arange(min(most, len(self.held))))
        right: dict[str, int] = {}
        for pixels, labels in zip(held.pixels.split(100), held.labels.split(100), strict=True):
            for name, logits in scores(self.patched(pixels), generator).items():
                right[name] = right.get(name, 0) + int((logits.argmax(-1) == labels).sum())
        return {name: count / len(held) for name, count in right.items()}

    def plain(self, layers: int) -> dict[str, float]:
        steps = self.options.steps * BLOCKS * LAYERS // layers
        net = self.learn(self.net(layers), steps, nothing)
        return self.measure(lambda pictures, generator: {"test": net(pictures, *nothing(pictures, None, generator))})

    def chain_scores(self, blocks: Sequence[Net], partition: NoisePartition, alone: bool = False) -> Scores:
        def scores(pictures: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
            noise = torch.randn(len(pictures), CLASSES, generator=generator)
            steps = enumerate(chain(blocks, partition, pictures, noise))
            found = {f"after {block + 1}": logits for block, (logits, _) in steps}
            # Without noise the chain follows the mean, with it a sample of the classes that the picture may be.
            *_, (logits, _) = chain(blocks, partition, pictures, torch.zeros_like(noise))
            found["no noise"] = logits
            if alone:
                for block in range(1, len(blocks)):
                    # A label of which nothing is known, so that the block has the picture alone.
                    high = noise.new_full((len(noise),), partition.range(block)[0])
                    found[f"alone {block + 1}"] = blocks[block](pictures, 1 / CLASSES + high[:, None] * noise, high)
            return found

        return scores

    def blocks(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Three blocks in a chain. The first is the same in all arms: it gets no estimate."""
        steps, partition = self.options.steps, self.partition
        first = self.learn(self.net(LAYERS), steps, clean(partition, 0))
        ways: dict[str, Callable[[list[Net]], Draw]] = {
            "apart": lambda earlier: clean(partition, len(earlier)),
            "fed": lambda earlier: fed(partition, earlier),
            "mixed": lambda earlier: fed(partition, earlier, 0.5),
            "wrong": lambda earlier: clean(partition, len(earlier), WRONG_SHARE),
        }
        for name, way in ways.items():
            if name in self.options.arms:
                nets = [first]
                while len(nets) < BLOCKS:
                    nets.append(self.learn(self.net(LAYERS, len(nets)), steps, way(nets)))
                yield name, self.measure(self.chain_scores(nets, partition, alone=name == "apart"))

    def recurrent(self) -> dict[str, float]:
        """Two layers that learn all noise levels, applied at the levels of BLOCKS and of 3 BLOCKS ranges."""
        whole = equal_probability(1, SIGMA_MIN, SIGMA_MAX)
        net = self.learn(self.net(LAYERS), self.options.steps * BLOCKS, clean(whole, 0))
        found = self.measure(self.chain_scores([net] * BLOCKS, self.partition))
        finer = equal_probability(3 * BLOCKS, SIGMA_MIN, SIGMA_MAX)
        nine = self.measure(self.chain_scores([net] * 3 * BLOCKS, finer), 1_000)
        return found | {"after 9 finer": nine["after 9"], "no noise finer": nine["no noise"]}

    def noprop(self) -> dict[str, float]:
        """NoProp-DT (arXiv 2503.24322): fixed one-hot embeddings, a cosine schedule, squared error, noise in each step.

        The loss's weight is one number a block, to which AdamW is blind; the head reads the largest entry of z.
        """
        alphas = [math.sin(math.pi / 2 * t / BLOCKS) ** 2 for t in range(BLOCKS + 1)]
        alphas = [min(max(alpha, 1e-5), 1 - 1e-5) for alpha in alphas]  # the product of alpha, 0 at pure noise
        sigmas = [math.sqrt((1 - alpha) / alpha) for alpha in alphas]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return (logits.softmax(-1) - F.one_hot(labels, CLASSES)).square().sum(-1).mean()

        def shown(sigma: float) -> Draw:
            return lambda _, labels, generator: noisy(labels, torch.full((len(labels),), sigma), generator)

        nets = [self.learn(self.net(LAYERS, t), self.options.steps, shown(sigmas[t]), loss) for t in range(BLOCKS)]

        def scores(pictures: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
            z = torch.randn(len(pictures), CLASSES, generator=generator)
            found = {}
            for t, net in enumerate(nets):
                before, after = alphas[t], alphas[t + 1]
                logits = net(pictures, z / math.sqrt(before), z.new_full((len(z),), sigmas[t]))
                kept = before / after
                z = (
                    math.sqrt(after) * (1 - kept) / (1 - before) * logits.softmax(-1)
                    + math.sqrt(kept) * (1 - after) / (1 - before) * z
                    + math.sqrt((1 - after) * (1 - kept) / (1 - before)) * torch.randn(z.shape, generator=generator)
                )
                found[f"after {t + 1}"] = logits
            return found | {"test": z}

        return self.measure(scores)

    def forward_forward(self) -> dict[str, float]:
        """Forward-Forward (Hinton 2022): a layer raises its goodness for true labels, lowers it for wrong ones.

        The label is the extra token. Half of a batch's passes are of wrong labels, so half as many pictures are seen.
        Goodness is the label token's mean square: over all tokens nothing is learned. The next layer sees normed tokens.
        """
        net = self.net(BLOCKS * LAYERS)
        steps = self.options.steps
        # The first layer's step moves the tables of patches, labels and positions too.
        first = [p for name, p in net.named_parameters() if not name.startswith(("layers.", "head."))]
        parts = [first + list(net.layers[0].parameters()), *(list(layer.parameters()) for layer in net.layers[1:])]
        optimizers = [self.optimizer(iter(part), steps) for part in parts]
        generator = torch.Generator().manual_seed(7 + self.seed)

        def goodness(pictures: Tensor, labels: Tensor) -> Iterator[Tensor]:
            sigma = torch.full((len(labels),), LABEL_STD)
            x = net.tokens(pictures, F.one_hot(labels, CLASSES).float(), sigma)
            for layer in net.layers:
                after = layer(x)
                yield after[:, 0].square().mean(1)
                x = F.layer_norm(after.detach(), (WIDTH,))

        for pictures, labels in self.batches(steps, self.options.batch // 2):
            other = (labels + torch.randint(1, CLASSES, labels.shape, generator=generator)) % CLASSES
            sign = torch.cat([-torch.ones(len(labels)), torch.ones(len(labels))])
            for found, (optimizer, schedule) in zip(
                goodness(torch.cat([pictures] * 2), torch.cat([labels, other])), optimizers, strict=True
            ):
                optimizer.zero_grad()
                F.softplus(sign * (found - 1.5)).mean().backward()
                optimizer.step()
                schedule()

        def scores(pictures: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
            all_classes = [pictures.new_full((len(pictures),), label, dtype=torch.long) for label in range(CLASSES)]
            each = torch.stack([torch.stack(list(goodness(pictures, one))) for one in all_classes], -1)
            # Hinton leaves out the first layer
            return {"test": each[1:].sum(0)} | {f"layer {i + 1}": layer for i, layer in enumerate(each)}

        return self.measure(scores, 2_500)  # ten passes a picture

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        arms = self.options.arms
        if set(arms) & {"apart", "fed", "mixed", "wrong"}:
            yield from self.blocks()
        one_row = {
            "six": lambda: self.plain(6),
            "two": lambda: self.plain(2),
            "noprop": self.noprop,
            "recurrent": self.recurrent,
            "forward": self.forward_forward,
        }
        for arm, found in one_row.items():
            if arm in arms:
                yield arm, found()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=800, help="steps of one block, and of six layers by backprop")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--arms", default="apart,fed,mixed,wrong,six,two,noprop,recurrent,forward")
    parser.add_argument("--part", choices=("valid", "test"), default="test")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    torch.set_num_threads(1)
    trial = Trial(load_pictures(options.data), options)
    for trial.seed in map(int, options.seeds.split(",")):
        start = time.process_time()
        for arm, found in trial.rows():
            line = {"arm": arm, "seed": trial.seed, "part": options.part, "steps": options.steps}
            line |= {"rate": options.rate, "cpu_s": round(time.process_time() - start), "accuracy": found}
            with options.out.open("a") as file:
                print(json.dumps(line), file=file)
            print(json.dumps(line), flush=True)
            start = time.process_time()


if __name__ == "__main__":
    main()
