"""Weight exchange under a running service: all hosts load a release, a smoke test tries it, new requests use it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from serving.router.active_release import ActiveRelease, RouterParts, smoke_test
from serving.router.host_link import HostLink
from serving.router.ring import Ring
from serving.router.rollout_state import RETRY_S, ROLLOUT_STATES, Delivery, RolloutState, unheld
from serving.v1 import router_pb2
from stages.checkpoint.release_store import ReleaseManifest, ReleaseStore, read_release_manifest
from stages.checkpoint.release_transfer import ReleaseTransfer, manifest_of, receive_release, transfer_error
from stages.clock import monotonic
from stages.errors import CheckpointError, OnesweepError
from stages.host.plan import check_cut, plan_host
from stages.memory import trim
from stages.threads import cancelled, in_thread, run_to_completion
from stages.v1 import stage_pb2
from stages.wire.status import StatusError, aborted, failed_precondition, internal, invalid, unavailable

log = logging.getLogger(__name__)

POLL_S, WATCH_S = 0.05, 0.5
STORE_S, STORE_PAUSE_S = 3600.0, 1.0  # time for a transfer; pause before one that was cut off is retried
LOAD_S = 600.0
DROP_S = LOAD_S  # A host that is loading drops a release only afterwards

Report = Callable[[router_pb2.DeployProgress], object]


class Rollout(RolloutState):
    """A router's releases and the switch between them, as the state decides. Runs on the event loop."""

    def __init__(self, ring: Ring, current: ActiveRelease, store: ReleaseStore | None, checkpoint: Path | None) -> None:
        """:param checkpoint: the bundle that the router was started with."""
        super().__init__(current, next(reversed(store.in_use[:-1]), "") if store else "")
        self.ring, self.store, self.checkpoint = ring, store, checkpoint
        self._updates: set[asyncio.Task[None]] = set()  # of hosts that came back without the current release

    async def deploy(self, requests: AsyncIterator[router_pb2.DeployRequest], report: Report) -> router_pb2.Switch:
        """Receive a release, and switch requests to it. Raises StatusError, and then everything is as before."""
        if self.store is None:
            raise failed_precondition("the router has no release store: start it, and the hosts, with --releases DIR")
        async with self._under_way("deployment begins"):
            first = await anext(requests, None)
            if first is None or first.store.WhichOneof("step") != "offer":
                raise invalid("a deployment begins with an offer")
            name = manifest_of(first.store.offer).name
            if not self.offered(name, self.ring.links, first.without):
                return router_pb2.Switch(release=self.current.release, previous=self.previous_name)
            async for answer in receive_release(self.store, _stores(first, requests), lambda offer: lambda *_: True):
                report(router_pb2.DeployProgress(store=answer))
            self.received(name)
            if not self.was_pinned and self.current.name:  # now, and after a restart of the router
                await in_thread(self.store.use, [self.current.name])
            served = await self._bring_all(name, lambda line: report(router_pb2.DeployProgress(line=line)), first.tried)
            if first.together:
                report(router_pb2.DeployProgress(prepared=True))
                if await anext(requests, None) is None:
                    raise aborted("not all routers were ready to switch")
                self.change("others switch")
            await in_thread(self._own_store.use, [self.current.release, served.release])
            return await run_to_completion(self._make_current(served))

    async def rollback(self, report: Report) -> router_pb2.Switch:
        """Switch requests to the previous release, without hosts that are down. Raises StatusError if that fails."""
        async with self._under_way("rollback begins"):
            name = self.previous_name
            if not name:
                raise failed_precondition("there is no release to go back to: nothing was deployed here")
            # checked first: a host that loads it in vain would name it as its newest, as if it were deployed
            ring, begin_s = self.ring, monotonic()
            while lacking := unheld(ring.links, [link for link in ring.links if link.relay.rtt_ms is not None]):
                if monotonic() - begin_s > ring.settings.hop_timeout_s:
                    raise unavailable(f"no host that answers holds block {min(lacking)}: start one and roll back again")
                await asyncio.sleep(POLL_S)
            if (previous := self.previous) is None:  # after a restart of the router
                directory = await asyncio.to_thread(find_release, name, self.store, self.checkpoint)
                if directory is None:
                    raise failed_precondition(f"the files of release {name} are no longer here: deploy it again")
                previous = ActiveRelease.over(self.ring, await asyncio.to_thread(RouterParts.read, directory), name)
            contents = await asyncio.to_thread(_contents, previous.directory, name)
            # Stop bringing the current release to hosts: it would take the place of the one to load.
            await cancelled(self._updates)
            self.due_at.clear()  # a task that had not begun did not remove its entry
            # There is no new smoke test, and hosts that are down do not stop it: a rollback is for trouble, and these
            # weights were served before. A host that was started with them may use another name for them.
            names = [(link, link.held.get(previous.view.weights, previous).name) for link in self.ring.links]
            brought = (bring(link, name, contents, self.kept(link)) for link, name in names)
            outcomes = await asyncio.gather(*brought, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, StatusError):
                    report(router_pb2.DeployProgress(line=f"left out: {outcome.message}"))
            await previous.view.usable()
            await in_thread(self._own_store.use, [self.current.release, previous.release])
            return await run_to_completion(self._make_current(previous))

    @contextlib.asynccontextmanager
    async def _under_way(self, event: str) -> AsyncGenerator[None]:
        """Run one deployment at a time; if it fails, undo all its changes. Raises StatusError."""
        self.begin(event)
        try:
            yield
        except BaseException as error:
            if "fails" in ROLLOUT_STATES[self.state]:
                self.change("fails")
                await run_to_completion(self._undo())
            if isinstance(error, OnesweepError):
                raise transfer_error(error) from None
            raise
        finally:
            self.change("ends")

    async def keep_up_to_date(self) -> None:
        """Bring the current release to hosts that return without it, for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            for link in self.next_updates(self.ring.links, monotonic()):
                self._updates.add(task := asyncio.create_task(self._update(link, self.current)))
                task.add_done_callback(self._updates.discard)

    async def _update(self, link: HostLink, current: ActiveRelease) -> None:
        assert current.directory is not None
        pause_s = 0.0
        try:
            contents = await asyncio.to_thread(_contents, current.directory, current.name)
            log.info("sending release %s to host %s", current.name, link.entry.name)
            await bring(link, current.name, contents, self.kept(link))
        except (StatusError, OnesweepError) as error:
            pause_s = RETRY_S
            log.warning("host %s did not get release %s: %s", link.entry.name, current.name, error)
        finally:
            self.due_at[link.entry.address] = monotonic() + pause_s

    async def _bring_all(self, name: str, on_message: Callable[[str], object], tried: bool) -> ActiveRelease:
        """Bring a release to all hosts and try it. Raises StatusError."""
        directory = self._own_store.path(name)
        assert directory is not None
        plan = await asyncio.to_thread(plan_host, directory, (0,))
        check_cut(plan.parts, max((link.parts for link in self.joining), default=0))
        begin_s = monotonic()
        while not self.is_quiet(monotonic() - begin_s):
            await asyncio.sleep(POLL_S)
        contents = await asyncio.to_thread(read_release_manifest, directory)
        on_message(f"loading release {name} on {', '.join(link.entry.name for link in self.joining)}")

        async def give(link: HostLink) -> None:
            sent_bytes = await bring(link, name, contents, self.kept(link), "sends")
            on_message(f"{link.entry.name}: loaded, gated and warm ({sent_bytes / 1e6:.1f} MB sent)")

        own, *_ = await _all([in_thread(RouterParts.read, directory), *map(give, self.joining)])
        served = ActiveRelease.over(self.ring, own, name)
        await served.view.usable()
        self.change("all hosts have it")
        if not tried:
            await smoke_test(served, directory, on_message)
        had, has = ({*each.served_modes, *each.drawing_modes} for each in (self.current, served))
        if lost := had - has:
            on_message(f"it does not serve {', '.join(sorted(lost))}, which the previous release does")
        self.change("it works")
        return served

    async def _make_current(self, served: ActiveRelease) -> router_pb2.Switch:
        self.switch(served)
        log.info("release %s replaces %s", served.release, self.previous_name)
        if (verifier := self.ring.auditor.verifier) is not None:
            verifier.look_at(*(each.directory for each in (served, self.previous) if each and each.directory))
        await in_thread(self._own_store.remove_others, self.names)
        await in_thread(trim)
        return router_pb2.Switch(release=self.current.release, previous=self.previous_name, changed=True)

    async def _undo(self) -> None:
        newly_loaded = self.newly_loaded if self.state == "undoes" else []  # else other requests use it by now
        dropped = await asyncio.gather(*(drop(link, self.incoming) for link in newly_loaded), return_exceptions=True)
        for outcome in dropped:
            if isinstance(outcome, StatusError):
                log.warning("release %s may stay on a host: %s", self.incoming, outcome.message)
        names, is_pinned = self.names, self.was_pinned
        try:
            await in_thread(self._own_store.use, names if is_pinned else [])
        except CheckpointError:  # a full disk: the record of the served release stays as it was
            is_pinned = bool(self._own_store.in_use)
        await in_thread(self._own_store.remove_others, names)
        if not is_pinned:
            self.current.view.unpin()
            self.current.name = ""

    @property
    def _own_store(self) -> ReleaseStore:
        assert self.store is not None, "a router without a release store cannot switch"
        return self.store


def find_release(name: str, store: ReleaseStore | None, checkpoint: Path | None) -> Path | None:
    """Path of a release on the router's machine: in its store, or the bundle that it was started with."""
    return (store.path(name) if store else None) or (checkpoint if _contents(checkpoint, name) else None)


def _contents(directory: Path | None, name: str) -> ReleaseManifest | None:
    """The files of a release to send; None if the directory holds another release by now."""
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
    """Run all; when one fails, cancel the others and wait for their end before raising."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


# Delivery of a release to one host.


async def send(
    link: HostLink,
    contents: ReleaseManifest,
    assignment: stage_pb2.Assignment | None = None,
    delivery: Delivery | None = None,
) -> int:
    """Put a release into a host's store; returns the bytes sent. Raises StatusError.

    :param contents: with its directories.
    :param assignment: the stage of a host that was started without a checkpoint.
    """
    delivery = delivery or Delivery("sends")
    while delivery.state == "sends":
        transfer = ReleaseTransfer(contents, assignment=assignment)
        try:
            with _refusals(link):
                async for response in link.relay.stub.Store(transfer.requests(), timeout=STORE_S):
                    if response.stored:
                        delivery.change("stored")
                        break
                    transfer.on_response(response)
                else:
                    raise internal(f"{link.relay.host} did not confirm that it stored the release")
            delivery.sent_bytes += transfer.sent_bytes
        except StatusError as refusal:
            if transfer.failure:
                raise transfer_error(transfer.failure) from None
            delivery.sent_bytes += transfer.sent_bytes
            delivery.refused(refusal)
        finally:
            transfer.close()
        if delivery.state == "sends":  # it was cut off
            await asyncio.sleep(STORE_PAUSE_S)
    return delivery.sent_bytes


async def load(
    link: HostLink, name: str, keep: Sequence[str] = (), assignment: stage_pb2.Assignment | None = None
) -> None:
    """Have a host load a release from its store, and check what it holds then. Raises StatusError.

    :param assignment: the stage of a host that was started without a checkpoint; it loads after its answer.
    """
    with _refusals(link):
        request = stage_pb2.LoadRequest(release=name, keep=keep, assignment=assignment)
        await link.relay.stub.Load(request, timeout=LOAD_S)
        # a host with an assignment restarts its server before it can report what it holds
        if assignment is None:
            await link.describe()


async def bring(
    link: HostLink, name: str, contents: ReleaseManifest | None, keep: Sequence[str] = (), state: str = "loads"
) -> int:
    """Have a host load a release whose files it may lack or have damaged; returns the bytes sent. Raises
    StatusError.

    :param contents: None without files to send.
    :param state: of the delivery."""
    delivery = Delivery(state)
    while delivery.state != "done":
        if delivery.state == "sends" and contents is not None:
            await send(link, contents, delivery=delivery)
        try:
            await load(link, name, keep)
            delivery.change("loaded")
        except StatusError as refusal:
            if contents is None:
                raise
            delivery.refused(refusal)
    return delivery.sent_bytes


async def drop(link: HostLink, name: str) -> None:
    """Have a host drop a release. Raises StatusError."""
    with _refusals(link):
        await link.relay.stub.Drop(stage_pb2.DropRequest(release=name), timeout=DROP_S)
        await link.describe()  # else `status` would still name it


@contextlib.contextmanager
def _refusals(link: HostLink) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise link.relay.refusal(error, begin) from None
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        # the channel closed before or during a call, which gRPC reports as a cancellation
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise unavailable(f"{link.relay.host} was removed from the ring meanwhile: deploy again") from None
