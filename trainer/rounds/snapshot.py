"""What is told to those who watch, as JSON: every field is there, numbers are numbers, what is unknown is null."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def snapshot(message: Message) -> dict[str, Any]:
    """A message as a dict by field names. (Protobuf's own JSON has texts for 64-bit numbers, and leaves out zeros.)"""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:  # noqa: ANN401 - a descriptor has two types, a value any
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    return [snapshot(each) for each in value] if field.is_repeated else snapshot(value)
