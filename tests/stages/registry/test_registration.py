"""What a host may say of itself, and what is believed of what others say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages.errors import InputError
from stages.registry import Registration
from stages.registry.entry import MAX_ENTRY_BYTES, read_entry, write_entry
from stages.registry.successors import successors

PARIS = Registration("paris", "10.8.0.1:7701", (0, 1))


def test_what_is_written_is_read() -> None:
    assert read_entry("paris", write_entry(PARIS)) == PARIS


def test_keys_of_a_newer_version_are_passed_over() -> None:
    record = {**json.loads(write_entry(PARIS)), "colour": ["green"]}
    assert read_entry("paris", json.dumps(record).encode()) == PARIS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 10_000, "not JSON"),
        (b'{"name": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "names another host"),
        (b" " * (MAX_ENTRY_BYTES + 1), "the limit is"),
    ],
)
def test_what_is_no_registration_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_entry("paris", data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "tokyo"}, "names another host"),
        ({"address": 7}, "address is not text"),
        ({"address": ""}, "must be HOST:PORT"),
        ({"address": "10.8.0.1:0"}, "not 0"),
        ({"address": "0.0.0.0:7701"}, "cannot be dialled"),
        ({"address": "[::]:7701"}, "cannot be dialled"),
        ({"address": "a" * 300 + ":1"}, "at most 255"),
        ({"address": "unix:/tmp/x"}, "must be HOST:PORT"),
        ({"blocks": [1]}, "blocks is not"),
        ({"blocks": [1, 0]}, "blocks is not"),
        ({"blocks": [-1, 0]}, "blocks is not"),
        ({"blocks": [False, True]}, "blocks is not"),
        ({"blocks": [0, 10**9]}, "blocks is not"),
        ({"blocks": "0"}, "blocks is not"),
    ],
)
def test_a_field_that_cannot_be_true_is_refused(change: dict[str, Any], message: str) -> None:
    record = {**json.loads(write_entry(PARIS)), **change}
    with pytest.raises(InputError, match=message):
        read_entry("paris", json.dumps(record).encode())


def test_a_router_is_no_host() -> None:
    with pytest.raises(InputError, match="cannot be called 'router'"):
        Registration("router", "10.8.0.1:7701", (0,))


def host(name: str, port: int, *blocks: int) -> Registration:
    return Registration(name, f"10.8.0.1:{port}", blocks)


def test_successors_begin_where_a_host_ends() -> None:
    a, b, c, d = host("a", 1, 0), host("b", 2, 1), host("c", 3, 1, 2), host("d", 4, 2)
    hosts = [a, b, c, d]
    assert successors(hosts, a, parts=3) == ["10.8.0.1:2", "10.8.0.1:3"]
    assert successors(hosts, b, parts=3) == ["10.8.0.1:4"]
    assert successors(hosts, c, parts=3) == successors(hosts, d, parts=3) == ["10.8.0.1:1"]


def test_nothing_comes_after_a_host_that_holds_everything() -> None:
    whole, replica = host("whole", 1, 0, 1), host("replica", 2, 0, 1)
    assert successors([whole, replica], whole, parts=2) == []
