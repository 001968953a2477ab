"""The cost of a request, added up from the accounts that travel with its sweeps."""

from collections.abc import Awaitable
from dataclasses import dataclass, field, fields
from itertools import starmap, zip_longest

import numpy as np

from serving.router.host_link import HostLink
from serving.router.topology import HostEntry
from serving.v1 import router_pb2
from stages.model.resampling import ImportanceWeights
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

# A client that gives up this shortly before its deadline went by its own clock, which had passed it.
JITTER_S = 0.02


class RequestContext:
    """The properties of a request that travel to the hosts with its work."""

    name = ""
    batch = False  # it yields to other requests, on the hosts too
    space = b""  # namespace for its texts in the hosts' prefix caches; empty: hosts cache nothing
    caller = ""  # the API key it was sent with

    @property
    def age_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return 0.0

    def stamp(self, hop: stage_pb2.Hop) -> None:
        """Put the request's name and priority into a hop that leaves for the hosts."""
        hop.request, hop.batch = self.name, self.batch


@dataclass(frozen=True)
class Drawn:
    """A token that a model drew, its logprob in nats, and the most likely tokens with theirs."""

    token: int
    nats: float
    top: list[tuple[int, float]]


def drawn_tokens(vocabulary: Vocabulary, tokens: bytes, logprobs: stage_pb2.Logprobs) -> list[Drawn]:
    written, nats = vocabulary.tokens(tokens), np.frombuffer(logprobs.nats, "<f4").tolist()
    top = list(
        zip(vocabulary.tokens(logprobs.top_tokens), np.frombuffer(logprobs.top_nats, "<f4").tolist(), strict=True)
    )
    each = len(top) // len(nats)
    return [Drawn(token, nats[i], top[i * each : (i + 1) * each]) for i, token in enumerate(written)]


@dataclass
class Account:
    """One request's account: sweeps, hops, bytes and milliseconds, as the servers measured them."""

    context: RequestContext = field(default_factory=RequestContext)
    vocabulary: Vocabulary = BYTES  # of the generated text
    first_byte_ms: float = 0.0
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the hosts had in their prefix caches
    output_bytes: int = 0  # bytes of text handed out
    output_tokens: int = 0  # generated tokens
    complete: bool = False  # the schema allows nothing after the text
    stopped: bool = False  # the text ended before the requested length
    sweeps: int = 0
    hops: int = 0
    # One entry for each hop of a sweep, the largest where sweeps differ: a list of all hops of 256 steps is too long.
    wire_bytes: list[int] = field(default_factory=list)
    wire_bytes_total: int = 0
    local_compute_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    scorer: str = ""
    sampling: str = ""  # the settings used to draw tokens
    reason: str = ""
    replays: int = 0  # times that work moved to other hosts
    mode: str = ""  # the mode that `auto` chose
    chunk: int = 0
    candidates: int = 0
    batches: int = 1  # most batches that one sweep's candidates travelled in; 1 without candidates
    effective_samples: list[float] = field(default_factory=list)
    distance_bound: float = 0.0  # between the drawn text's distribution and the scorer's, over all sweeps
    # Bits per token, with the number of tokens measured.
    divergence_bits: list[tuple[float, int]] = field(default_factory=list)
    audits: list[Awaitable[bool]] = field(default_factory=list)  # of answers that ended early, still running
    # Of the generated tokens, and how many of these have been reported.
    logprobs: list[Drawn] = field(default_factory=list)
    reported: int = 0
    # Of the prompt's tokens, if requested; NaN for the first.
    prompt_logprobs: list[Drawn] = field(default_factory=list)
    # Trips of the sweeps that have not been reported yet; None if the client did not request them.
    trips: list[router_pb2.Trip] | None = None
    trip_begin_ms: float = 0.0
    # Hosts of the last sweep, by the name that each reports in its timings.
    hosts: dict[str, HostLink] = field(default_factory=dict)
    compute_ms: dict[HostEntry, float] = field(default_factory=dict)
    queue_ms: dict[HostEntry, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin_ms = self.context.age_ms

    def begin_again(self) -> None:
        """Start the text again; the costs so far stay."""
        self.output_tokens = 0
        for found in self.logprobs, self.prompt_logprobs, self.audits, self.effective_samples, self.divergence_bits:
            found.clear()
        self.replays += 1
        self.distance_bound = 0.0
        self.trip_begin_ms = self.elapsed_ms()

    def add_sweep(self, event: stage_pb2.Event) -> None:
        """Add one sweep: the bytes of each message that brought work to a host, and of the result."""
        payloads = list[int]()
        for timing in event.timings:
            if timing.received_bytes:
                payloads.append(timing.received_bytes)
            if (link := self.hosts.get(timing.host)) is not None:
                host = link.entry
                self.compute_ms[host] = self.compute_ms.get(host, 0.0) + timing.compute_ms
                self.queue_ms[host] = self.queue_ms.get(host, 0.0) + timing.queue_ms
        payloads.append(event.ByteSize())
        self.sweeps += 1
        self.hops += len(payloads)
        self.wire_bytes_total += sum(payloads)
        # in a ring of one host, only the first step arrives in a message: the result is still the last hop
        padded = zip_longest(reversed(payloads), reversed(self.wire_bytes), fillvalue=0)
        self.wire_bytes = list(starmap(max, padded))[::-1]
        if self.trips is not None:
            self.trips.append(self._trip(event, sum(payloads)))

    def take_logprobs(self, end: int) -> list[Drawn]:
        """Logprobs of the tokens since the last call, up to but without token number `end` of the text."""
        # a text that is generated again repeats what was handed out
        taken, self.reported = self.logprobs[self.reported : end], max(self.reported, end)
        return taken

    def add_draft(self, drafted: int, accepted: int) -> None:
        """Add draft tokens: how many were drafted, and how many were accepted."""
        self.drafted += drafted
        self.accepted += accepted
        self.reached += accepted + (accepted < drafted)

    def add_candidates(self, weights: ImportanceWeights, length: int, compute_ms: float = 0.0) -> None:
        """Add the candidates of a sweep and the weights that the scorer gave them.

        :param length: tokens of each; :param compute_ms: the router's time to generate them."""
        count = len(weights.shares)
        self.chunk, self.candidates = max(self.chunk, length), max(self.candidates, count)
        self.effective_samples.append(weights.effective)
        self.local_compute_ms += compute_ms
        self.divergence_bits.append((weights.divergence_bits, count * length))

    def add_text(self, tokens: bytes, logprobs: stage_pb2.Logprobs | None = None) -> None:
        """Add generated tokens and their logprobs, of which there may be more than tokens."""
        if not self.output_tokens:
            self.first_byte_ms = self.elapsed_ms()
        if logprobs is not None and logprobs.nats:
            self.logprobs += drawn_tokens(self.vocabulary, tokens, logprobs)
        self.output_tokens += self.vocabulary.count(tokens)

    def summary(self, mode: str, seed: int) -> router_pb2.Summary:
        """The whole account, for the client."""
        return router_pb2.Summary(
            **{name: getattr(self, name) for name in COPIED},
            mode=self.mode or mode,
            seed=seed,
            latency_ms=self.elapsed_ms(),
            compute_ms=self.total_compute_ms,
            hosts=[
                router_pb2.HostShare(
                    name=host.name, blocks=host.blocks, compute_ms=compute_ms, queue_ms=self.queue_ms[host]
                )
                for host, compute_ms in self.compute_ms.items()
            ],
            effective_samples=_mean([(each, 1) for each in self.effective_samples]),
            divergence_bits=_mean(self.divergence_bits),
        )

    def _trip(self, event: stage_pb2.Event, wire_bytes: int) -> router_pb2.Trip:
        begin_ms, self.trip_begin_ms = self.trip_begin_ms, self.elapsed_ms()
        hosts = [
            router_pb2.TripHost(
                name=self.hosts[p.host].entry.name if p.host in self.hosts else p.host,
                queue_ms=p.queue_ms,
                compute_ms=p.compute_ms,
                received_bytes=p.received_bytes,
            )
            for p in event.timings
        ]
        end_ms = self.trip_begin_ms
        return router_pb2.Trip(
            number=self.sweeps - 1, begin_ms=begin_ms, end_ms=end_ms, hosts=hosts, wire_bytes=wire_bytes
        )

    @property
    def total_compute_ms(self) -> float:
        """Compute time of the hosts and of the router."""
        return self.local_compute_ms + sum(self.compute_ms.values())

    def elapsed_ms(self) -> float:
        return self.context.age_ms - self._begin_ms


# Fields that the summary copies from the account under the same name.
COPIED = {f.name for f in fields(Account)} & set(router_pb2.Summary.DESCRIPTOR.fields_by_name) - {
    *("mode", "hosts", "compute_ms", "effective_samples", "divergence_bits")
}


def _mean(weighted: list[tuple[float, int]]) -> float:
    """The weighted mean; 0 for an empty list."""
    return sum(value * weight for value, weight in weighted) / max(1, sum(weight for _, weight in weighted))
