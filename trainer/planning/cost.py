"""Cost of a run: what each worker holds and moves, its hours, the share in which workers train, and memory."""

# The share is the compute utilisation of the DiLoCo papers. DiLoCo (arXiv 2311.08105) communicates once in H steps, so
# of a round of H t seconds of training and c of communication a share H t / (H t + c) is used; Streaming DiLoCo (arXiv
# 2501.18512, figure 4) and eager updates (arXiv 2502.12996) hide c behind the next steps and lose only the excess. The
# papers count an all-reduce among datacentres; here c is the exchange of a worker with the coordinator.

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from stages.errors import ConfigError, InputError, one_of
from stages.model.block import Codes
from stages.settings import check, limits
from trainer.blocks.config import CodecName, RoundSettings, TrainingConfig
from trainer.blocks.run import OptimizerSet
from trainer.rounds.codecs import CODECS, WHOLE, Shapes, numel, parameter_shapes
from trainer.rounds.file_server import KEPT
from trainer.rounds.parts import HEAD, FeatureFormat, is_fed, passes_on
from trainer.rounds.spec import RunSpec, cut

# Passes of a layer that is only read, that a gradient goes through, and that is trained.
FORWARD, THROUGH, TRAINED = 1, 2, 3
MAX_WIDTH = 1 << 16  # of an Architecture
FP32_BYTES = 4


@dataclass(frozen=True)
class PartInventory:
    """One part, as a worker has it."""

    name: str
    shapes: Shapes  # parameters that are trained, and travel
    optimizer_bytes: int  # fp32: one moment under Muon, two under AdamW
    copied: Mapping[str, Shapes]  # published parameters of the parts that it has copies of, by name
    passes: int  # layers times passes of one step, a layer counts FORWARD, THROUGH or TRAINED
    reads: FeatureFormat | None = None  # features that the worker of the part before passes on in a round
    makes: FeatureFormat | None = None  # features that it passes on to that of the next part
    hops: int = 0  # that a step's features make from the first part to the last

    @property
    def weight_bytes(self) -> int:
        return numel(self.shapes) * FP32_BYTES

    @property
    def copied_bytes(self) -> int:
        """Copies twice: as they were fetched, for the next difference to be added, and in the modules that read."""
        # The modules of a scorer's stages have no own heads.
        fetched = sum(map(numel, self.copied.values()))
        heads = sum(
            math.prod(shape) for like in self.copied.values() for name, shape in like.items() if name.startswith(HEAD)
        )
        return (2 * fetched - heads) * FP32_BYTES


def take_inventory(config: TrainingConfig) -> tuple[PartInventory, ...]:
    """All parts of a model, made of tensors without memory, so that a model of any size may be asked for."""
    spec = RunSpec(config, Codes(config.noise.code_seed, config.architecture.code_dim), None)
    names = spec.parts
    with torch.device("meta"):
        modules = [spec.module(index) for index in range(len(names))]
    known = {name: parameter_shapes(module) for name, module in zip(names, modules, strict=True)}
    return tuple(
        PartInventory(
            name=name,
            shapes=known[name],
            optimizer_bytes=optimizer_bytes(module, config),
            copied={names[i]: known[names[i]] for i in (*before(config, index), *later(config, index))},
            passes=_passes(config, index),
            reads=FeatureFormat.of(config) if is_fed(config, index) else None,
            makes=FeatureFormat.of(config) if passes_on(config, index) else None,
            hops=sum(passes_on(config, i) for i in range(len(names))),
        )
        for index, (name, module) in enumerate(zip(names, modules, strict=True))
    )


def optimizer_bytes(module: nn.Module, config: TrainingConfig) -> int:
    muon, adamw = (
        sum(p.numel() for p in optimizer.param_groups[0]["params"])
        for optimizer in OptimizerSet(module, config).optimizers
    )
    return (muon + 2 * adamw) * FP32_BYTES


def before(config: TrainingConfig, index: int) -> range:
    """Parts that part `index` runs for their features."""
    return range(index if config.rounds.model == "scorer" and not is_fed(config, index) else 0)


def later(config: TrainingConfig, index: int) -> range:
    """Parts through whose copies part `index` looks ahead."""
    return range(index + 1, config.architecture.parts if config.rounds.model == "scorer" else index + 1)


def numbers_of(parts: Iterable[PartInventory]) -> int:
    """Parameters of a model."""
    return sum(numel(part.shapes) for part in parts)


def fit_width(config: TrainingConfig, params: float) -> TrainingConfig:
    """The same model with the width, in whole heads, that brings it nearest to `params` parameters.

    Raises ConfigError where even one head is twice too wide, or nothing is wide enough.
    """
    architecture = config.architecture

    def size(heads: int) -> int:
        return numbers_of(take_inventory(_with_heads(config, heads)))

    if params < size(1) / 2:
        raise ConfigError(
            f"{params:g} parameters are too few for {architecture.parts} blocks of {architecture.layers} layers, "
            f"which have {size(1):,} where they are least wide; give more parameters, or fewer layers"
        )
    known = range(1, MAX_WIDTH // architecture.head_dim + 1)
    above = bisect_left(known, params, key=size)
    if above == len(known):
        raise ConfigError(f"{params:g} parameters are too many for layers up to {MAX_WIDTH} wide; give more layers")
    return _with_heads(config, min(known[max(above - 1, 0) : above + 1], key=lambda heads: abs(size(heads) - params)))


def _passes(config: TrainingConfig, index: int) -> int:
    a, model = config.architecture, config.rounds.model
    if model == "ar":
        return TRAINED * a.layers * a.parts
    return a.layers * (FORWARD * len(before(config, index)) + TRAINED + THROUGH * len(later(config, index)))


def _with_heads(config: TrainingConfig, heads: int) -> TrainingConfig:
    architecture = config.architecture
    return replace(config, architecture=replace(architecture, width=heads * architecture.head_dim, heads=heads))


# Payload of a TCP packet of 1500 bytes with time stamps (RFC 9293, RFC 7323), and that packet.
SEGMENT_BYTES, PACKET_BYTES = 1448, 1500


@dataclass(frozen=True)
class WorkerTraffic:
    """Bytes of one worker without headers, as the coordinator counts them."""

    first: int  # versions 0, whole, of its part and of the parts that it has copies of
    ups: tuple[int, ...]  # its update of one round, fragment by fragment
    downs: tuple[int, ...]  # one version of each fragment after the first
    copies: tuple[int, ...]  # one refresh of each fragment of the parts that it has copies of
    rounds: int
    # Versions that it fetches of its last fragment and of each copy after the first; of the other fragments one more.
    versions: int
    features: int = 0  # features that it reads in one round
    made: int = 0  # features that it makes for the next part in one round
    hops: int = 0  # that a step's features make from the first part to the last
    last: int = 0  # by how much its last update is longer

    @property
    def up(self) -> int:
        return sum(self.ups)

    @property
    def down(self) -> int:
        return sum(self.downs)

    @property
    def up_in_all(self) -> int:
        return self.rounds * (self.up + self.made) + self.last

    @property
    def down_in_all(self) -> int:
        own = (self.versions + 1) * self.down - self.downs[-1]
        return self.first + own + self.versions * sum(self.copies) + self.rounds * self.features


def traffic_of(part: PartInventory, settings: RoundSettings) -> WorkerTraffic:
    """Traffic of a worker of `part` when every worker submits in every round and each round waits for all of them.

    settings: settled, so that `rounds` is above 0. Raises ConfigError for too many fragments.
    """
    # A worker begins round n with version n, or with version n - 1 where it does not wait. The last round ends with the
    # last fragment, whose last version nobody trains from; the other fragments are fetched once more.
    up, down = CODECS[settings.codec], settings.down_codec
    own, last = fragments_of(part.shapes, settings), CODECS[settings.up_codec(settings.rounds - 1)]
    versions = max(settings.rounds - 1 - settings.ahead, 0)
    return WorkerTraffic(
        first=sum(map(CODECS[WHOLE].size, [part.shapes, *part.copied.values()])),
        ups=tuple(map(up.size, own)),
        downs=tuple(version_bytes(like, down) for like in own),
        copies=tuple(version_bytes(f, down) for like in part.copied.values() for f in fragments_of(like, settings)),
        rounds=settings.rounds,
        versions=versions,
        features=part.reads.size if part.reads else 0,
        made=part.makes.size if part.makes else 0,
        hops=part.hops,
        last=sum(last.size(like) - up.size(like) for like in own),
    )


def version_bytes(like: Shapes, codec: CodecName) -> int:
    """One version for a worker that has the one before: as a difference, or whole if that is not more."""
    return min(CODECS[codec].size(like), CODECS[WHOLE].size(like))


def fragments_of(like: Shapes, settings: RoundSettings) -> list[Shapes]:
    """The tensors of each fragment of a part. Raises ConfigError for more fragments than tensors."""
    return [{name: like[name] for name in names} for names in cut(like, settings.fragments)]


# Segments that TCP sends before the first acknowledgement, and again after a pause (RFC 6928, RFC 5681 4.1).
FIRST_WINDOW = 10


@dataclass(frozen=True)
class WorkerLink:
    """The link between a worker and its coordinator."""

    # Megabits (10^6) a second of IP packets, towards the coordinator and from it.
    up_mbps: float = field(metadata=limits(above=0))
    down_mbps: float = field(metadata=limits(above=0))
    latency_ms: float = field(metadata=limits(least=0))  # one way

    def __post_init__(self) -> None:
        check(self)

    @property
    def round_trip_s(self) -> float:
        return 2 * self.latency_ms / 1000

    def up_s(self, payload: int) -> float:
        """Seconds until the last byte of a file of `payload` bytes has left the worker."""
        return self._sending_s(payload, self.up_mbps)

    def down_s(self, payload: int) -> float:
        """The same from the coordinator."""
        return self._sending_s(payload, self.down_mbps)

    def _sending_s(self, payload: int, mbps: float) -> float:
        """At the link's rate, and the gaps of TCP's slow start: windows of 10, 20, 40 ... segments, one a round trip,
        until they fill it (RFC 5681, 3.1)."""
        a_byte_s = 8e-6 / mbps
        # Acknowledgements travel the other way and are not counted; gRPC's own headers are less than a thousandth.
        left, window, gaps_s = payload * PACKET_BYTES / SEGMENT_BYTES, float(FIRST_WINDOW * SEGMENT_BYTES), 0.0
        whole_s = left * a_byte_s
        while left > window and window * a_byte_s < self.round_trip_s:
            gaps_s += self.round_trip_s - window * a_byte_s
            left, window = left - window, 2 * window
        return whole_s + gaps_s


# Named as in the emulated WAN; see docs/wan.md.
LINKS = {
    "lan": WorkerLink(1000, 1000, 0.25),
    "links-20": WorkerLink(100, 100, 10),
    "links-60": WorkerLink(100, 100, 30),
    "links-150": WorkerLink(100, 100, 75),
    "consumer": WorkerLink(20, 20, 20),
}


def link_of(text: str) -> WorkerLink:
    """The link of a name, or of UP,DOWN,MS. Raises InputError."""
    if text in LINKS:
        return LINKS[text]
    try:
        up, down, latency = map(float, text.split(","))
    except ValueError:
        raise InputError(
            f"no link {text!r}{one_of(text, LINKS, 'there are')}; or give Mbit/s up and down and milliseconds one way, "
            "such as 20,100,30"
        ) from None
    return WorkerLink(up, down, latency)


SUBMIT_TRIPS = 2  # round trips of an update beside its bytes: header and offset; last piece and verdict
ORDER_TRIPS = 1  # the call for the next order, and the order
FETCH_TRIPS = 1  # for each file: its name, and its first byte


@dataclass(frozen=True)
class RunTiming:
    """Seconds of one worker's run."""

    seconds: float
    round_s: float
    used: float  # share of the rounds in which it trains


def timing_of(traffic: WorkerTraffic, settings: RoundSettings, link: WorkerLink, step_s: float) -> RunTiming:
    """Timing of one worker whose local step takes `step_s` seconds."""
    # A worker that waits sends, hears of the version that has its update, and fetches it, once for each fragment. One
    # that does not wait sends beside the next steps; only its fetching is not hidden. Computing of encodings and
    # merges, and replicas of unequal speed, are left out.
    trip_s, begin_s = link.round_trip_s, (ORDER_TRIPS + FETCH_TRIPS) * link.round_trip_s
    # features of a step travel beside the next one; in each round a part begins a step after the one before it
    travel_s = max(link.down_s(traffic.features), link.up_s(traffic.made)) / settings.steps_per_round
    step_s = max(step_s, travel_s)
    training_s = settings.steps_per_round * step_s
    sending_s = sum(link.up_s(up) + SUBMIT_TRIPS * trip_s for up in traffic.ups)
    fetching_s = sum(link.down_s(down) + begin_s for down in traffic.downs)
    fetching_s += sum(link.down_s(copy) + FETCH_TRIPS * trip_s for copy in traffic.copies)
    fetching_s += traffic.hops * (step_s + 2 * travel_s + trip_s)
    together_s = training_s + fetching_s
    round_s = max(together_s, sending_s) if settings.ahead else together_s + sending_s
    first_s = link.down_s(traffic.first) + len(traffic.downs) * begin_s + len(traffic.copies) * FETCH_TRIPS * trip_s
    return RunTiming(first_s + settings.rounds * round_s, round_s, training_s / round_s)


MERGED = 3  # tensors of a part that a merge holds beside the updates: their mean, the step, and the next version


def worker_memory(part: PartInventory, traffic: WorkerTraffic, settings: RoundSettings) -> int:
    """Bytes of a worker at its peak, the end of a round, without the activations of a step."""
    # Beside the weights it holds the version that the round began with (`held` of trainer/rounds/cache.py). A lossy
    # codec adds its error feedback; a worker that does not wait adds its own last update, a base and the momentum of
    # its own updates.
    whole, lossy = part.weight_bytes, settings.codec != "fp32"
    rounds = whole * (1 + lossy + 3 * (settings.overlap != "none"))
    # Feedback: the update, the wanted and the decoded one, the rest. Saving: update, weights, payload twice.
    feedback = 4 * whole + traffic.up if lossy else 0
    encoding = max(feedback, 2 * whole + 2 * traffic.up)
    # Features of one step, decoded and encoded; those of the other steps are on the disk.
    form = part.reads
    features = form.step_bytes + form.sequences * form.positions * form.width * FP32_BYTES if form else 0
    stays = whole + part.optimizer_bytes + part.copied_bytes + features + rounds
    return stays + encoding


def coordinator_memory(
    parts: Sequence[PartInventory], traffic: Sequence[WorkerTraffic], settings: RoundSettings
) -> int:
    """Bytes of the coordinator at its peak: while the largest part is merged."""
    wholes = [part.weight_bytes for part in parts]
    versions = sum(wholes) * (1 + (settings.outer == "nesterov"))  # and its momentum
    files = KEPT["whole"] * sum(wholes)
    if settings.down_codec != "fp32":
        # The workers' weights differ from those that the optimizer steps from, and travel as differences.
        versions += sum(wholes)
        files += KEPT["difference"] * sum(each.down for each in traffic)
    merging = max(
        settings.replicas * whole + MERGED * whole + each.up for whole, each in zip(wholes, traffic, strict=True)
    )
    return versions + files + merging
