"""Inputs of one message type: captures mutated, messages drawn from the descriptor, raw bytes."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

# Mutations of a message that was once right


Bytes = Callable[[random.Random, bytearray, Sequence[bytes]], bytes]

VARINTS = [b"\x00", b"\x7f", b"\x80\x01", b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 12, b"\x80" * 10]
FLOATS = [0.0, -0.0, -1.0, 5e-324, 1e-40, 1.0, 1e38, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    *(
        "",
        "x",
        "\x00",
        "\n",
        "é",
        "\U0001f600",
        "a" * 64,
        "a" * 65,
        "%s%n",
        "../..",
        "\u202e",
        "x" * 5000,
        "127.0.0.1:1",
    )
]
ENDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, (1 << 31) - 1),
}
MOST_REPEATED = 300  # above every limit on the length of a list


def _flip(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _overwrite(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    """Any byte may be a length: this is how one lies."""
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(data)


def _cut(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def _drop(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    begin = rng.randrange(len(data))
    return bytes(data[:begin] + data[begin + rng.randint(1, 16) :])


def _repeat(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    begin = rng.randrange(len(data))
    return bytes(data[:begin] + data[begin : begin + rng.randint(1, 32)] * rng.choice((2, 2, 9)) + data[begin:])


def _insert(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return bytes(
        data[:at] + rng.choice([*VARINTS, rng.randbytes(4), struct.pack("<d", rng.choice(FLOATS))]) + data[at:]
    )


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else bytes(data)
    return bytes(data[: rng.randrange(len(data) + 1)]) + other[rng.randrange(len(other) + 1) :]


DAMAGES: tuple[Bytes, ...] = (_flip, _flip, _overwrite, _cut, _drop, _repeat, _insert, _splice)


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """`data` with one kind of damage. `others` may lend it parts of theirs."""
    if not data:
        return rng.choice(VARINTS)
    return rng.choice(DAMAGES)(rng, bytearray(data), others)


def changed(rng: random.Random, message: Message, others: Sequence[Message] = ()) -> None:
    """Change a field, or some, of `message` or of a message in it: well-formed, and wrong."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_one(rng, message, others)


def _change_one(rng: random.Random, message: Message, others: Sequence[Message]) -> None:
    set_fields = message.ListFields()
    inner = [value for field, value in set_fields if _is_message(field) and not _is_list(field)]
    inner += [value for field, values in set_fields if _is_message(field) and _is_list(field) for value in values]
    if inner and rng.random() < 0.7:
        _change_one(rng, rng.choice(inner), others)
        return
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    # what is set was needed: change that more often than what is not
    likely = [field for field, _ in set_fields] if set_fields and rng.random() < 0.7 else list(fields)
    field: Any = rng.choice(likely)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif lender := [other for other in others if other.DESCRIPTOR is message.DESCRIPTOR and rng.random() < 0.2]:
        message.MergeFrom(lender[0])
    elif _is_list(field):
        _change_list(rng, message, field)
    elif _is_message(field):
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _change_list(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if _is_message(field):
        for _ in range(rng.choice((1, 2, MOST_REPEATED))):
            added = values.add()
            if len(values) > 1:
                added.CopyFrom(values[0])
        return
    if rng.random() < 0.3:
        values.extend(list(values) * rng.choice((1, 3)) or [_value(rng, field, None)])
    else:
        values.extend([_value(rng, field, values[0] if values else None)] * rng.choice((1, 2, MOST_REPEATED)))


def _value(rng: random.Random, field: FieldDescriptor, before: object) -> object:
    kind = field.cpp_type
    if kind in ENDS:
        low, high = ENDS[kind]
        near = int(before) + rng.choice((-1, 1, 2)) if isinstance(before, int) else 1
        small = rng.choice((0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4096, 1 << 20, 1 << 31))
        return min(max(rng.choice((low, high, high - 1, near, near, small)), low), high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not before
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _payload(rng, before if isinstance(before, bytes) else b"")
    return rng.choice(TEXTS)


def _payload(rng: random.Random, before: bytes) -> bytes:
    """Numbers that are none, lengths that are off by one, sizes at a limit and beyond."""
    match rng.randrange(6):
        case 0:
            return before[:-1]
        case 1:
            return before + b"\x00"
        case 2:
            return rng.randbytes(len(before))
        case 3:
            return (struct.pack("<f", rng.choice(FLOATS[-3:])) * (len(before) // 4 + 1))[: len(before)]
        case 4:
            return rng.randbytes(rng.choice((1, 4, 511, 512, 513, 4096, 1 << 16)))
    return damaged(rng, before)


def _is_message(field: FieldDescriptor) -> bool:
    return field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE


def _is_list(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


# Messages from descriptors


T = TypeVar("T")

DEPTH = 3  # messages within messages
MOST_ITEMS = 3


def messages(descriptor: Any, depth: int = DEPTH) -> st.SearchStrategy[Message]:  # noqa: ANN401 - two classes, by what reads protobuf
    """Messages of a type, each field there or not, with ordinary and with extreme values."""
    kind = GetMessageClass(descriptor)
    fields = {field.name: _field(field, depth) for field in descriptor.fields if depth or field.message_type is None}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def drawn(strategy: st.SearchStrategy[T], count: int, number: int) -> list[T]:
    """About `count` values, always the same for one `number`; fewer where there are no more."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    with contextlib.suppress(HypothesisException):  # too much of what it drew was too large: what there is will do
        collect()
    return found


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return st.dictionaries(_single(key, depth), _single(value, depth - 1), max_size=MOST_ITEMS)
    single = _single(field, depth)
    return st.lists(single, max_size=MOST_ITEMS) if field.is_repeated else single


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth - 1)
    if field.cpp_type in ENDS:
        low, high = ENDS[field.cpp_type]
        return st.integers(low, high) | st.integers(0, 64) | st.sampled_from((low, high))
    return _PLAIN[field.cpp_type](field)


def _texts(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    return st.binary(max_size=64) if field.type == FieldDescriptor.TYPE_BYTES else st.text(max_size=16)


_PLAIN: dict[int, Callable[[FieldDescriptor], st.SearchStrategy[Any]]] = {
    FieldDescriptor.CPPTYPE_BOOL: lambda field: st.booleans(),
    FieldDescriptor.CPPTYPE_FLOAT: lambda field: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda field: st.floats(),
    FieldDescriptor.CPPTYPE_STRING: _texts,
}


POOL = 48  # messages drawn from a descriptor: hypothesis takes its time, so they are used again, and changed then
# Each way as often as it is taken.
SHARES = ("changed",) * 9 + ("damaged",) * 4 + ("drawn",) * 2 + ("merged",) * 3 + ("raw",) + ("as it was",)
MOST_RAW = 512


class Inputs:
    """Bytes of one message type, always the same for one seed and one set of captures."""

    def __init__(
        self,
        kind: type[Message],
        captures: Sequence[bytes],
        rng: random.Random,
        prepare: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """:param prepare: makes a capture one that would be taken now, before it is mutated."""
        self.kind, self.rng, self.prepare = kind, rng, prepare
        self.captures = captures or [b""]
        self._pool: list[Message] = []
        self._fresh = 0

    def take(self, count: int) -> list[bytes]:
        return [self._one(self.rng.choice(SHARES)) for _ in range(count)]

    def _one(self, way: str) -> bytes:
        rng = self.rng
        if way == "raw":
            return rng.randbytes(rng.randrange(MOST_RAW))
        if way == "drawn":
            return self._draw().SerializeToString()
        message = self._capture()
        if way == "merged":
            message.MergeFrom(self._draw())
        if way == "changed":
            changed(rng, message, [self._capture()])
        data = message.SerializeToString()
        return damaged(rng, data, self.captures) if way == "damaged" else data

    def _capture(self) -> Message:
        message = self.kind()
        message.ParseFromString(self.rng.choice(self.captures))
        self.prepare(message)
        return message

    def _draw(self) -> Message:
        if not self._pool:
            strategy = messages(self.kind.DESCRIPTOR)
            self._pool = drawn(strategy, POOL, self.rng.getrandbits(32)) or [self.kind()]
        if self._fresh < len(self._pool):
            self._fresh += 1
            return self._pool[self._fresh - 1]
        message = self.kind()
        message.CopyFrom(self.rng.choice(self._pool))
        changed(self.rng, message)
        return message
