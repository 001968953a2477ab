"""Inventory of each worker: the tensors of its part and of its copies, counted on the meta device."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from stages.errors import ConfigError
from stages.model.block import Codes
from trainer.blocks.config import CodecName, RoundSettings, TrainingConfig
from trainer.blocks.run import OptimizerSet
from trainer.rounds.codecs import CODECS, WHOLE, Shapes, numel, parameter_shapes
from trainer.rounds.parts import HEAD, FeatureFormat, is_fed, passes_on
from trainer.rounds.spec import RunSpec, cut
from trainer.rounds.transfer import PIECE_BYTES, pieces
from trainer.v1 import rounds_pb2

# Passes of a layer that is only read, that a gradient goes through, and that is trained.
FORWARD, THROUGH, TRAINED = 1, 2, 3
FITTED = (1, 2, 3)  # heads of the small models whose sizes tell how a model grows with its width
MAX_WIDTH = 1 << 20
FP32_BYTES = 4


@dataclass(frozen=True)
class PartInventory:
    """One part, as a worker has it."""

    name: str
    shapes: Shapes  # parameters that are trained, and travel
    trained_bytes: int  # weights, gradients and optimizer state
    copied: Mapping[str, Shapes]  # published parameters of the parts that it has copies of, by name
    passes: int  # layers times passes of one step, a layer counts FORWARD, THROUGH or TRAINED
    reads: FeatureFormat | None = None  # features that the worker of the part before passes on in a round
    makes: FeatureFormat | None = None  # features that it passes on to that of the next part
    hops: int = 0  # that a step's features make from the first part to the last

    @property
    def weight_bytes(self) -> int:
        return numel(self.shapes) * FP32_BYTES

    @property
    def optimizer_bytes(self) -> int:
        """One moment under Muon, two under AdamW."""
        return self.trained_bytes - 2 * self.weight_bytes

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
            trained_bytes=trained_bytes(module, config),
            copied={names[i]: known[names[i]] for i in (*before(config, index), *later(config, index))},
            passes=_passes(config, index),
            reads=FeatureFormat.of(config) if is_fed(config, index) else None,
            makes=FeatureFormat.of(config) if passes_on(config, index) else None,
            hops=sum(passes_on(config, i) for i in range(len(names))),
        )
        for index, (name, module) in enumerate(zip(names, modules, strict=True))
    )


def trained_bytes(module: nn.Module, config: TrainingConfig) -> int:
    """Weights and gradients once, one moment under Muon and two under AdamW: all fp32."""
    muon, adamw = (
        sum(p.numel() for p in optimizer.param_groups[0]["params"])
        for optimizer in OptimizerSet(module, config).optimizers
    )
    return (3 * muon + 4 * adamw) * FP32_BYTES


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
    sizes = [numbers_of(take_inventory(_with_heads(config, heads))) for heads in FITTED]
    # parameters are a polynomial of degree two in the width: three sizes tell all others
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / 2
    linear = sizes[1] - sizes[0] - 3 * square
    constant = sizes[0] - linear - square
    if params < sizes[0] / 2:
        raise ConfigError(
            f"{params:g} parameters are too few for {architecture.parts} blocks of {architecture.layers} layers, "
            f"which have {sizes[0]:,} where they are least wide; give more parameters, or fewer layers"
        )
    root = math.sqrt(linear**2 + 4 * square * max(params - constant, 0.0))
    exact = max((root - linear) / (2 * square), 1.0)
    low, high = int(exact), int(exact) + 1
    heads = min((low, high), key=lambda n: abs(constant + linear * n + square * n * n - params))
    if heads * architecture.head_dim > MAX_WIDTH:
        raise ConfigError(f"{params:g} parameters are too many for layers up to {MAX_WIDTH} wide; give more layers")
    return _with_heads(config, heads)


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
HTTP_FRAME_BYTES, HTTP_HEADER_BYTES = 16384, 9  # RFC 9113, 4.1 and 4.2: the default frame size
GRPC_HEADER_BYTES = 5  # a flag and a length before each message (gRPC over HTTP/2)


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
        """Its update of one round."""
        return sum(self.ups)

    @property
    def down(self) -> int:
        """One version of its part."""
        return sum(self.downs)

    @property
    def up_in_all(self) -> int:
        return self.rounds * (self.up + self.made) + self.last

    @property
    def fetched(self) -> tuple[int, ...]:
        """Versions that it fetches of each fragment after the first."""
        return (*[self.versions + 1] * (len(self.downs) - 1), self.versions)

    @property
    def down_in_all(self) -> int:
        own = sum(count * size for count, size in zip(self.fetched, self.downs, strict=True))
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


def wire_bytes(payload: int) -> float:
    """Bytes on the link for a file of `payload` bytes: pieces in gRPC messages, HTTP/2 frames and TCP segments."""
    # Acknowledgements travel the other way and are not counted.
    whole, rest = divmod(payload, PIECE_BYTES)
    framed = (whole * _framed(PIECE_BYTES) if whole else 0) + (_framed(rest) if rest else 0)
    return framed * PACKET_BYTES / SEGMENT_BYTES


def _framed(size: int) -> int:
    (piece,) = pieces(bytes(size))
    message = rounds_pb2.SubmitRequest(piece=piece).ByteSize() + GRPC_HEADER_BYTES
    return message + HTTP_HEADER_BYTES * -(-message // HTTP_FRAME_BYTES)
