"""Merging: which updates count, votes, the outer step."""

import math
from collections.abc import Sequence
from statistics import median

import torch

from trainer.blocks.config import RoundSettings
from trainer.rounds.codecs import Tensors, add
from trainer.rounds.store import Share, Update

MIN_NORMS = 3  # updates without which nobody can say which norm is usual
# Local steps in which training may go as far as its part is long; of what it goes, `norm_limit` times is absurd.
STEPS_A_LENGTH = 100


def wrong_round(update: Update, open_round: int, settings: RoundSettings) -> str | None:
    """A sentence about the round or version of an update; None where they are right."""
    if not 0 <= update.round <= open_round:
        return f"round {update.round} of {update.part} is not open; the open one is {open_round}"
    if not 0 <= update.base_version <= update.round:
        return (
            f"an update of round {update.round} of {update.part} cannot start from version {update.base_version}; "
            f"the newest is {open_round}"
        )
    if update.base_version < open_round - settings.max_staleness:
        return (
            f"this update starts from version {update.base_version} of {update.part}, and the newest is "
            f"{open_round}: it is more than {settings.max_staleness} rounds old; fetch the newest and go on from there"
        )
    return None


def wrong_norm(length: float, begun: float, known: Sequence[float], settings: RoundSettings) -> str | None:
    """A sentence about the norm of an update, `length`; None where it is right.

    begun: norm of the part as it began; known: norms of what was accepted before.
    """
    if not math.isfinite(length):
        return "the update has numbers that are not finite; lower the learning rates, or set bfloat16 = false"
    if len(known) >= MIN_NORMS and (usual := median(known)) > 0 and length > settings.norm_limit * usual:
        return f"the update's norm is {length:.3g}, more than {settings.norm_limit:g} times the usual {usual:.3g}"
    # the first have no usual norm to be held against, and half of the workers can raise it little by little
    most = settings.norm_limit * begun * max(1.0, settings.steps_per_round / STEPS_A_LENGTH)
    if 0 < most < length:
        return (
            f"the update's norm is {length:.3g}; {most:.3g} is the most that a part of norm {begun:.3g} may go at once"
        )
    return None


def votes(shares: Sequence[tuple[str, Share]], most: float) -> dict[str, Share]:
    """One share for each voter: several are their weighted mean, with the weight of one round's work at most."""
    # Late work counts, so a voter may have the updates of several rounds in one merge. Kept as they are, who keeps two
    # rounds back has three of five values.
    found = dict[str, list[Share]]()
    for voter, share in shares:
        found.setdefault(voter, []).append(share)
    return {
        voter: own[0] if len(own) == 1 else Share(min(sum(share.weight for share in own), most), weighted_mean(own))
        for voter, own in found.items()
    }


def weighted_mean(shares: Sequence[Share]) -> Tensors:
    """sum(weight * delta) / sum(weight) of at least one share, accumulated in float32."""
    mean = {name: torch.zeros_like(tensor) for name, tensor in shares[0].delta.items()}
    weights = sum(share.weight for share in shares)
    for share in shares:
        for name, total in mean.items():
            total.add_(share.delta[name], alpha=share.weight / weights)
    return mean


def outer_step(
    settings: RoundSettings, theta: Tensors, shares: Sequence[Share], momentum: Tensors
) -> tuple[Tensors, Tensors]:
    """The next version of a part from this one and at least one update, and the momentum then.

    The plain average of where the workers went, as federated averaging does (arXiv 1602.05629), or SGD with Nesterov
    momentum on the mean pseudo-gradient: DiLoCo (arXiv 2311.08105, algorithm 1).
    """
    gradient = weighted_mean(shares)
    if not settings.outer_momentum:
        return add(theta, gradient, -settings.outer_rate), {}
    # m <- b m + g, theta <- theta - rate (g + b m); torch.optim.SGD(nesterov=True) does the same.
    momentum = add(gradient, momentum, settings.outer_momentum) if momentum else gradient
    return add(theta, add(gradient, momentum, settings.outer_momentum), -settings.outer_rate), momentum
