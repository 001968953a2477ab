"""What a host tells of its work as it happens; these do not listen, which is all that a host without --metrics pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.refusal import Refusal

if TYPE_CHECKING:
    from stages.engine import Job


class LinkMeter:
    """Hears what one link carries."""

    def sent(self, size_bytes: int) -> None:
        """A hop left."""

    def handed_over(self, seconds: float) -> None:
        """A hop's receipt came, so long after it was given to the link."""


class HostMeter:
    """Hears what a host does. `taken` is called by whoever computes, all others on the event loop."""

    def link(self, address: str) -> LinkMeter:
        """Who hears of the link to `address`."""
        return LinkMeter()

    def taken(self, jobs: Sequence[Job]) -> None:
        """A pass begins with a piece of each of these."""

    def ended(self, job: Job) -> None:
        """A hop has its result, in the state in which it leaves."""

    def refused(self, refusal: Refusal) -> None:
        """A hop was not accepted."""

    def faulted(self, refusal: Refusal) -> None:
        """A request was given up after its hop was accepted."""
