"""A part's tensors by name: simple arithmetic, and codecs, with error feedback upwards and version differences down."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import CodecError
from stages.model.codec import Int8
from trainer.blocks.config import SPARSE, CodecName, RoundSettings

WHOLE: CodecName = "fp32"  # codec of a version sent whole, to a worker without an earlier one
E3M0_GROUP = 128
E3M0_VALUES = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
E3M0_BOUNDARIES = (E3M0_VALUES[1:] + E3M0_VALUES[:-1]) / 2
E3M0_SIGN = 8
TOP_SHARE = 256

Raw = NDArray[np.uint8]
Tensors = dict[str, Tensor]  # float32 tensors of one part, by parameter name
Shapes = dict[str, tuple[int, ...]]


def trainable(module: nn.Module) -> Tensors:
    """A copy of a module's trainable parameters in float32 on the CPU."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names, on any device."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


@torch.no_grad()
def share(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make a frozen module use these very tensors, if they are on its device. Nothing may change them."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].data = tensor.to(parameters[name].device)


def shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """Shapes by name, which a codec needs to decode."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def add(a: Tensors, b: Tensors, share: float = 1.0) -> Tensors:
    """a + share * b."""
    return {name: tensor + share * b[name] for name, tensor in a.items()}


def subtract(a: Tensors, b: Tensors) -> Tensors:
    return {name: tensor - b[name] for name, tensor in a.items()}


def scale(tensors: Tensors, factor: float) -> Tensors:
    return {name: factor * tensor for name, tensor in tensors.items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, summed in float64; not finite if they are not."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


class TensorCodec(ABC):
    """Encodes tensors in the order of their sorted names, one after the other, with nothing in between."""

    name: str

    def size(self, like: Shapes) -> int:
        """Exact bytes of tensors of these shapes."""
        return sum(self.tensor_size(shape) for shape in like.values())

    def encode(self, tensors: Tensors) -> bytes:
        """Raises CodecError if a number is not finite."""
        written = []
        for name in sorted(tensors):
            values = tensors[name].detach().to("cpu", torch.float32).contiguous()
            if not bool(values.isfinite().all()):
                raise CodecError(f"{name} has non-finite numbers, which cannot be sent")
            written.append(self.write(values))
        return b"".join(written)

    def decode(self, data: bytes | memoryview, like: Shapes) -> Tensors:
        """Raises CodecError, before allocating anything, unless `data` has `size(like)` bytes; also for wrong codes."""
        if len(data) != (size := self.size(like)):
            raise CodecError(f"got {len(data)} bytes of {self.name}, but these tensors need {size}")
        raw, offset, tensors = np.frombuffer(data, dtype=np.uint8), 0, dict[str, Tensor]()
        for name in sorted(like):
            end = offset + self.tensor_size(like[name])
            tensors[name] = self.read(raw[offset:end], like[name])
            offset = end
        return tensors

    @abstractmethod
    def tensor_size(self, shape: tuple[int, ...]) -> int:
        """Bytes of one tensor."""

    @abstractmethod
    def write(self, values: Tensor) -> bytes: ...

    @abstractmethod
    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor: ...


class Fp32Codec(TensorCodec):
    name = "fp32"

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)

    def write(self, values: Tensor) -> bytes:
        return _float_bytes(values)

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        return _floats(raw).reshape(shape)


class RowInt8Codec(TensorCodec):
    """One byte per number, and a float32 scale per row of a matrix, or one for a tensor of lower rank: `Int8`'s."""

    name = "int8"
    rows = Int8()

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return self.rows.size(*_matrix(shape))

    def write(self, values: Tensor) -> bytes:
        return self.rows.encode(values.reshape(_matrix(tuple(values.shape))))

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        return self.rows.decode(raw.tobytes(), *_matrix(shape), torch.finfo(torch.float32).max).reshape(shape)


class E3M0Codec(TensorCodec):
    """A sign and three exponent bits per number, one float32 scale per 128 numbers."""

    # The format of Streaming DiLoCo's outer gradients (arXiv 2501.18512), whose paper does not give the scaling: here
    # the largest of a group is 1, the values are 0 and plus or minus 1, 1/2, ... 1/64 of it, and each number rounds to
    # the nearest. A tensor is the scales of its groups, then two numbers a byte, the first in the lower half.

    name = "e3m0"

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * _groups(shape, E3M0_GROUP) + -(-math.prod(shape) // 2)

    def write(self, values: Tensor) -> bytes:
        flat = values.reshape(-1)
        groups = _padded(flat, E3M0_GROUP)
        scales = groups.abs().amax(dim=1) if len(groups) else groups.new_zeros(0)
        relative = groups / torch.where(scales > 0, scales, 1.0)[:, None]
        exponents = torch.bucketize(relative.abs(), E3M0_BOUNDARIES)
        codes = (exponents + E3M0_SIGN * ((relative < 0) & (exponents > 0))).reshape(-1)[: len(flat)]
        pairs = _padded(codes, 2)
        return _float_bytes(scales) + (pairs[:, 0] + 16 * pairs[:, 1]).to(torch.uint8).numpy().tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        split, total = 4 * _groups(shape, E3M0_GROUP), math.prod(shape)
        pairs = torch.from_numpy(raw[split:].astype(np.int64))
        codes = torch.stack([pairs % 16, pairs // 16], dim=1).reshape(-1)[:total]
        values = torch.cat([E3M0_VALUES, -E3M0_VALUES])[codes]
        return (values * _floats(raw[:split]).repeat_interleave(E3M0_GROUP)[:total]).reshape(shape)


class TopCodec(TensorCodec):
    """The largest absolute value of each `group` numbers; the others are 0."""

    # A group's code is 0 if all of it is 0, else it gives the position of the largest, one of a few levels, and the
    # sign. The levels of 256 such numbers are means over equally many of them, sorted by size. A tensor is its
    # levels, then its codes, the lowest bit first.

    def __init__(self, name: CodecName, group: int, levels: int) -> None:
        self.name, self.group, self.levels = name, group, levels
        self.max_code = 2 * levels * group  # the highest code
        self.width = self.max_code.bit_length()

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        kept = _groups(shape, self.group)
        return 4 * self.levels * -(-kept // TOP_SHARE) + -(-kept * self.width // 8)

    def write(self, values: Tensor) -> bytes:
        groups = _padded(values.reshape(-1), self.group)
        places = groups.abs().argmax(dim=1, keepdim=True) if len(groups) else torch.zeros(0, 1, dtype=torch.int64)
        chosen = _padded(groups.gather(1, places)[:, 0], TOP_SHARE)
        sizes = chosen.abs()
        counts = (sizes > 0).sum(dim=1, keepdim=True).clamp(min=1)
        ranks = sizes.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        levels = torch.where(sizes > 0, 1 + ranks * self.levels // counts, 0)
        sums = torch.zeros(len(sizes), self.levels + 1).scatter_add_(1, levels, sizes)
        means = sums / torch.zeros_like(sums).scatter_add_(1, levels, torch.ones_like(sizes)).clamp(min=1)
        codes = (2 * levels - (chosen >= 0).long()).reshape(-1)[: len(places)]
        codes = torch.where(codes > 0, codes + 2 * self.levels * places[:, 0], 0)
        bits = codes.numpy()[:, None] >> np.arange(self.width) & 1
        return _float_bytes(means[:, 1:]) + np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        kept = _groups(shape, self.group)
        split = 4 * self.levels * -(-kept // TOP_SHARE)
        means = F.pad(_floats(raw[:split]).reshape(-1, self.levels), (1, 0))
        bits = np.unpackbits(raw[split:], count=kept * self.width, bitorder="little").reshape(kept, self.width)
        codes = torch.from_numpy(bits @ (1 << np.arange(self.width)))
        if len(codes) and int(codes.max()) > self.max_code:
            raise CodecError(f"{self.name} has no code {int(codes.max())}; the highest is {self.max_code}")
        places, rest = (codes - 1).clamp(min=0) // (2 * self.levels), (codes - 1) % (2 * self.levels)
        levels = torch.where(codes > 0, rest // 2 + 1, 0)
        sizes = means.gather(1, _padded(levels, TOP_SHARE)).reshape(-1)[:kept]
        groups = torch.zeros(kept, self.group)
        groups.scatter_(1, places[:, None], torch.where(rest % 2 > 0, -sizes, sizes)[:, None])
        return groups.reshape(-1)[: math.prod(shape)].reshape(shape)


CODECS: dict[CodecName, TensorCodec] = {
    "fp32": Fp32Codec(),
    "int8": RowInt8Codec(),
    "e3m0": E3M0Codec(),
    "top7": TopCodec("top7", group=7, levels=2),
    "top32": TopCodec("top32", group=32, levels=3),
}


def with_feedback(settings: RoundSettings, delta: Tensors, carried: Tensors, round_: int) -> tuple[bytes, Tensors]:
    """The payload of a round's update plus everything left out before, and the remainder left out now.

    :param carried: the earlier remainder; a sparse codec's is in `delta`, because it stays in the worker's weights.
    """
    # Rounding errors are added to the next update (arXiv 1901.09847). A sparse codec leaves most numbers out for tens
    # of rounds: a worker that started each round from the common weights would repeat the same progress and send it
    # many times. So that remainder stays in the worker's weights (docs/research/rounds.md#bytes).
    codec = CODECS[settings.up_codec(round_)]
    intended = add(delta, carried) if carried and settings.codec not in SPARSE else delta
    payload = codec.encode(intended)
    if codec.name != WHOLE:
        carried = subtract(intended, codec.decode(payload, shapes(delta)))
    return payload, carried


def publish(weights: Tensors, public: Tensors, codec: CodecName) -> tuple[Tensors, bytes]:
    """The weights that workers get next, and the difference that leads there; (weights, b"") for `fp32`."""
    # The difference starts from the weights that workers have, not from the previous version, so that the rounding
    # error of one version is in the next: error feedback without its own state.
    if codec == WHOLE:
        return weights, b""
    difference = CODECS[codec].encode(subtract(weights, public))
    return receive(public, difference, codec), difference


def receive(public: Tensors, difference: bytes, codec: CodecName) -> Tensors:
    """The next public weights, on the worker's side. Raises CodecError for another size."""
    return add(public, CODECS[codec].decode(difference, shapes(public)))


def route(
    held: int | None, newest: int, difference: Callable[[int], bytes | None], weights: Tensors
) -> dict[int, bytes]:
    """Differences, by number, from the held version to the newest; none if one is missing or the whole is smaller."""
    if held is None or not 0 <= newest - held <= newest:
        return {}
    found = dict[int, bytes]()
    for number in range(newest, held, -1):
        found[number] = difference(number) or b""
        if not found[number] or sum(map(len, found.values())) >= whole_size(weights):
            return {}
    return dict(sorted(found.items()))


def whole_size(weights: Tensors) -> int:
    """Bytes of a version sent whole."""
    return CODECS[WHOLE].size(shapes(weights))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows, and numbers in each."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _groups(shape: tuple[int, ...], size: int) -> int:
    return -(-math.prod(shape) // size)


def _padded(flat: Tensor, size: int) -> Tensor:
    """Groups of `size` numbers, the last padded with zeros."""
    return F.pad(flat, (0, -len(flat) % size)).reshape(-1, size)


def _floats(raw: Raw) -> Tensor:
    """Little-endian float32 numbers, as a tensor with its own memory."""
    return torch.from_numpy(raw.view("<f4").astype(np.float32))


def _float_bytes(values: Tensor) -> bytes:
    return values.reshape(-1).numpy().astype("<f4", copy=False).tobytes()
