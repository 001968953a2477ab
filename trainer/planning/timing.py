"""How long a run takes, and which share of that its workers train: the compute utilisation of the DiLoCo papers.

DiLoCo (arXiv 2311.08105) communicates once in H steps, so of a round of H t seconds of training, and c of
communication, a share H t / (H t + c) is used; Streaming DiLoCo (arXiv 2501.18512, compute utilisation, figure 4) and
eager updates (arXiv 2502.12996) hide c behind the next steps, and only what is longer than these is lost. The papers
reckon with an all-reduce among datacentres; here c is what a worker and a coordinator say to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.link import Link
from trainer.planning.traffic import Traffic
from trainer.rounds.settings import RoundSettings

SUBMIT_TRIPS = 2
"""Round trips of an update beside its bytes: header and offset; last piece and verdict."""
ORDER_TRIPS = 1
"""Next, and its order."""
FETCH_TRIPS = 1
"""Of each file: its name, and its first byte."""


@dataclass(frozen=True)
class Timing:
    """Of one worker."""

    first_s: float
    """Until it has versions 0."""
    training_s: float
    """Of one round."""
    round_s: float
    rounds: int

    @property
    def seconds(self) -> float:
        return self.first_s + self.rounds * self.round_s

    @property
    def used(self) -> float:
        """Share of the rounds in which it trains."""
        return self.training_s / self.round_s


def timing_of(traffic: Traffic, settings: RoundSettings, link: Link, step_s: float) -> Timing:
    """:param step_s: seconds of one local step of this worker.

    Who waits sends, hears of the version that has its update, and fetches it, once for each fragment. Who does not
    wait sends beside the next steps; what it fetches before these is not hidden. Computing on either side, and
    replicas of a part that are not equally fast, are left out.
    """
    trip_s, begin_s = link.round_trip_s, (ORDER_TRIPS + FETCH_TRIPS) * link.round_trip_s
    training_s = settings.steps_per_round * step_s
    sending_s = sum(link.up_s(up) + SUBMIT_TRIPS * trip_s for up in traffic.ups)
    fetching_s = sum(link.down_s(down) + begin_s for down in traffic.downs)
    refresh_s = sum(link.down_s(copy) + FETCH_TRIPS * trip_s for copy in traffic.copies)
    fetching_s += refresh_s / settings.copies_every
    if traffic.features:
        fetching_s += link.down_s(traffic.features) + FETCH_TRIPS * trip_s
    together_s = training_s + fetching_s
    round_s = max(together_s, sending_s) if settings.ahead else together_s + sending_s
    first_s = link.down_s(traffic.first) + len(traffic.downs) * begin_s + len(traffic.copies) * FETCH_TRIPS * trip_s
    return Timing(first_s, training_s, round_s, settings.rounds)
