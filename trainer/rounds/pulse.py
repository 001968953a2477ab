"""A worker's sign of life, given beside its training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import grpc

from trainer.rounds.client import Link
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

BEATS_A_LEASE = 3
BEAT_S = 2.0
"""At least so often: who watches sees no older state."""


class Pulse:
    """Beats until it is stopped. What the coordinator answers is there to be looked at."""

    def __init__(self, link: Link, lease_s: float, report: Callable[[], rounds_pb2.BeatRequest]) -> None:
        """:param report: what to say; called on the pulse's thread."""
        self.open_rounds: list[int] = []
        """Of the fragments; none before the first answer."""
        self.ended = self.lost = False
        """Whether the run is over; whether the place went to another."""
        self._link, self._every_s, self._report = link, min(lease_s / BEATS_A_LEASE, BEAT_S), report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2.0)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                answer = self._link.beat(self._report())
            except grpc.RpcError as error:
                self.lost = self.lost or _code(error) is grpc.StatusCode.ABORTED
            except ValueError:  # the channel is being renewed
                continue
            else:
                self.open_rounds, self.ended = list(answer.open_rounds), answer.ended


def _code(error: object) -> grpc.StatusCode | None:
    code = getattr(error, "code", None)
    return code() if code else None
