"""A coordinator on the network: its gRPC service with access control and status, and the process of the run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from statistics import fmean
from typing import Any

from stages.clock import monotonic
from stages.errors import CheckpointError, Interrupted, RequestError
from stages.signals import raise_descriptor_limit, stop_on_signals
from stages.threads import in_thread
from stages.wire.auth import CLIENT, HOST, ROUTER, identity_of
from stages.wire.channel import bind, check_listen, new_server
from stages.wire.status import Code, Context, StatusError, data_loss, exhausted, invalid, permission_denied, unavailable
from stages.wire.tokens import STATUS, WORK, Keyring
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member
from trainer.rounds.parts import FEATURES
from trainer.rounds.publishing import Publisher
from trainer.rounds.settings import CoordinatorSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Store, open_store
from trainer.rounds.transfer import DamagedError, IncomingFile, piece_at
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

log = logging.getLogger(__name__)


MAX_WATCHERS = 64
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 3600.0
RETRY_MS = 2000
# Most open calls for one subject. More than one, because a call whose peer is gone lasts until keepalive notices.
MAX_CALLS = 4


class WorkerAccess:
    """Access control: by token with a token file, else by certificate if callers must present one, else open."""

    def __init__(self, keyring: Keyring, mutual: bool) -> None:
        """:param mutual: whether every caller presents a certificate of our authority."""
        self.keyring, self.mutual = keyring, mutual

    def check_scope(self, context: Context, scope: str) -> str | None:
        """The caller's name; None with open access. Raises StatusError."""
        if not self.keyring.open:
            return self.keyring.identify(context.invocation_metadata(), scope).name
        if not self.mutual:
            return None
        identity = identity_of(context)
        if identity is None or identity.role != CLIENT:
            shown = identity.uri if identity else "not from `onesweep certs`"
            problem = f"your certificate is {shown}: a worker needs role client (`onesweep certs issue client NAME`)"
            raise permission_denied(problem)
        return identity.name

    def check_worker(self, context: Context, worker: str) -> str:
        """The caller's key, empty with open access. Raises StatusError unless it may work as `worker`."""
        name = self.check_scope(context, WORK)
        if name is not None and worker != name and not worker.startswith(f"{name}."):
            problem = f"you are {name}: you may work only as {name} or {name}.SUFFIX, not as {worker[:80]!r}"
            raise permission_denied(problem)
        return name or ""


class NewestCalls:
    """Open calls by subject: only the newest call for a subject counts, and the others end when they notice."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[object]] = {}

    @contextmanager
    def begin(self, what: Hashable) -> Iterator[Callable[[], None]]:
        """Register a call during a `with` block. Raises StatusError if there are too many.

        Yields a function to call before each step, which raises StatusError once another call has begun.
        """
        identical, own = self._open.setdefault(what, []), object()
        if len(identical) >= MAX_CALLS:
            raise exhausted(f"{MAX_CALLS} identical calls are already open: end one, or try again later", RETRY_MS)
        identical.append(own)

        def check() -> None:
            if identical[-1] is not own:
                raise unavailable("a newer call has replaced this one")

        try:
            yield check
        finally:
            identical.remove(own)
            if not identical:
                del self._open[what]


class RoundsService(rounds_pb2_grpc.RoundsServiceServicer):
    """Turns messages into calls of a Coordinator, and errors into gRPC statuses."""

    def __init__(self, coordinator: Coordinator, access: WorkerAccess) -> None:
        self.coordinator, self.access = coordinator, access
        self.watchers = 0
        # Keyed by place, and by place and file.
        self._sending, self._fetching = NewestCalls(), NewestCalls()

    async def Join(self, request: rounds_pb2.JoinRequest, context: Context) -> rounds_pb2.JoinResponse:
        async with self._statuses():
            return await self.coordinator.join(request, self.access.check_worker(context, request.worker))

    async def Next(self, request: rounds_pb2.NextRequest, context: Context) -> rounds_pb2.NextResponse:
        async with self._statuses(context, request.worker):
            return await self.coordinator.next(request)

    async def Fetch(self, request: rounds_pb2.FetchRequest, context: Context) -> AsyncIterator[rounds_pb2.Piece]:
        async with self._statuses(context, request.worker):
            member, offset = self.coordinator.called(request.worker, request.lease), request.offset
            with self._fetching.begin((member.place, request.name)) as check:
                # looked up for each piece: a slow reader must not keep a file that is no longer offered
                while (piece := piece_at(await self.coordinator.read(request, offset), offset)) is not None:
                    check()
                    offset += len(piece.data)
                    self.coordinator.sent_bytes += len(piece.data)
                    yield piece

    async def Submit(
        self, requests: AsyncIterator[rounds_pb2.SubmitRequest], context: Context
    ) -> AsyncIterator[rounds_pb2.SubmitResponse]:
        async with self._statuses():
            header = await anext(aiter(requests), rounds_pb2.SubmitRequest())
            if header.WhichOneof("step") != "submission":
                raise invalid("a submission must begin with its header")
            submission = header.submission
            self.access.check_worker(context, submission.worker)
            member = self.coordinator.called(submission.worker, submission.lease)
            self.coordinator.intake.check(member, submission)
            if (verdict := self.coordinator.intake.early_verdict(member, submission)) is None:
                with self._sending.begin(member.place) as check:
                    intake = await in_thread(self.coordinator.intake.begin, member, submission)
                    yield rounds_pb2.SubmitResponse(offset=intake.offset)
                    await self._receive(requests, intake, submission, check)
                    check()
                    verdict = await self.coordinator.judge(submission, intake.read)
                    intake.drop()
            yield rounds_pb2.SubmitResponse(verdict=verdict)

    async def Pass(
        self, requests: AsyncIterator[rounds_pb2.PassRequest], context: Context
    ) -> AsyncIterator[rounds_pb2.PassResponse]:
        async with self._statuses():
            request = await anext(aiter(requests), rounds_pb2.PassRequest())
            if request.WhichOneof("step") != "passing":
                raise invalid("features must begin with a header")
            passing, features = request.passing, self.coordinator.features
            self.access.check_worker(context, passing.worker)
            member = self.coordinator.called(passing.worker, passing.lease)
            with self._sending.begin((FEATURES, member.place)) as check:
                intake = await in_thread(features.begin, member.place, passing.round)
                yield rounds_pb2.PassResponse(offset=intake.offset)
                await self._receive(requests, intake, passing, check, features.wake_readers)
                await in_thread(intake.sync)  # after this answer the worker hands in and never makes them again
            yield rounds_pb2.PassResponse(offset=intake.offset)

    async def Beat(self, request: rounds_pb2.BeatRequest, context: Context) -> rounds_pb2.BeatResponse:
        async with self._statuses(context, request.worker):
            return await self.coordinator.beat(request)

    async def Leave(self, request: rounds_pb2.LeaveRequest, context: Context) -> rounds_pb2.LeaveResponse:
        async with self._statuses(context, request.worker):
            return await self.coordinator.leave(request)

    async def Watch(self, request: rounds_pb2.WatchRequest, context: Context) -> AsyncIterator[rounds_pb2.WatchUpdate]:
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_INTERVAL_S
        async with self._statuses():
            self.access.check_scope(context, STATUS)
            if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
                raise invalid(f"interval_seconds must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}, not {interval}")
            if self.watchers >= MAX_WATCHERS:
                raise exhausted(f"already {MAX_WATCHERS} watchers; try again later", RETRY_MS)
        self.watchers += 1
        try:
            async with aclosing(self.coordinator.changes(interval)) as changes:
                async for _ in changes:
                    async with self.coordinator.ledger_lock:
                        status = status_of(self.coordinator)
                    yield status
                    if status.state != rounds_pb2.RUN_STATE_RUNNING:
                        return
        finally:
            self.watchers -= 1

    @asynccontextmanager
    async def _statuses(self, context: Context | None = None, worker: str = "") -> AsyncIterator[None]:
        """Turn an error raised inside into a status that ends the call. :param worker: the required caller."""
        try:
            if context is not None:
                self.access.check_worker(context, worker)
            yield
        except DamagedError as error:
            raise data_loss(str(error)) from None
        except RequestError as error:
            raise invalid(str(error)) from None
        except CheckpointError as error:
            self.coordinator.report(error)
            raise StatusError(Code.INTERNAL, str(error), RETRY_MS) from None  # not a full run's: who joins tries again

    async def _receive(
        self,
        requests: AsyncIterator[Any],  # SubmitRequest or PassRequest
        intake: IncomingFile,
        caller: rounds_pb2.Submission | rounds_pb2.Passing,
        check: Callable[[], None],
        stored: Callable[[], None] = lambda: None,
    ) -> None:
        """Store pieces until all have arrived. Raises StatusError, RequestError, CheckpointError."""
        while not intake.whole:
            request = await anext(aiter(requests), None)
            if request is None:
                raise invalid(f"the pieces ended after {intake.offset} of {intake.file.size} bytes")
            if request.WhichOneof("step") != "piece":
                raise invalid("only pieces may follow the header")
            check()
            self.coordinator.called(caller.worker, caller.lease)
            await in_thread(intake.write, request.piece)
            stored()
            self.coordinator.received_bytes += len(request.piece.data)


def status_of(coordinator: Coordinator) -> rounds_pb2.WatchUpdate:
    state = rounds_pb2.RUN_STATE_STOPPING if coordinator.stopping else rounds_pb2.RUN_STATE_RUNNING
    return rounds_pb2.WatchUpdate(
        run=coordinator.spec.run,
        state=rounds_pb2.RUN_STATE_FINISHED if coordinator.schedule.ended else state,
        rounds=coordinator.spec.rounds,
        parts=[_part(coordinator, index) for index in range(len(coordinator.spec.parts))],
        workers=[_worker(coordinator, member) for member in coordinator.members],
        received_bytes=coordinator.received_bytes,
        sent_bytes=coordinator.sent_bytes,
        problem=coordinator.problem or coordinator.unpublished,
        seconds=coordinator.clock() - coordinator.begun_s,
    )


def _part(coordinator: Coordinator, index: int) -> rounds_pb2.PartStatus:
    name, now = coordinator.spec.parts[index], coordinator.clock()
    round_, due = coordinator.ledger.round(name), coordinator.ledger.due_at(name)
    members = [member for member in coordinator.members if member.place.part == index]
    losses: dict[str, list[float]] = {}
    for member in members:
        for kind, nats in member.beat.losses.items():
            losses.setdefault(kind, []).append(nats)
    return rounds_pb2.PartStatus(
        part=index,
        name=name,
        round=round_,
        seconds_left=None if due is None else max(due - now, 0.0),
        replicas=coordinator.members.replicas,
        present=coordinator.members.present(index, now),
        arrived=sum(member.finished >= round_ for member in members),
        losses={kind: fmean(values) for kind, values in losses.items()},
        published=coordinator.publisher.published.get(name),
    )


def _worker(coordinator: Coordinator, member: Member) -> rounds_pb2.WorkerStatus:
    now, beat = coordinator.clock(), member.beat
    gone = not coordinator.members.is_present(member, now)
    return rounds_pb2.WorkerStatus(
        worker=member.worker,
        part=member.place.part,
        replica=member.place.replica,
        device=member.device,
        doing=beat.doing,
        round=beat.round,
        steps=beat.steps,
        silent_seconds=max(now - member.last_call_s, 0.0) if member.lease else 0.0,
        gone=gone,
        late=not gone and member.is_late(coordinator.ledger.round(coordinator.spec.parts[member.place.part])),
        accepted=member.accepted,
        refused=member.refused,
        losses=beat.losses,
        sent_bytes=beat.sent_bytes,
        received_bytes=beat.received_bytes,
        busy_seconds=beat.busy_seconds,
        lived_seconds=beat.lived_seconds,
        problem=member.problem,
    )


# The process

STORE = "rounds"
FAREWELL_S = 10.0  # time for workers to learn that the run is over
DRAIN_S = 5.0  # time for running calls when the coordinator stops
POLL_S = 0.05


def coordinate(config: TrainingConfig, corpus: Corpus, settings: CoordinatorSettings) -> RunSpec:
    """Run a coordinator to the end of its run. Raises OnesweepError; Interrupted on a request to stop.

    The checkpoint's folder `rounds` holds the state of the rounds.
    """
    raise_descriptor_limit()
    keyring, out = Keyring(settings.tokens), settings.out
    check_listen(settings.listen, settings.security)  # before anything is written
    if settings.security.tls is not None:
        settings.security.tls.own(HOST, ROUTER)
    spec = RunSpec.begin(config, corpus, out)
    with open_store(out / STORE) as store:
        ledger = ledger_of(spec, store)

        async def serve() -> None:
            coordinator = Coordinator(spec, corpus, ledger, Publisher(spec, out, corpus), out / STORE, settings)
            stop = stop_on_signals()
            async with open_port(coordinator, keyring) as port:
                log.info("run %s: %d rounds, live on port %d", spec.run[:12], spec.rounds, port)
                await _run(coordinator, stop)

        asyncio.run(serve())
    return spec


def ledger_of(spec: RunSpec, store: Store) -> Ledger:
    """The ledger of a run whose open rounds begin now, by a Coordinator's clock."""
    return Ledger(spec.config.rounds, spec.initial(), store, spec.run, monotonic())


@asynccontextmanager
async def open_port(coordinator: Coordinator, keyring: Keyring) -> AsyncIterator[int]:
    """Answer calls inside the block, on the yielded port; at its end, running calls get a while to finish.

    Raises InputError, ServiceError if it cannot listen.
    """
    settings = coordinator.settings
    mutual = settings.security.tls is not None and keyring.open
    server, service = new_server(), RoundsService(coordinator, WorkerAccess(keyring, mutual))
    rounds_pb2_grpc.add_RoundsServiceServicer_to_server(service, server)
    port = bind(server, settings.listen, settings.security, mutual)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(DRAIN_S)


async def _run(coordinator: Coordinator, stop: asyncio.Event) -> None:
    rounds, stopped = asyncio.create_task(coordinator.run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((rounds, stopped), return_when=asyncio.FIRST_COMPLETED)
        ends = monotonic() + FAREWELL_S * (rounds.done() and not rounds.exception())
        while monotonic() < ends and any(coordinator.members.is_present(m, monotonic()) for m in coordinator.members):
            await asyncio.sleep(POLL_S)  # until the present workers know of the end
    finally:
        coordinator.stop()
        if not rounds.done():
            rounds.cancel()  # a running merge still finishes
        stopped.cancel()
        await asyncio.gather(rounds, stopped, return_exceptions=True)
    if rounds.cancelled():
        raise Interrupted("stopped: everything is saved; start it again to resume")
    rounds.result()
