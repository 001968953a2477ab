"""What a client gets: a text, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from serving.v1 import router_pb2


@dataclass(frozen=True)
class HostShare:
    """What one host did for a request."""

    name: str
    blocks: list[int]
    compute_ms: float
    queue_ms: float


@dataclass(frozen=True)
class Result:
    """A generated text and what it cost, as the servers booked it."""

    text: str
    mode: str
    seed: int
    prompt_bytes: int
    output_bytes: int
    prompt_tokens: int
    """As many as bytes where the model reads bytes."""
    output_tokens: int
    """That were written: a stop string may have cut the text before the last of them."""
    stopped: bool
    """Whether a stop string or the model itself ended the text, before it had the length asked for."""
    sweeps: int
    hops: int
    wire_bytes: list[int]
    """Payload of each hop of a sweep, in its order; where sweeps differ, the largest."""
    wire_bytes_total: int
    latency_ms: float
    first_byte_ms: float
    compute_ms: float
    hosts: list[HostShare]
    drafted: int
    """Tokens guessed by a drafter, and how many of them were right."""
    accepted: int
    reached: int
    """Guesses that counted: those that were right, and the first wrong one of each sweep."""
    output: bytes = field(repr=False)
    """The exact bytes; `text` shows those that are no UTF-8 as U+FFFD."""
    ahead_ms: float = 0.0
    """The router's arithmetic for guesses while the sweep before was under way, and how many sweeps had such ones."""
    ahead_used: int = 0
    scorer: str = ""
    """What scored or verified; empty where nothing did."""
    chunk: int = 0
    """Tokens a sweep, the most; 0 where the mode has none."""
    candidates: int = 0
    """Continuations scored in a sweep, the most."""
    effective_samples: float = 0.0
    """Of the candidates, as their weights leave them: the mean over sweeps."""
    divergence_bits: float = 0.0
    """KL(drafter || scorer) for a token, as the candidates showed it."""
    reason: str = ""
    """Why mode `auto` picked this mode; empty where the request named it."""
    replays: int = 0
    """Times that the work moved to other hosts, because one failed or was late."""
    request: str = ""
    """What the router's and the hosts' logs call this request."""

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
    """What a summary and the text before it say."""
    return Result(
        text=output.decode(errors="replace"),
        mode=summary.mode,
        seed=summary.seed,
        prompt_bytes=summary.prompt_bytes,
        output_bytes=summary.output_bytes,
        prompt_tokens=summary.prompt_tokens,
        output_tokens=summary.output_tokens,
        stopped=summary.stopped,
        sweeps=summary.sweeps,
        hops=summary.hops,
        wire_bytes=list(summary.wire_bytes),
        wire_bytes_total=summary.wire_bytes_total,
        latency_ms=round(summary.latency_ms, 3),
        first_byte_ms=round(summary.first_byte_ms, 3),
        compute_ms=round(summary.compute_ms, 3),
        hosts=[HostShare(h.name, list(h.blocks), round(h.compute_ms, 3), round(h.queue_ms, 3)) for h in summary.hosts],
        drafted=summary.drafted,
        accepted=summary.accepted,
        reached=summary.reached,
        ahead_ms=round(summary.ahead_ms, 3),
        ahead_used=summary.ahead_used,
        scorer=summary.scorer,
        chunk=summary.chunk,
        candidates=summary.candidates,
        effective_samples=round(summary.effective_samples, 3),
        divergence_bits=round(summary.divergence_bits, 4),
        reason=summary.reason,
        replays=summary.replays,
        request=summary.request,
        output=output,
    )
