"""Exchanging the weights under a running service: all hosts load a release, it is tried, and new requests use it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from serving.router.active_release import ActiveRelease, RouterParts, smoke_test
from serving.router.host_link import HostLink
from serving.router.ring import Ring, RingView
from serving.v1 import router_pb2
from stages.checkpoint.release_store import ReleaseManifest, ReleaseStore, read_release_manifest
from stages.checkpoint.release_transfer import ReleaseTransfer, manifest_of, receive_release, transfer_error
from stages.errors import CheckpointError, OnesweepError
from stages.host.parts import plan_host
from stages.memory import trim
from stages.threads import cancelled, in_thread, to_its_end
from stages.v1 import stage_pb2
from stages.wire.status import StatusError, aborted, failed_precondition, internal, invalid, unavailable

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # How long a deployment waits for requests that still run on the release before the last.
POLL_S, WATCH_S = 0.05, 0.5
AGAIN_S = 10.0  # Pause before a host that could not be brought up to date is tried again.

STORE_S = 3600.0
# A transfer that is cut off begins again where it was, so many times at most.
STORE_TRIES, STORE_PAUSE_S = 4, 1.0
# gRPC says INTERNAL where the connection ends while a message is written.
CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL)
LOAD_S = 600.0
DROP_S = LOAD_S  # A host that is loading lets go of a release when it is done
# How a host refuses a release whose files it lacks, or has damaged ones of.
NOT_WHOLE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)

Tell = Callable[[router_pb2.DeployProgress], object]
Say = Callable[[str], object]


class Rollout:
    """The release that requests use, the one before, and the way from one to another. Lives on the event loop."""

    def __init__(self, ring: Ring, current: ActiveRelease, store: ReleaseStore | None, checkpoint: Path | None) -> None:
        """:param checkpoint: what the router was started with."""
        self.ring, self.current, self.store, self.checkpoint = ring, current, store, checkpoint
        self.previous_name = next(reversed(store.in_use[:-1]), "") if store else ""
        self._previous: ActiveRelease | None = None
        self._busy = False
        # Hosts that get the current release, by address.
        self._bringing: dict[str, asyncio.Task[None]] = {}

    async def deploy(self, requests: AsyncIterator[router_pb2.DeployRequest], tell: Tell) -> router_pb2.Switch:
        """Take a release in, and have requests use it. Raises StatusError; everything is as it was then."""
        if self.store is None:
            raise failed_precondition("the router has no release store: start it, and the hosts, with --releases DIR")
        with self._alone():
            first = await anext(requests, None)
            if first is None or first.store.WhichOneof("step") != "offer":
                raise invalid("a deployment begins with an offer")
            name = manifest_of(first.store.offer).name
            if name == self.current.release:
                return self._switch(changed=False)
            joining = self._joining(list(first.without))
            async for answer in receive_release(self.store, _stores(first, requests), lambda offer: lambda *_: True):
                tell(router_pb2.DeployProgress(store=answer))
            had = {each.entry.address for each in joining if each.info and name in {r.name for r in each.info.releases}}
            was_pinned = self.current.view.pinned
            try:
                await self._hold_on()
                served = await self._bring_all(
                    name, joining, lambda line: tell(router_pb2.DeployProgress(line=line)), first.tried
                )
                if first.together:
                    tell(router_pb2.DeployProgress(prepared=True))
                    if await anext(requests, None) is None:
                        raise aborted("not all routers were ready to switch")
                await self._note(served)
            except BaseException as error:
                loaded = [link for link in joining if link.entry.address not in had]
                await to_its_end(self._undo(name, loaded, was_pinned))
                if isinstance(error, OnesweepError):
                    raise transfer_error(error) from None
                raise
            return await to_its_end(self._make_current(served))

    async def rollback(self, tell: Tell) -> router_pb2.Switch:
        """Have requests use the release before, without hosts that are down. Raises StatusError where it cannot be."""
        with self._alone():
            name = self.previous_name
            if not name:
                raise failed_precondition("there is no release to go back to: nothing was deployed here")
            previous = self._previous or await self._revived(name)
            contents = await asyncio.to_thread(_contents, previous.directory, name)
            # No host gets the current release any more: it would take the place of what it is to load.
            await cancelled(self._bringing.values())
            self._bringing.clear()  # one that had not begun did not take itself away
            # The weights are not tried again, and hosts that are down are no obstacle: a rollback is for trouble, and
            # these weights were served before.
            outcomes = await asyncio.gather(
                *(bring(link, _name_at(link, previous), contents, self._kept(link)) for link in self.ring.links),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if isinstance(outcome, StatusError):
                    tell(router_pb2.DeployProgress(line=f"left out: {outcome.message}"))
            await previous.view.usable(self.ring.settings.hop_timeout_s)
            try:
                await self._note(previous)
            except OnesweepError as error:
                raise transfer_error(error) from None
            return await to_its_end(self._make_current(previous))

    async def keep_up_to_date(self) -> None:
        """Bring the current release to hosts that come back without it, for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            current = self.current
            if self._busy or current.directory is None or not current.view.pinned:
                continue
            for link in self.ring.links:
                answers = link.info is not None and link.relay.rtt_ms is not None
                if answers and current.view.weights not in link.held and link.entry.address not in self._bringing:
                    self._bringing[link.entry.address] = asyncio.create_task(self._update(link, current))

    async def _update(self, link: HostLink, current: ActiveRelease) -> None:
        assert current.directory is not None
        try:
            contents = await asyncio.to_thread(_contents, current.directory, current.name)
            log.info("host %s gets release %s", link.entry.name, current.name)
            await bring(link, current.name, contents)
        except (StatusError, OnesweepError) as error:
            log.warning("host %s does not get release %s: %s", link.entry.name, current.name, error)
            await asyncio.sleep(AGAIN_S)
        finally:
            del self._bringing[link.entry.address]

    async def _bring_all(self, name: str, joining: Sequence[HostLink], say: Say, tried: bool) -> ActiveRelease:
        """A release that all hosts have and that was tried. Raises StatusError."""
        assert self.store is not None
        directory = self.store.path(name)
        assert directory is not None
        plan = await asyncio.to_thread(plan_host, directory, (0,))
        if plan.parts != (due := max((link.parts for link in joining), default=0)):
            raise CheckpointError(
                f"its models are cut into {plan.parts} parts, these hosts share out {due}: cut it alike, "
                "or start the hosts anew with another topology"
            )
        await self._quiet()
        contents = await asyncio.to_thread(read_release_manifest, directory)
        say(f"loading release {name} on {', '.join(link.entry.name for link in joining)}")

        async def give(link: HostLink) -> None:
            sent_bytes = await send(link, contents)
            await load(link, name, self._kept(link))
            say(f"{link.entry.name}: loaded, gated and warm ({sent_bytes / 1e6:.1f} MB sent)")

        jobs = [give(link) for link in joining]
        own, *_ = await _all([in_thread(RouterParts.read, directory), *jobs])
        served = ActiveRelease.over(RingView(self.ring, plan.weights), own, name)
        await served.view.usable(self.ring.settings.hop_timeout_s)
        if not tried:
            await smoke_test(served, directory, say)
        had, has = ({*each.served_modes, *each.drawing_modes} for each in (self.current, served))
        if lost := had - has:
            say(f"it does not serve {', '.join(sorted(lost))}, which the release before does")
        return served

    async def _hold_on(self) -> None:
        # stay with what is served, here and when the router starts anew: hosts will hold what was not tried yet
        if self.current.view.pinned:
            return
        self.current.name = self.current.release
        self.current.view.pin()
        if self.current.name and self.store is not None:
            await in_thread(self.store.use, [self.current.name])

    async def _note(self, served: ActiveRelease) -> None:
        """Write down that `served` is to be served, for when the router starts anew. Raises CheckpointError."""
        if self.store is not None:
            await in_thread(self.store.use, [self.current.release, served.release])

    async def _make_current(self, served: ActiveRelease) -> router_pb2.Switch:
        """From here on new requests use `served`; those under way end on what they began with."""
        before, name = self.current.release, served.release
        self.current.view.pin()
        self.current.name = before
        # the switch is one assignment here: hosts that had to agree on it could end as a ring of two minds
        self._previous, self.previous_name, self.current = self.current, before, served
        log.info("release %s takes the place of %s", name, before)
        if (verifier := self.ring.auditor.verifier) is not None:
            verifier.look_at(*(each.directory for each in (served, self._previous) if each.directory))
        if self.store is not None:
            await in_thread(self.store.remove_others, [before, name])
        await in_thread(trim)
        return self._switch(changed=True)

    async def _undo(self, name: str, links: Sequence[HostLink], was_pinned: bool) -> None:
        """:param was_pinned: whether something had been deployed before; else what the hosts hold is served again."""
        assert self.store is not None
        for outcome in await asyncio.gather(*(drop(link, name) for link in links), return_exceptions=True):
            if isinstance(outcome, StatusError):
                log.warning("release %s may stay on a host: %s", name, outcome.message)
        names = [name for name in (self.previous_name, self.current.release) if name]
        try:
            await in_thread(self.store.use, names if was_pinned else [])
        except CheckpointError:  # a full disk: what it says is served stays so
            was_pinned = bool(self.store.in_use)
        await in_thread(self.store.remove_others, names)
        if not was_pinned:
            self.current.view.unpin()
            self.current.name = ""

    async def _quiet(self) -> None:
        """Return when nothing needs the release before the last any more. Raises StatusError."""
        # no clock and no host can tell: `auto` opens sessions late, and only the router knows its requests
        for _ in range(int(DRAIN_S / POLL_S)):
            if not self._bringing and not (self._previous and self._previous.requests):
                return
            await asyncio.sleep(POLL_S)
        busy = self._previous.requests if self._previous else 0
        raise aborted(
            f"{busy} requests still run on release {self.previous_name}, which would have to go, and "
            f"{len(self._bringing)} hosts are being brought up to date: deploy again when these are done"
        )

    async def _revived(self, name: str) -> ActiveRelease:
        """The release before, after the router was started anew. Raises StatusError."""
        try:
            directory = await asyncio.to_thread(find_release, name, self.store, self.checkpoint)
            if directory is None:
                raise failed_precondition(f"the files of release {name} are not here any more: deploy it again")
            plan, own = await asyncio.to_thread(lambda: (plan_host(directory, (0,)), RouterParts.read(directory)))
        except OnesweepError as error:
            raise transfer_error(error) from None
        return ActiveRelease.over(RingView(self.ring, plan.weights), own, name)

    def _joining(self, without: list[str]) -> list[HostLink]:
        names = [link.entry.name for link in self.ring.links]
        if unknown := [name for name in without if name not in names]:
            raise invalid(f"there is no host {unknown[0]!r} to do without; there are {', '.join(names)}")
        joining = [link for link in self.ring.links if link.entry.name not in without]
        for link in joining:
            if link.problem:
                raise unavailable(
                    f"{link.problem}; put that right, or deploy with --without {link.entry.name}: it gets the release "
                    "when it comes back"
                )
        return joining

    def beside(self, link: HostLink) -> str:
        """A sentence about a newer release on a host, which another router brought; empty where there is none."""
        if self._busy or (own := link.held.get(self.current.view.weights)) is None:
            return ""
        *_, newest = link.held.values()
        return "" if newest is own else f"another router brought release {newest.name} there: deploy it here, too"

    def _kept(self, link: HostLink) -> list[str]:
        """A host's name of the release that it must keep."""
        return [_name_at(link, self.current)] if self.current.view.weights in link.held else []

    def _switch(self, changed: bool) -> router_pb2.Switch:
        return router_pb2.Switch(release=self.current.release, previous=self.previous_name, changed=changed)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise aborted("another deployment is under way: try again when it is done")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def _name_at(link: HostLink, served: ActiveRelease) -> str:
    """A host's name of a release; one that it was started with may have another name there."""
    release = link.held.get(served.view.weights)
    return release.name if release else served.name


def find_release(name: str, store: ReleaseStore | None, checkpoint: Path | None) -> Path | None:
    """Path of a release on the router's machine: in its store, or the bundle it was started with."""
    return (store.path(name) if store else None) or (checkpoint if _contents(checkpoint, name) else None)


def _contents(directory: Path | None, name: str) -> ReleaseManifest | None:
    """The files to send of a release; None where they are another one's by now."""
    with contextlib.suppress(CheckpointError):
        if directory is not None and (contents := read_release_manifest(directory)).name == name:
            return contents
    return None


async def _stores(
    first: router_pb2.DeployRequest, rest: AsyncIterator[router_pb2.DeployRequest]
) -> AsyncIterator[stage_pb2.StoreRequest]:
    yield first.store
    async for request in rest:
        if not request.HasField("store"):
            return
        yield request.store


async def _all(jobs: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all; when one fails, the others are cancelled, and have ended when it is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        for done in asyncio.as_completed(tasks):
            await done
        return [task.result() for task in tasks]
    finally:
        await cancelled(tasks)


# Bringing a release to one host: its files into the host's store, its weights into the host's memory.


async def send(link: HostLink, contents: ReleaseManifest, assignment: stage_pb2.Assignment | None = None) -> int:
    """Put a release into a host's store; returns the bytes that were sent. Raises StatusError.

    :param contents: with its directories.
    :param assignment: the stage of a host that was started without a checkpoint.
    """
    sent_bytes, tries = 0, 0
    while True:
        delivery, tries = ReleaseTransfer(contents, assignment=assignment), tries + 1
        try:
            with _refusals(link):
                async for response in link.relay.stub.Store(delivery.requests(), timeout=STORE_S):
                    if response.stored:
                        return sent_bytes + delivery.sent_bytes
                    delivery.hear(response)
            raise internal(f"{link.relay.host} did not say that the release is stored")
        except StatusError as refusal:
            sent_bytes += delivery.sent_bytes
            if delivery.failure:
                raise transfer_error(delivery.failure) from None
            # what came before a cut is still there: only the rest is sent again
            if tries == STORE_TRIES or not sent_bytes or refusal.code not in CUT:
                raise
        finally:
            delivery.close()
        await asyncio.sleep(STORE_PAUSE_S)


async def load(
    link: HostLink, name: str, keep: Sequence[str] = (), assignment: stage_pb2.Assignment | None = None
) -> None:
    """Have a host load a release from its store, and look at what it holds then. Raises StatusError.

    :param assignment: the stage of a host that was started without a checkpoint; it loads after its answer.
    """
    with _refusals(link):
        request = stage_pb2.LoadRequest(release=name, keep=keep, assignment=assignment)
        await link.relay.stub.Load(request, timeout=LOAD_S)
        # such a host listens anew before it can say what it holds
        if assignment is None:
            await link.describe()


async def bring(link: HostLink, name: str, contents: ReleaseManifest | None, keep: Sequence[str] = ()) -> None:
    """Have a host load a release, whose files it may lack, or have damaged. Raises StatusError.

    :param contents: None where there are no files to send.
    """
    try:
        await load(link, name, keep)
    except StatusError as refusal:
        if refusal.code not in NOT_WHOLE or contents is None:
            raise
        await send(link, contents)
        await load(link, name, keep)


async def drop(link: HostLink, name: str) -> None:
    """Have a host let go of a release. Raises StatusError."""
    with _refusals(link):
        await link.relay.stub.Drop(stage_pb2.DropRequest(release=name), timeout=DROP_S)


@contextlib.contextmanager
def _refusals(link: HostLink) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise link.relay.refusal(error, begin) from None
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        # the channel was closed before a call, or under it, which gRPC calls a cancellation
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise unavailable(f"{link.relay.host} was taken out of the ring meanwhile: deploy again") from None
