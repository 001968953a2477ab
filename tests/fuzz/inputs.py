"""Damage to bytes, and changes to the fields of a message."""

import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

VARINTS = [b"\x00", b"\x7f", b"\x80\x01", b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 12, b"\x80" * 10]
FLOATS = [0.0, -0.0, -1.0, 5e-324, 1e-40, 1.0, 1e38, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    *("", "x", "\x00", "\n", "é", "\U0001f600", "a" * 64, "a" * 65),
    *("%s%n", "../..", "\u202e", "x" * 5000, "127.0.0.1:1"),
]
SMALL = (0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4096, 1 << 20, 1 << 31)
ENDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, (1 << 31) - 1),
}
MAX_REPEATED = 300  # above every limit on the length of a list


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """`data` with one kind of damage. `others` may lend it parts of theirs."""
    if not data:
        return rng.choice(VARINTS)
    at = rng.randrange(len(data))
    match rng.choice(("flip", "flip", "overwrite", "cut", "drop", "repeat", "insert", "splice")):
        case "flip":
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case "overwrite":  # any byte may be a length: this is how one lies
            byte = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            return data[:at] + bytes([byte]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "drop":
            return data[:at] + data[at + rng.randint(1, 16) :]
        case "repeat":
            return data[:at] + data[at : at + rng.randint(1, 32)] * rng.choice((2, 2, 9)) + data[at:]
        case "insert":
            return (
                data[:at] + rng.choice([*VARINTS, rng.randbytes(4), struct.pack("<d", rng.choice(FLOATS))]) + data[at:]
            )
    other = rng.choice(others) if others else data
    return data[:at] + other[rng.randrange(len(other) + 1) :]


def changed(rng: random.Random, message: Message, others: Sequence[Message] = ()) -> None:
    """Change a field, or some, of `message` or of a message in it: well-formed, and wrong."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_one(rng, message, others)


def _change_one(rng: random.Random, message: Message, others: Sequence[Message]) -> None:
    set_fields = message.ListFields()
    inner = [
        part
        for field, value in set_fields
        if field.message_type is not None and not _is_map(field)
        for part in (value if field.is_repeated else [value])
    ]
    if inner and rng.random() < 0.7:  # most of what is checked lies in messages within messages
        _change_one(rng, rng.choice(inner), others)
        return
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    # change fields that are set more often: they are needed
    likely = [field for field, _ in set_fields] if set_fields and rng.random() < 0.7 else list(fields)
    field: Any = rng.choice(likely)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif lender := [other for other in others if other.DESCRIPTOR is message.DESCRIPTOR and rng.random() < 0.2]:
        message.MergeFrom(lender[0])
    elif field.is_repeated:
        _lengthen(rng, message, field)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _lengthen(rng: random.Random, message: Message, field: Any) -> None:
    values, times = getattr(message, field.name), rng.choice((1, 2, MAX_REPEATED))
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            values[_value(rng, key, None)] = _value(rng, value, None)
        else:
            values[_value(rng, key, None)].SetInParent()
    elif field.message_type is not None:
        for _ in range(times):
            added = values.add()
            if len(values) > 1:
                added.CopyFrom(values[0])
    elif values and rng.random() < 0.3:
        values.extend(list(values) * rng.choice((1, 3)))
    else:
        values.extend([_value(rng, field, values[0] if values else None)] * times)


def _value(rng: random.Random, field: FieldDescriptor, before: object) -> object:
    kind = field.cpp_type
    if kind in ENDS:
        low, high = ENDS[kind]
        near = int(before) + rng.choice((-1, 1, 2)) if isinstance(before, int) else 1
        return min(max(rng.choice((low, high, high - 1, near, near, rng.choice(SMALL))), low), high)
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


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
