"""Training of experts: balanced clusters of the pictures, a net for each, and the router net."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.checkpoint.manifest import Manifest
from stages.errors import ConfigError, DataError
from stages.model.partition import NoisePartition, equal_probability
from stages.model.randomness import Purpose, uniforms
from stages.pictures.experts import RouterNet
from stages.pictures.part import DATA_STD
from trainer.blocks.checkpoint_dir import open_checkpoint_dir
from trainer.blocks.run import StepLoss
from trainer.blocks.train import is_trained
from trainer.pictures.data import LabelledPictures, PictureSet
from trainer.pictures.training import PictureConfig, PictureTask, new_picture_manifest, new_picture_part, train_parts

# Of an expert's steps, for the router net: with one layer and so few answers it learns sooner.
ROUTER_SHARE = 0.25
ROUNDS, SWEEPS = 30, 8  # of k-means, and over the prices in each


@dataclass(frozen=True)
class Clusters:
    """Balanced k-means: a picture belongs to the centre that is nearest once the centres' prices are taken off.

    Prices make the clusters equally large, so that experts of equal training see each picture equally often.
    """

    # All numbers are whole and below 2^53, where float64 is exact: experts that are trained on different machines, and
    # never talk, come to the same clusters whatever order their machines add in.
    centres: NDArray[np.float64]  # (experts, numbers)
    prices: NDArray[np.float64]  # (experts,)
    patch: int

    def of(self, pixels: Tensor) -> Tensor:
        """The cluster of each picture, (pictures,) int64. pixels: (pictures, channels, height, width) uint8."""
        costs = _distances(brightness(pixels, self.patch), self.centres) - self.prices
        return torch.from_numpy(costs.argmin(1))


def brightness(pixels: Tensor, patch: int) -> NDArray[np.float64]:
    """Sum over each patch of each channel, (pictures, numbers): what the clusters are made of."""
    n, channels, height, width = pixels.shape
    found = pixels.view(n, channels, height // patch, patch, width // patch, patch).sum((3, 5), dtype=torch.int64)
    return found.flatten(1).double().numpy()


def balanced_clusters(pixels: Tensor, experts: int, patch: int, seed: int) -> tuple[Clusters, Tensor]:
    """Clusters, and that of each picture, (pictures,) int64: their sizes differ by one at most. A pure function of its
    arguments."""
    numbers = brightness(pixels, patch)
    centres = _first_centres(numbers, experts, seed)
    for _ in range(ROUNDS):
        _, assigned = _share_out(_distances(numbers, centres))
        before, centres = centres, np.stack([np.rint(numbers[assigned == k].mean(0)) for k in range(experts)])
        if np.array_equal(before, centres):
            break
    prices, assigned = _share_out(_distances(numbers, centres))
    return Clusters(centres, prices, patch), torch.from_numpy(assigned)


def _first_centres(numbers: NDArray[np.float64], experts: int, seed: int) -> NDArray[np.float64]:
    """k-means++: pictures drawn in proportion to their squared distance from those drawn before."""
    draws = uniforms(seed, Purpose.WINDOWS, 0, experts, 1)[:, 0]
    chosen = [int(draws[0] * (len(numbers) - 1))]
    for draw in draws[1:]:
        sums = _distances(numbers, numbers[chosen]).min(1).cumsum()
        chosen.append(int(np.searchsorted(sums, draw * sums[-1])))
    return numbers[chosen]


def _distances(numbers: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared distances (pictures, experts)."""
    return (numbers**2).sum(1)[:, None] - 2 * numbers @ centres.T + (centres**2).sum(1)


def _share_out(distances: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Prices (experts,) and the cluster of each picture: the least sum of distances among equally large clusters.

    Each price in turn is set so that its centre wins its share of the pictures (the assignment problem's dual, one
    coordinate after the other).
    """
    n, experts = distances.shape
    sizes = [n // experts + (k < n % experts) for k in range(experts)]
    prices = np.zeros(experts)
    for _ in range(SWEEPS):
        for k in range(experts):
            losses = np.sort(distances[:, k] - np.delete(distances - prices, k, axis=1).min(1))
            # half-way between the last picture that it wins and the first that it does not
            prices[k] = (losses[sizes[k] - 1] + losses[min(sizes[k], n - 1)]) // 2
    costs = distances - prices
    # A few pictures are left over, those at the border and ties: who would lose most by another place chooses first.
    ordered = np.sort(costs, axis=1)
    wishes, assigned, room = costs.argsort(1, kind="stable"), np.empty(n, dtype=np.int64), sizes
    for picture in (ordered[:, 0] - ordered[:, 1]).argsort(kind="stable").tolist():
        assigned[picture] = next(k for k in wishes[picture].tolist() if room[k])
        room[assigned[picture]] -= 1
    return prices, assigned


class RouterTask(PictureTask):
    """The router net, which learns by cross-entropy the cluster that a noisy picture comes from."""

    def __init__(
        self,
        net: RouterNet,
        partition: NoisePartition,
        pictures: PictureSet,
        config: PictureConfig,
        assigned: Tensor,
        clusters: Clusters,
    ) -> None:
        """:param assigned: the cluster of each training picture."""
        super().__init__("router-net", net, net.architecture, partition, 0, pictures, config)
        self.assigned, self.held_out = assigned, clusters.of(pictures.valid.pixels)

    def loss(self, step: int) -> StepLoss:
        loss = super().loss(step).total
        return StepLoss(loss, {"router_nats": loss.detach()})

    def evaluate(self) -> dict[str, float]:
        """The cross-entropy on validation pictures, in nats."""
        return {"valid_router_nats": super().evaluate()["valid_denoise_loss"]}

    def _loss(
        self, pictures: LabelledPictures, chosen: Tensor, generator: torch.Generator, drop_class: float
    ) -> Tensor:
        _, z, sigma, classes = self._noised(pictures.take(chosen), generator, drop_class)
        scaled = z / (sigma**2 + DATA_STD**2).sqrt()[:, None, None]
        wanted = self.assigned if pictures is self.pictures.train else self.held_out
        return F.cross_entropy(self.module(scaled, sigma, classes), wanted[chosen])


def train_experts(
    config: PictureConfig,
    pictures: PictureSet,
    out: Path,
    only: int | None = None,
    start: Path | None = None,
) -> Manifest:
    """Train experts and their router net into the checkpoint `out`, one in memory at a time, skipping those done.

    `only` picks one; the router net's number is the one after the last expert's. `start` is as for a chain's blocks.
    `config.steps` are those of an undivided net of `config.parts` x `config.layers` layers, which is trained as much.
    """
    experts = config.experts
    if len(pictures.train) < experts:
        raise DataError(f"{len(pictures.train)} training pictures cannot be shared out to {experts} experts")
    architecture = config.architecture(pictures, experts)
    if only is not None and not 0 <= only <= architecture.parts:
        raise ConfigError(
            f"there is no expert {only}: there are experts 0 to {architecture.parts - 1}, and {architecture.parts} is "
            "their router net"
        )
    # Experts and router net then train as many layers x pictures as the undivided net.
    whole = config.steps * config.parts * config.layers
    config = replace(config, steps=round(whole / (experts * config.layers + ROUTER_SHARE)))
    # All noise in one range, without a margin beyond its ends, as of an undivided net.
    partition = equal_probability(1, config.sigma_min, config.sigma_max, overlap=0.0)
    manifest = open_checkpoint_dir(
        out, new_picture_manifest("experts", architecture, partition, config, pictures, start)
    )
    clusters, assigned = balanced_clusters(pictures.train.pixels, experts, config.patch, config.seed)
    for index in range(architecture.parts + 1) if only is None else [only]:
        is_router = index == architecture.parts
        name = "router-net" if is_router else f"expert-{index}"
        if is_trained(out, manifest, index, name):
            continue
        if is_router:
            torch.manual_seed(config.seed + index)
            net = RouterNet(architecture)
            settings = replace(config, steps=round(config.steps * ROUTER_SHARE))
            router_task = RouterTask(net, partition, pictures, settings, assigned, clusters)
            manifest = train_parts(router_task, settings, out, manifest, [net])
        else:
            own = replace(config, seed=config.seed + index)  # experts would else see the same noise
            part = new_picture_part(architecture, index, "experts", own.seed, start)
            mine = _of_cluster(pictures, clusters, assigned, index)
            task = PictureTask(name, part, architecture, partition, 0, mine, own)
            manifest = train_parts(task, own, out, manifest, [part])
    return manifest


def _of_cluster(pictures: PictureSet, clusters: Clusters, assigned: Tensor, cluster: int) -> PictureSet:
    """The pictures that one expert learns. Where none of the validation pictures is its own, it is measured on all."""
    held_out = (clusters.of(pictures.valid.pixels) == cluster).nonzero()[:, 0]
    return replace(
        pictures,
        train=pictures.train.take((assigned == cluster).nonzero()[:, 0]),
        valid=pictures.valid.take(held_out) if len(held_out) else pictures.valid,
    )
