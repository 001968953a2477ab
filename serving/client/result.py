"""The result of a request: its text and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from google.protobuf.message import Message

from onesweep.serving.v1 import router_pb2

# Decimals that are kept, where that is not 3.
DIGITS = {"divergence_bits": 4, "distance_bound": 4}


def record_of(message: Message) -> dict[str, Any]:
    """A message as JSON values, under its own names. Protobuf's JSON would have 64-bit numbers as strings."""
    record: dict[str, Any] = {}
    for described in message.DESCRIPTOR.fields:
        value, kind = getattr(message, described.name), described.message_type
        nested = kind is not None
        if kind is not None and kind.GetOptions().map_entry:
            record[described.name] = dict(value)
        elif described.is_repeated:
            record[described.name] = [record_of(each) if nested else each for each in value]
        elif not described.has_presence or message.HasField(described.name):
            record[described.name] = record_of(value) if nested else value
    return record


@dataclass(frozen=True)
class HostShare:
    """One host's share in a request."""

    name: str
    blocks: list[int]
    compute_ms: float
    queue_ms: float


@dataclass(frozen=True)
class Result:
    """A generated text and what it cost, as the servers booked it."""

    # The output. Control characters are printed as U+FFFD without `--json`.
    text: str
    # The mode that ran.
    mode: str
    seed: int
    # Of UTF-8.
    prompt_bytes: int
    output_bytes: int
    # As many as bytes where the model reads bytes.
    prompt_tokens: int
    # That were written: a stop string may have cut the text before the last of them.
    output_tokens: int
    # Whether a stop string or the model itself ended the text, before it had the length asked for.
    stopped: bool
    # Trips along the hosts.
    sweeps: int
    # Messages from machine to machine, over all sweeps.
    hops: int
    # Payload of each hop of a sweep, in its order; where sweeps differ, the largest.
    wire_bytes: list[int]
    # Payload of all hops, in bytes.
    wire_bytes_total: int
    # At the router, from admission to the last byte.
    latency_ms: float
    # From admission to the first byte.
    first_byte_ms: float
    # Arithmetic on the hosts and the router.
    compute_ms: float
    # Of each: `name`, `blocks`, `compute_ms` (its share of passes) and `queue_ms` (waiting).
    hosts: list[HostShare]
    # Tokens guessed by a drafter, and how many of them were right.
    drafted: int
    accepted: int
    # Guesses that counted: those that were right, and the first wrong one of each sweep.
    reached: int
    # The exact bytes; `text` shows those that are no UTF-8 as U+FFFD.
    output: bytes = field(repr=False)
    # The router's arithmetic for guesses while the sweep before was under way, and how many sweeps had such ones.
    ahead_ms: float = 0.0
    ahead_used: int = 0
    # What scored or verified; empty where nothing did.
    scorer: str = ""
    # Tokens a sweep, the most; 0 where the mode has none.
    chunk: int = 0
    # Continuations scored in a sweep, the most.
    candidates: int = 0
    # Of a sweep's candidates on their way.
    batches: int = 1
    # Of the candidates, as their weights leave them: the mean over sweeps.
    effective_samples: float = 0.0
    # KL(drafter || scorer) for a token, as the candidates showed it.
    divergence_bits: float = 0.0
    # Estimate: most total variation from the scorer's distribution; 1 = unknown.
    distance_bound: float = 0.0
    # Why mode `auto` picked this mode; empty where the request named it.
    reason: str = ""
    # Times that the work moved to other hosts, because one failed or was late.
    replays: int = 0
    # What the router's and the hosts' logs call this request.
    request: str = ""

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that counted which were right; None where nothing was guessed."""
        return self.accepted / self.reached if self.reached else None

    @property
    def host_seconds(self) -> float:
        """Seconds of arithmetic on the hosts."""
        return sum(host.compute_ms for host in self.hosts) / 1000

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["output_hex"] = record.pop("output").hex()
        return record


def result_of(summary: router_pb2.Summary, output: bytes) -> Result:
    """The result of a request whose text was `output`: fields and the summary's are of the same name."""
    values = {f.name: getattr(summary, f.name) for f in fields(Result) if f.name not in ("text", "output", "hosts")}
    rounded = {name: round(value, DIGITS.get(name, 3)) for name, value in values.items() if isinstance(value, float)}
    hosts = [HostShare(h.name, list(h.blocks), round(h.compute_ms, 3), round(h.queue_ms, 3)) for h in summary.hosts]
    values |= {"wire_bytes": list(summary.wire_bytes), **rounded}
    return Result(text=output.decode(errors="replace"), output=output, hosts=hosts, **values)
