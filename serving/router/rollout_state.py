"""The decisions of a deployment: which hosts get which release, and the reaction to each success and failure.

Nothing here calls a host, waits or reads a clock: the rollout passes events and the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from stages.wire.status import Code, StatusError, aborted, failed_precondition, invalid, unavailable

if TYPE_CHECKING:
    from serving.router.active_release import ActiveRelease
    from serving.router.host_link import HostLink

DRAIN_S = 30.0  # How long a deployment waits for requests on the previous release.
RETRY_S = 10.0  # Pause before retrying a host that could not be updated.
STORE_TRIES = 4  # Most tries of a transfer; each one resumes where the last was cut off.
# gRPC reports INTERNAL when the connection ends while a message is written.
INTERRUPTED = (Code.UNAVAILABLE, Code.DATA_LOSS, Code.INTERNAL)
# Codes with which a host refuses a release whose files are missing or damaged.
INCOMPLETE = (Code.NOT_FOUND, Code.FAILED_PRECONDITION)

# The states of a deployment, and of a delivery to one host: the events in each, and the state that follows.
ROLLOUT_STATES = {
    "rests": {"deployment begins": "receives", "rollback begins": "reverts"},
    "receives": {"files are here": "brings", "ends": "rests"},
    "brings": {"all hosts have it": "tries", "fails": "undoes"},
    "tries": {"it works": "prepared", "fails": "undoes"},
    "prepared": {"requests switch": "switched", "others switch": "follows", "fails": "undoes"},
    "follows": {"requests switch": "switched", "fails": "stays"},
    "switched": {"ends": "rests"},
    "undoes": {"ends": "rests"},
    "stays": {"ends": "rests"},
    "reverts": {"requests switch": "switched", "ends": "rests"},
}
DELIVERY_STATES = {
    "loads": {"loaded": "done", "files are lacking": "sends"},
    "sends": {"stored": "reloads", "cut off": "sends"},
    "reloads": {"loaded": "done"},
}


def unheld(links: Iterable[HostLink], used: Iterable[HostLink]) -> set[int]:
    """Blocks of the ring `links` that none of the hosts `used` holds."""
    return {block for link in links for block in link.entry.blocks}.difference(*(link.entry.blocks for link in used))


class Delivery:
    """Delivery of a release to one host: its files into the host's store, its weights into the host's memory."""

    def __init__(self, state: str) -> None:
        """:param state: "loads" if the host may have the files, "sends" if it may lack some."""
        self.state, self.tries, self.sent_bytes = state, 1, 0

    def change(self, event: str) -> None:
        """Follow DELIVERY_STATES. Raises KeyError for an event that the state does not allow."""
        self.state = DELIVERY_STATES[self.state][event]

    def refused(self, refusal: StatusError) -> None:
        """Choose the next step after a refusal. Raises the refusal if there is none."""
        if self.state == "loads" and refusal.code in INCOMPLETE:
            self.change("files are lacking")
        # bytes that arrived before a cut are still there: only the rest is sent
        elif self.state == "sends" and self.tries < STORE_TRIES and self.sent_bytes and refusal.code in INTERRUPTED:
            self.tries += 1
            self.change("cut off")
        else:
            raise refusal


class RolloutState:
    """A router's releases: the current one, the previous one, and the one being deployed."""

    def __init__(self, current: ActiveRelease, previous_name: str) -> None:
        self.current, self.previous_name = current, previous_name
        self.previous: ActiveRelease | None = None
        self.state = "rests"
        self.was_pinned = False  # before the deployment; if not, the router serves whatever the hosts hold
        self.incoming = ""  # the release being deployed
        self.joining: list[HostLink] = []  # hosts that receive it
        self.newly_loaded: list[HostLink] = []  # hosts that had none of it before: they drop it if the deployment fails
        # When to bring the current release to hosts that returned without it, by address; infinite: being brought.
        self.due_at: dict[str, float] = {}

    def change(self, event: str) -> None:
        """Follow ROLLOUT_STATES. Raises KeyError for an event that the state does not allow."""
        self.state = ROLLOUT_STATES[self.state][event]

    def begin(self, event: str) -> None:
        """Start a deployment. Raises StatusError while another is running."""
        if self.state != "rests":
            raise aborted("another deployment is in progress: try again when it is done")
        self.change(event)

    def offered(self, name: str, links: Sequence[HostLink], without: Collection[str]) -> bool:
        """False for the release already served. Raises StatusError if the hosts are not ready for another.

        :param without: names of hosts that may lack it for now."""
        if name == self.current.release:
            return False
        names = [link.entry.name for link in links]
        if unknown := [name for name in without if name not in names]:
            raise invalid(f"there is no host {unknown[0]!r} to leave out; the hosts are {', '.join(names)}")
        self.joining = [link for link in links if link.entry.name not in without]
        if lacking := unheld(links, self.joining):
            raise failed_precondition(f"without {', '.join(without)} no host holds block {min(lacking)}")
        # name a host that does not answer first: it is why those before it in the ring are not ready
        for link in sorted(self.joining, key=lambda link: link.relay.rtt_ms is not None):
            if link.problem:
                raise unavailable(
                    f"{link.problem}; fix that, or deploy with --without {link.entry.name}: it gets the release "
                    "when it comes back"
                )
        return True

    def received(self, name: str) -> None:
        """The files have arrived. Pin the served weights, because hosts will hold weights that nobody has tried."""
        self.change("files are here")
        there = [link for link in self.joining if link.info and name in {each.name for each in link.info.releases}]
        self.incoming, self.newly_loaded = name, [link for link in self.joining if link not in there]
        self.was_pinned = self.current.view.pinned
        if not self.was_pinned:
            self.current.name = self.current.release
            self.current.view.pin()

    @property
    def names(self) -> list[str]:
        """Releases to keep: the previous one and the current one."""
        return [name for name in (self.previous_name, self.current.release) if name]

    def is_quiet(self, waited_s: float) -> bool:
        """True once no request uses the previous release and no host is updating. Raises StatusError after DRAIN_S."""
        # neither a clock nor a host can know: `auto` opens sessions late, and only the router knows its requests
        busy = self.previous.requests if self.previous else 0
        updates = [*self.due_at.values()].count(math.inf)
        if (busy or updates) and waited_s >= DRAIN_S:
            raise aborted(
                f"{busy} requests still run on release {self.previous_name}, which this would remove, and "
                f"{updates} hosts are being updated: deploy again when they are done"
            )
        return not busy and not updates

    def switch(self, served: ActiveRelease) -> None:
        """Switch new requests to `served`; running ones end on the release that they began with."""
        before = self.current.release
        self.current.view.pin()
        self.current.name = before
        # the switch is one assignment here: hosts that had to agree on it could end up split
        self.previous, self.previous_name, self.current = self.current, before, served
        self.change("requests switch")

    def next_updates(self, links: Iterable[HostLink], now_s: float) -> list[HostLink]:
        """Hosts that returned without the current release and are due to get it now; marks them as in progress."""
        current = self.current
        if self.state != "rests" or current.directory is None or not current.view.pinned:
            return []
        there = [link for link in links if link.info is not None and link.relay.rtt_ms is not None]
        lacking = [link for link in there if current.view.weights not in link.held]
        due = [link for link in lacking if self.due_at.get(link.entry.address, now_s) <= now_s]
        self.due_at |= {link.entry.address: math.inf for link in due}
        return due

    def kept(self, link: HostLink) -> list[str]:
        """A host's name for the release that it must keep: the current one, or the newest if it lacks that. Another
        router may use that one, and the two would replace each other's for ever."""
        own = link.held.get(self.current.view.weights)
        return [each.name for each in ([own] if own else [*link.held.values()][-1:])]

    def other_release(self, link: HostLink) -> str:
        """A sentence about a newer release that another router brought to a host; empty without one."""
        if self.state != "rests" or (own := link.held.get(self.current.view.weights)) is None:
            return ""
        *_, newest = link.held.values()
        is_ours = newest is own or newest.name == self.previous_name  # a rollback leaves out hosts that are down
        return "" if is_ours else f"another router deployed release {newest.name} there: deploy it here, too"
