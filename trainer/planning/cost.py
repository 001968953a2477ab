"""Time and memory of a run: its hours, the share of them in which workers train, and the bytes that each side holds."""

# The share is the compute utilisation of the DiLoCo papers. DiLoCo (arXiv 2311.08105) communicates once in H steps, so
# of a round of H t seconds of training and c of communication a share H t / (H t + c) is used; Streaming DiLoCo (arXiv
# 2501.18512, figure 4) and eager updates (arXiv 2502.12996) hide c behind the next steps and lose only the excess. The
# papers count an all-reduce among datacentres; here c is the exchange of a worker with the coordinator.

from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.errors import InputError, one_of
from stages.settings import check, limits
from trainer.blocks.config import RoundSettings
from trainer.planning.inventory import FP32_BYTES, SEGMENT_BYTES, PartInventory, WorkerTraffic, wire_bytes
from trainer.rounds.file_server import KEPT

# Segments that TCP sends before the first acknowledgement, and again after a pause (RFC 6928, RFC 5681 4.1).
FIRST_WINDOW = 10


@dataclass(frozen=True)
class WorkerLink:
    """The link between a worker and its coordinator."""

    # Megabits (10^6) a second of IP packets, towards the coordinator and from it.
    up_mbps: float = field(metadata=limits(above=0))
    down_mbps: float = field(metadata=limits(above=0))
    latency_ms: float = field(metadata=limits(least=0))  # one way

    def __post_init__(self) -> None:
        check(self)

    @property
    def round_trip_s(self) -> float:
        return 2 * self.latency_ms / 1000

    def up_s(self, payload: int) -> float:
        """Seconds until the last byte of a file of `payload` bytes has left the worker."""
        return self._sending_s(payload, self.up_mbps)

    def down_s(self, payload: int) -> float:
        """The same from the coordinator."""
        return self._sending_s(payload, self.down_mbps)

    def _sending_s(self, payload: int, mbps: float) -> float:
        """At the link's rate, and the gaps of TCP's slow start: windows of 10, 20, 40 ... segments, one a round trip,
        until they fill it (RFC 5681, 3.1)."""
        a_byte_s = 8e-6 / mbps
        left, window, gaps_s = wire_bytes(payload), float(FIRST_WINDOW * SEGMENT_BYTES), 0.0
        whole_s = left * a_byte_s
        while left > window and window * a_byte_s < self.round_trip_s:
            gaps_s += self.round_trip_s - window * a_byte_s
            left, window = left - window, 2 * window
        return whole_s + gaps_s


# Named as in the emulated WAN; see docs/wan.md.
LINKS = {
    "lan": WorkerLink(1000, 1000, 0.25),
    "links-20": WorkerLink(100, 100, 10),
    "links-60": WorkerLink(100, 100, 30),
    "links-150": WorkerLink(100, 100, 75),
    "consumer": WorkerLink(20, 20, 20),
}


def link_of(text: str) -> WorkerLink:
    """The link of a name, or of UP,DOWN,MS. Raises InputError."""
    if text in LINKS:
        return LINKS[text]
    try:
        up, down, latency = map(float, text.split(","))
    except ValueError:
        raise InputError(
            f"no link {text!r}{one_of(text, LINKS, 'there are')}; or give Mbit/s up and down and milliseconds one way, "
            "such as 20,100,30"
        ) from None
    return WorkerLink(up, down, latency)


SUBMIT_TRIPS = 2  # round trips of an update beside its bytes: header and offset; last piece and verdict
ORDER_TRIPS = 1  # the call for the next order, and the order
FETCH_TRIPS = 1  # for each file: its name, and its first byte


@dataclass(frozen=True)
class RunTiming:
    """Seconds of one worker's run."""

    first_s: float  # until it has versions 0
    training_s: float  # training in one round
    round_s: float
    rounds: int

    @property
    def seconds(self) -> float:
        return self.first_s + self.rounds * self.round_s

    @property
    def used(self) -> float:
        """Share of the rounds in which it trains."""
        return self.training_s / self.round_s


def timing_of(traffic: WorkerTraffic, settings: RoundSettings, link: WorkerLink, step_s: float) -> RunTiming:
    """Timing of one worker whose local step takes `step_s` seconds."""
    # A worker that waits sends, hears of the version that has its update, and fetches it, once for each fragment. One
    # that does not wait sends beside the next steps; only its fetching is not hidden. Computing of encodings and
    # merges, and replicas of unequal speed, are left out.
    trip_s, begin_s = link.round_trip_s, (ORDER_TRIPS + FETCH_TRIPS) * link.round_trip_s
    # features of a step travel beside the next one; in each round a part begins a step after the one before it
    travel_s = max(link.down_s(traffic.features), link.up_s(traffic.made)) / settings.steps_per_round
    step_s = max(step_s, travel_s)
    training_s = settings.steps_per_round * step_s
    sending_s = sum(link.up_s(up) + SUBMIT_TRIPS * trip_s for up in traffic.ups)
    fetching_s = sum(link.down_s(down) + begin_s for down in traffic.downs)
    fetching_s += sum(link.down_s(copy) + FETCH_TRIPS * trip_s for copy in traffic.copies)
    fetching_s += traffic.hops * (step_s + 2 * travel_s + trip_s)
    together_s = training_s + fetching_s
    round_s = max(together_s, sending_s) if settings.ahead else together_s + sending_s
    first_s = link.down_s(traffic.first) + len(traffic.downs) * begin_s + len(traffic.copies) * FETCH_TRIPS * trip_s
    return RunTiming(first_s, training_s, round_s, settings.rounds)


MERGED = 3  # tensors of a part that a merge holds beside the updates: their mean, the step, and the next version


def worker_memory(part: PartInventory, traffic: WorkerTraffic, settings: RoundSettings, activations: int = 0) -> int:
    """Bytes of a worker at its peak: the backward pass of a step, or the end of a round.

    activations: of one step, where they were measured.
    """
    # Beside the weights it holds the version that the round began with (`held` of trainer/rounds/cache.py). A lossy
    # codec adds its error feedback; a worker that does not wait adds its own last update, a base and the momentum of
    # its own updates.
    whole, lossy = part.weight_bytes, settings.codec != "fp32"
    rounds = whole * (1 + lossy + 3 * (settings.overlap != "none"))
    # Feedback: the update, the wanted and the decoded one, the rest. Saving: update, weights, payload twice.
    feedback = 4 * whole + traffic.up if lossy else 0
    encoding = max(feedback, 2 * whole + 2 * traffic.up)
    # Features of one step, decoded and encoded; those of the other steps are on the disk.
    form = part.reads
    features = form.step_bytes + form.sequences * form.positions * form.width * FP32_BYTES if form else 0
    stays = whole + part.optimizer_bytes + part.copied_bytes + features + rounds
    return stays + max(whole + activations, encoding)


def coordinator_memory(
    parts: Sequence[PartInventory], traffic: Sequence[WorkerTraffic], settings: RoundSettings
) -> int:
    """Bytes of the coordinator at its peak: while the largest part is merged."""
    wholes = [part.weight_bytes for part in parts]
    versions = sum(wholes) * (1 + (settings.outer == "nesterov"))  # and its momentum
    files = KEPT["whole"] * sum(wholes)
    if settings.down_codec != "fp32":
        # The workers' weights differ from those that the optimizer steps from, and travel as differences.
        versions += sum(wholes)
        files += KEPT["difference"] * sum(each.down for each in traffic)
    merging = max(
        settings.replicas * whole + MERGED * whole + each.up for whole, each in zip(wholes, traffic, strict=True)
    )
    return versions + files + merging
