"""Strategies for hypothesis: any message of a type, made from its descriptor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from loadtest.fuzz.mutation import ENDS

T = TypeVar("T")

DEPTH = 3
"""Messages within messages."""
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
