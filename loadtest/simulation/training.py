"""A training in virtual time: the real coordinator, ledger and store, and workers with scripted updates."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
from grpc import StatusCode

from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import Process, VirtualLoop
from loadtest.simulation.network import FaultyWorld
from loadtest.simulation.schedule import COORDINATOR, WORKERS, PlannedFault, Schedule
from loadtest.simulation.served import MemoryServer
from loadtest.simulation.world import ScheduleRun
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from stages.wire.status import DecodeErrors, with_decode_errors
from stages.wire.tokens import Keyring
from trainer.blocks.config import CodecName, RoundSettings, TrainingConfig
from trainer.blocks.data import Corpus, load_corpus
from trainer.rounds.client import RETRIABLE
from trainer.rounds.codecs import CODECS, scale
from trainer.rounds.coordinator import TICK_S, Coordinator
from trainer.rounds.publishing import Publisher
from trainer.rounds.service import RoundsService, WorkerAccess, ledger_of
from trainer.rounds.settings import PROTOCOL, CoordinatorSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import DATABASE, Store, audit, connect
from trainer.rounds.transfer import file_of, piece_of
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

T = TypeVar("T")

CODEC: CodecName = "int8"
ADDRESS = "10.0.2.1:7900"
ROUNDS, STEP_S, LEASE_S, POLL_S, CALL_S, PAUSE_S = 3, 0.4, 4.0, 2.0, 5.0, 0.3
BACK_LATER = StatusCode.ABORTED, StatusCode.ALREADY_EXISTS, StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAUTHENTICATED
PATIENCE_S = 120.0  # time limit of a run: the longest fault takes 20 s
CONFIG = TrainingConfig(
    architecture=Architecture(parts=2, layers=1, width=8, heads=2, context_length=16, code_dim=8, condition_dim=8),
    steps=ROUNDS,
    rounds=RoundSettings(steps_per_round=1, rounds=ROUNDS, replicas=2, robust="none", quorum=1.0, deadline_s=2.0),
)


@dataclass(frozen=True)
class Training:
    """A run before its start, read once for all schedules."""

    spec: RunSpec
    corpus: Corpus
    updates: dict[str, bytes]  # of each part, encoded

    @classmethod
    def made(cls, directory: Path) -> Self:
        """:param directory: for its text and manifest."""
        directory.mkdir()
        (directory / "text.txt").write_text("The sea was calm, and nobody saw the ship again. " * 400, encoding="utf-8")
        corpus = load_corpus(directory / "text.txt")
        spec = RunSpec.begin(CONFIG, corpus, directory / "run")
        updates = {part: CODECS[CODEC].encode(scale(weights, 0.01)) for part, weights in spec.initial().items()}
        return cls(spec, corpus, updates)


@dataclass
class WorkerDisk:
    """A worker's files, which outlive its process, and the updates that it knows are accepted."""

    done: int = -1  # the last round that it handed in or that was refused
    pending: rounds_pb2.Submission | None = None
    payload: bytes = field(default=b"", repr=False)
    accepted: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    ended: bool = False


class TrainingWorld(FaultyWorld):
    """The processes of one schedule: a coordinator and workers that dial it."""

    def __init__(self, loop: VirtualLoop, training: Training, directory: Path) -> None:
        super().__init__(loop)
        self.training, self.directory = training, directory
        self.disks = {name: WorkerDisk() for name in WORKERS}
        self.store: Store | None = None
        self.ended = asyncio.Event()
        self.network.places[ADDRESS] = COORDINATOR

    def start(self, name: str) -> None:
        process = self.new_process(name)
        if name == COORDINATOR:
            try:
                process.context.run(self._start_coordinator, process)
            except CheckpointError:  # a full disk ends it, and it is restarted
                self.network.kill(process)
                self.loop.call_later(PAUSE_S, self.revive, name)
        else:
            process.start(self._work(name, self.disks[name]))

    def change(self, fault: PlannedFault, begins: bool) -> None:
        self.close()  # else it would continue with its old data
        self.cut_power(self.directory)

    def _changed(self, change: Callable[..., T], *what: Any) -> T:  # noqa: ANN401
        base, log = (self.directory / f"{DATABASE}{end}" for end in ("", "-wal"))
        before = log.stat().st_size
        result = self.write(COORDINATOR, change, *what)
        if log.stat().st_size > before and (share := self.torn()) is not None:
            content, more = base.read_bytes(), log.read_bytes()
            try:
                self.tear()
            finally:  # closing the database changes both
                base.write_bytes(content)
                log.write_bytes(more[: before + int((len(more) - before) * share)])
        return result

    def _start_coordinator(self, process: Process) -> None:
        self.close()
        store = self.store = Store(self.directory)
        for what in ("commit", "save_members", "_save", "_remove"):
            setattr(store, what, partial(self._changed, getattr(store, what)))
        spec, corpus = self.training.spec, self.training.corpus
        settings = CoordinatorSettings(ADDRESS, self.directory, lease_s=LEASE_S, publish_every=1000)
        publisher = Publisher(spec, self.directory, corpus)
        coordinator = Coordinator(spec, corpus, ledger_of(spec, store), publisher, self.directory, settings)
        server: Any = MemoryServer(self.network, [DecodeErrors()])
        service = RoundsService(coordinator, WorkerAccess(Keyring(), False))
        rounds_pb2_grpc.add_RoundsServiceServicer_to_server(service, server)
        server.listen(ADDRESS)
        process.start(self._rounds(coordinator))

    async def _rounds(self, coordinator: Coordinator) -> None:
        while not coordinator.schedule.ended:
            await coordinator.step()
            await asyncio.sleep(TICK_S)
        self.ended.set()

    def close(self) -> None:
        if self.store is not None:
            self.store.database.close()

    async def _work(self, name: str, disk: WorkerDisk) -> None:
        """A worker like `onesweep train work`: an update has the same name in every try."""
        channel: Any = MemoryChannel(self.network, ADDRESS)
        stub: Any = rounds_pb2_grpc.RoundsServiceStub(with_decode_errors(channel))
        while not disk.ended:
            try:
                await self._in_one_place(name, disk, stub)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (*RETRIABLE, *BACK_LATER):
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _in_one_place(self, name: str, disk: WorkerDisk, stub: Any) -> None:  # noqa: ANN401
        spec = self.training.spec
        request = rounds_pb2.JoinRequest(
            worker=name, version=version("onesweep"), protocol=PROTOCOL, data=self.training.corpus.digest()
        )
        request.part = WORKERS.index(name) % len(spec.parts)
        place = await stub.Join(request, timeout=CALL_S)
        called = {"worker": name, "lease": place.lease}
        while True:
            if disk.pending is not None:
                disk.pending.lease = place.lease
                verdict = await self._submit(stub, disk)
                is_refused = verdict.outcome == rounds_pb2.OUTCOME_REFUSED
                (disk.refused if is_refused else disk.accepted).add(disk.pending.id)
                disk.refused -= disk.accepted  # a round that is ordered again has the same name
                disk.done, disk.pending = max(disk.done, disk.pending.round), None
            after = disk.done if disk.done >= 0 else None
            call = rounds_pb2.NextRequest(**called, after=after, wait_seconds=POLL_S)
            answer = await stub.Next(call, timeout=POLL_S + CALL_S)
            if answer.HasField("end"):
                disk.ended = True
                return
            if answer.HasField("order") and answer.order.steps:
                order, part = answer.order, spec.parts[place.part]
                await asyncio.sleep(STEP_S)
                disk.payload = self.training.updates[part]
                if ("lie", name) in self.network.states:
                    disk.payload = b"\xff" * len(disk.payload)  # not valid numbers
                file = file_of(disk.payload)
                disk.pending = rounds_pb2.Submission(
                    **called,
                    id=f"{name}-{order.round}",
                    round=order.round,
                    base_version=order.base.version,
                    steps=1,
                    sequences=1,
                    codec=CODEC,
                    size=file.size,
                    sha256=file.sha256,
                )

    async def _submit(self, stub: Any, disk: WorkerDisk) -> rounds_pb2.Verdict:  # noqa: ANN401
        offsets: asyncio.Queue[int] = asyncio.Queue()

        async def requests() -> AsyncIterator[rounds_pb2.SubmitRequest]:
            yield rounds_pb2.SubmitRequest(submission=disk.pending)
            offset = await offsets.get()
            if offset < len(disk.payload):
                yield rounds_pb2.SubmitRequest(piece=piece_of(disk.payload[offset:], offset))

        async for response in stub.Submit(requests(), timeout=CALL_S):
            if response.WhichOneof("step") == "verdict":
                return response.verdict
            offsets.put_nowait(response.offset)
        raise AssertionError("the coordinator gave no verdict")


async def train(world: TrainingWorld, schedule: Schedule) -> ScheduleRun:
    """Run a training to its end under a schedule's faults. Raises TimeoutError if it does not end."""
    for name in (COORDINATOR, *WORKERS):
        world.start(name)
    for fault in schedule.faults:
        world.loop.call_at(world.loop.now_s + fault.at_s, world.begin, fault)
    disks = world.disks.values()
    async with asyncio.timeout(PATIENCE_S):
        await world.ended.wait()
        while not all(disk.ended for disk in disks):
            await asyncio.sleep(TICK_S)
    found = audit(world.directory)
    with closing(connect(world.directory / DATABASE)) as database:  # the coordinator may be down
        known = {row[0] for row in database.execute("SELECT id FROM events WHERE kind = 'accepted'")}
    wrong = [f"{part} ends at version {n}" for part, n in found.versions.items() if n != ROUNDS]
    wrong += [f"update {each} was refused, but it is stored" for disk in disks for each in disk.refused & known]
    wrong += [f"update {each} was accepted, but it is not stored" for disk in disks for each in disk.accepted - known]
    return ScheduleRun([], [], None, [*found.problems, *wrong], world.network.events)
