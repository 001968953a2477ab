"""A parser that is fuzzed, and mutations that know what its inputs are made of; libFuzzer's own know only bytes."""

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from tests.fuzz.inputs import changed

Mutation = Callable[[random.Random, bytes], bytes]  # raises ValueError for an input that has no such structure

WORDS = ("null", "true", "-1", "1e999", "NaN", "[]", "{}", '"\\ud800"', "9" * 30, "[" * 600, "[" * 60000, "1.5", '""')
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**400, 1e308, 0.5, "", "x", "\x00", "\ud800", "é" * 80),
    *([], [None], {}, {"a": {}}, ["x"] * 80, "a" * 5000),
)
NUMBERS = (0, 1, 2, 3, 5, 8, 9, 12, 32, 300, 2**16, 2**31, 2**32 - 1, 2**62, 2**64 - 1)


@dataclass(frozen=True)
class Target:
    """One parser."""

    parse: Callable[[bytes], object]
    seeds: Iterable[bytes]
    errors: tuple[type[Exception], ...]  # that the parser documents
    mutate: Mutation | None = None
    chooses: int = 0  # first bytes of an input, which choose what the others are: a mutation leaves them alone

    def take(self, data: bytes) -> None:
        if len(data) >= self.chooses:
            with contextlib.suppress(*self.errors):
                self.parse(data)

    def mutated(self, rng: random.Random, data: bytes) -> bytes:
        assert self.mutate
        return data[: self.chooses] + self.mutate(rng, data[self.chooses :])


def changed_message(kind: type[Message]) -> Mutation:
    """Changes fields of a protobuf message."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        try:
            message = kind.FromString(data)
        except DecodeError as error:
            raise ValueError from error
        changed(rng, message)
        return message.SerializeToString()

    return mutate


def changed_metadata(rng: random.Random, data: bytes) -> bytes:
    """Changes type or value of one entry in a GGUF file's metadata or list of tensors: 4 or 8 bytes after its name."""
    names = [match.end() for match in re.finditer(rb"[a-z0-9_]+(\.[a-z0-9_]+)+", data[: 1 << 15])]
    if not names:
        raise ValueError
    at, size = rng.choice(names) + rng.choice((0, 0, 4, 4, 4, 8, 12, 20)), rng.choice((4, 4, 8))
    number = rng.choice((*NUMBERS, rng.getrandbits(64)))
    return data[:at] + (number % 256**size).to_bytes(size, "little") + data[at + size :]


def changed_header(rng: random.Random, data: bytes) -> bytes:
    """Changes the JSON at the head of a safetensors file, and tells its length."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = changed_json(rng, data[8:end])
    return len(head).to_bytes(8, "little") + head + data[end:]


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """Changes one value of a JSON text, or writes a word where a value begins."""
    if rng.random() < 0.3:
        begins = [match.end() for match in re.finditer(rb"[:=,\[]", data)]
        if begins:
            at = rng.choice(begins)
            until = re.compile(rb"[,\n\]}]").search(data, at)
            return data[:at] + rng.choice(WORDS).encode() + data[until.start() if until else len(data) :]
    return json.dumps(_changed(rng, json.loads(data))).encode()


def _changed(rng: random.Random, value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if (way := rng.random()) < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if way < 0.2:
            return {**value, rng.choice(("x", "", *value)): value[key]}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]] if rng.random() < 0.8 else [*value, value[at]]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 0.5))
    return rng.choice(VALUES)
