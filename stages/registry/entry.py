"""A registration as JSON: written by hosts, read with suspicion."""

from __future__ import annotations

import json

from stages.errors import InputError
from stages.registry.base import MAX_BLOCKS, Registration

MAX_ENTRY_BYTES = 16 << 10


def write_entry(registration: Registration) -> bytes:
    """What `read_entry` reads."""
    record = {
        "name": registration.name,
        "address": registration.address,
        "blocks": [registration.blocks[0], registration.blocks[-1]],
    }
    return json.dumps(record).encode()


def read_entry(name: str, data: bytes) -> Registration:
    """The host called `name`. Keys of newer versions are passed over. Raises InputError."""
    if len(data) > MAX_ENTRY_BYTES:
        raise InputError(f"it takes {len(data)} bytes, the limit is {MAX_ENTRY_BYTES}")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError("it is not JSON") from None
    if not isinstance(record, dict):
        raise InputError("it is not a JSON object")
    if record.get("name") != name:
        raise InputError("it names another host than its key")
    address = record.get("address")
    if not isinstance(address, str):
        raise InputError("address is not text")
    return Registration(name, address, _blocks(record.get("blocks")))


def _blocks(value: object) -> tuple[int, ...]:
    match value:
        case [int(first), int(last)] if not isinstance(first, bool) and 0 <= first <= last < MAX_BLOCKS:
            return tuple(range(first, last + 1))
    raise InputError(f"blocks is not [FIRST, LAST], from 0 to {MAX_BLOCKS - 1}")
