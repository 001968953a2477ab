"""Merging: checks of updates, votes and the outer step; scores on held-out text, and the voters' records."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import torch

from stages.errors import DataError
from trainer.blocks.config import RoundSettings
from trainer.blocks.data import Corpus
from trainer.rounds.codecs import Tensors, add, load
from trainer.rounds.parts import PartTask, load_copies
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Share, Update

MIN_NORMS = 3  # updates needed to know the usual norm
# Local steps in which training may move a part by its own norm; `norm_limit` times that is absurd.
STEPS_PER_NORM = 100


def round_problem(update: Update, open_round: int, settings: RoundSettings) -> str | None:
    """A sentence about a wrong round or version of an update; None if they are right."""
    if not 0 <= update.round <= open_round:
        return f"round {update.round} of {update.part} is not open; the open round is {open_round}"
    if not 0 <= update.base_version <= update.round:
        return (
            f"an update of round {update.round} of {update.part} must start from a version up to {update.round}, "
            f"not {update.base_version}"
        )
    if update.base_version < open_round - settings.max_staleness:
        return (
            f"this update starts from version {update.base_version} of {update.part}, more than "
            f"{settings.max_staleness} rounds behind the newest, {open_round}; fetch that and continue from it"
        )
    return None


def norm_problem(length: float, begun: float, known: Sequence[float], settings: RoundSettings) -> str | None:
    """A sentence about a wrong norm `length` of an update; None if it is right.

    begun: the part's initial norm; known: norms of the updates accepted before.
    """
    if not math.isfinite(length):
        return "the update has non-finite numbers; lower the learning rates, or set bfloat16 = false"
    if len(known) >= MIN_NORMS and (usual := median(known)) > 0 and length > settings.norm_limit * usual:
        return f"the update's norm is {length:.3g}, more than {settings.norm_limit:g} times the usual {usual:.3g}"
    # the first updates have no usual norm to compare with, and half of the workers can raise it little by little
    most = settings.norm_limit * begun * max(1.0, settings.steps_per_round / STEPS_PER_NORM)
    if 0 < most < length:
        return f"the update's norm is {length:.3g}; a part of norm {begun:.3g} may move by at most {most:.3g} at once"
    return None


def votes(shares: Sequence[tuple[str, Share]], most: float) -> dict[str, Share]:
    """One share per voter: several become their weighted mean, with at most the weight of one round's work."""
    # Late work counts, so a voter may have updates of several rounds in one merge. Kept separate, a voter that holds
    # two rounds back would have three of five values.
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
    """The next version of a part from this one and at least one update, with the new momentum.

    The plain average of the workers' weights, as in federated averaging (arXiv 1602.05629), or SGD with Nesterov
    momentum on the mean pseudo-gradient: DiLoCo (arXiv 2311.08105, algorithm 1).
    """
    gradient = weighted_mean(shares)
    if not settings.outer_momentum:
        return add(theta, gradient, -settings.outer_rate), {}
    # m <- b m + g, theta <- theta - rate (g + b m); torch.optim.SGD(nesterov=True) does the same.
    momentum = add(gradient, momentum, settings.outer_momentum) if momentum else gradient
    return add(theta, add(gradient, momentum, settings.outer_momentum), -settings.outer_rate), momentum


# Scores: updates are measured on held-out text before they are merged.
# The score is the reduction of the held-out loss, as in Gauntlet (arXiv 2505.21684). No rule that compares updates with
# each other can defend one of two workers, or one of three against two: only text shows which one is wrong.

Loss = Callable[[Tensors], Sequence[float]]  # nats of a part's weights, on the same batches for any weights

BATCHES = 8  # of a worker's batch size; a merge of M voters takes at most 3 M times as many forward passes
WINDOWS = 16  # least windows of held-out text: a worker that knows them could memorize fewer
MARGIN = 3.0  # standard errors within which a difference proves nothing
# Share of the others' gain that a voter may cost: the longest step is often best for a round, the mean for a run.
SLACK = 0.1
# Merges after which a voter has its full weight: before, this many newcomers together weigh as much as one worker.
FULL_RECORD = 10
MAX_STRIKES = 3  # consecutive rounds in which a voter's work was harmful beyond doubt and another's was not


@dataclass(frozen=True)
class UpdateScore:
    """The score of one voter's work in one merge."""

    nats: float | None  # reduction of the held-out loss by its share; None if not finite
    error: float  # standard error of that, in nats
    kept: bool
    harmful: bool

    def __str__(self) -> str:
        if self.nats is None:
            return "it makes the loss on held-out text non-finite"
        return f"it changes the loss on held-out text by {-self.nats:+.4f} ± {self.error:.4f} nats"


class HeldOut:
    """Held-out loss of a part: its workers' training loss, on validation text. For one thread."""

    def __init__(self, spec: RunSpec, corpus: Corpus, weights: Callable[..., Tensors], seed: int) -> None:
        """:param weights: returns any part's weights, the newest or those at a round's start.

        :param seed: selects the batches; workers must not know it. Raises DataError for too little text.
        """
        length = spec.config.architecture.context_length + 1
        if len(corpus.valid) < WINDOWS * length:
            raise DataError(
                f"{corpus.name}: robust = scored needs {WINDOWS} windows of {length} {corpus.noun} of validation text, "
                f"but there are only {len(corpus.valid)} {corpus.noun}: give the coordinator more --data, or set "
                "robust = none"
            )
        rounds = replace(spec.config.rounds, context_by="copies")  # the coordinator has all parts: it needs no features
        self.spec, self.weights, self.seed = replace(spec, config=replace(spec.config, rounds=rounds)), weights, seed
        self.text = replace(corpus, train=corpus.valid)
        self.tasks: dict[str, PartTask] = {}

    def __call__(self, part: str, round_: int) -> Loss:
        """The loss that judges a merge of that round."""
        if (task := self.tasks.get(part)) is None:
            task = self.tasks[part] = self.spec.task(self.spec.parts.index(part), self.text, self.seed)
        # Workers began the round with the other parts of that time. Combined with parts that have already closed the
        # round, honest work of a pipeline raises the loss, because these were trained to fit its old weights.
        load_copies(task, {name: self.weights(name, at_start_of=part) for name in task.copies})

        def measure(weights: Tensors) -> list[float]:
            load(task.module, weights)
            with torch.no_grad():
                return [float(task.loss(round_ * BATCHES + i).total) for i in range(BATCHES)]

        return measure


class Reputation:
    """Records of one part's voters, made only from the log, so that a restart restores them."""

    def __init__(self) -> None:
        self.merged: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()
        self.expelled = set[str]()

    def weight(self, voter: str) -> float:
        """Factor on the weight of a voter's updates."""
        return min(self.merged[voter] + 1, FULL_RECORD) / FULL_RECORD

    def take(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """:param scores: one closed round's scores, from the log."""
        for voter, score in scores.items():
            # lost at once and earned slowly: a voter that harms at times has little weight when text is inconclusive
            self.merged[voter] = 0 if score["harmful"] else self.merged[voter] + score["kept"]
            self.strikes[voter] = self.strikes[voter] + 1 if score["harmful"] else 0
            if self.strikes[voter] >= MAX_STRIKES:
                self.expelled.add(voter)


def admit(
    theta: Tensors,
    shares: Mapping[str, Share],
    step: Callable[[Sequence[Share]], Tensors],
    loss: Loss,
    trust: Callable[[str], float],
) -> dict[str, UpdateScore]:
    """Score each voter's share of a merge, and decide whether to keep it.

    :param step: makes the next version from some shares; trust: 0 to 1.
    """
    # Try a share at its weight in the merge: at full length an honest one often raises the loss, and only the mean of
    # several lowers it.
    before, total = loss(theta), sum(share.weight for share in shares.values())
    alone = {v: loss(add(theta, s.delta, -s.weight / total)) for v, s in shares.items()}
    gains = {v: [a - b for a, b in zip(before, after, strict=True)] for v, after in alone.items()}
    # Only voters with a record get the benefit of the doubt: many newcomers, each a little harmful, would cost nothing.
    kept = sorted((v for v in gains if _bound(gains[v], MARGIN * trust(v)) > 0), key=lambda v: fmean(gains[v]))

    def measured(voters: Sequence[str]) -> Sequence[float]:
        return loss(step([shares[voter] for voter in voters])) if voters else before

    # A share that helps by itself can still make the others' step too long or turn it; then the merge is better without
    # it. Starting with one share and adding others tries that one at full length, and lost a quarter of honest work.
    found, rests = measured(kept), {voter: measured([v for v in kept if v != voter]) for voter in kept}
    for voter in sorted(rests, key=lambda v: (math.isnan(mean := fmean(rests[v])), mean)):
        others = [other for other in kept if other != voter]
        rest = rests[voter] if len(kept) == len(rests) else measured(others)
        if _bound([a - b + SLACK * (c - a) for a, b, c in zip(rest, found, before, strict=True)]) > 0:
            break
        kept, found = others, rest
    any_helped = any(-_bound([-nats for nats in gain]) > 0 for gain in gains.values())
    return {v: UpdateScore(*_mean(gain), v in kept, any_helped and not _bound(gain) > 0) for v, gain in gains.items()}


def _mean(gains: Sequence[float]) -> tuple[float | None, float]:
    """Mean and its standard error; None if a gain is not finite."""
    if not all(map(math.isfinite, gains)):
        return None, 0.0
    return fmean(gains), stdev(gains) / math.sqrt(len(gains))


def _bound(gains: Sequence[float], doubt: float = MARGIN) -> float:
    """Mean gain that paired batches do not rule out, within `doubt` errors; NaN if a gain is not finite."""
    mean, error = _mean(gains)
    return math.nan if mean is None else mean + doubt * error
