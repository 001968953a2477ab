"""The read-only gRPC service that reports a running training's progress, and the client that follows it."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from onesweep.stages.errors import InputError, Interrupted, ServiceError
from onesweep.stages.wire.channel import bind, is_loopback, new_server, open_channel, parse_address
from onesweep.stages.wire.health import HealthChecks
from onesweep.stages.wire.status import CALLS, protocol_refusal
from onesweep.trainer.blocks.progress import Moment, Progress, TrainingState
from onesweep.trainer.v1 import training_pb2, training_pb2_grpc

SERVICE = training_pb2.DESCRIPTOR.services_by_name["TrainingService"].full_name
MAX_WATCHERS = 64
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 3600.0
FAREWELL_S = 2.0  # time for watchers to receive the end before the server stops

_STATES = {state: training_pb2.TrainingState.Value(f"TRAINING_STATE_{state.name}") for state in TrainingState}


class TrainingService(training_pb2_grpc.TrainingServiceServicer):
    """Streams moments of one `Progress` to any number of watchers, up to MAX_WATCHERS."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.watchers = 0

    async def Progress(
        self,
        request: training_pb2.ProgressRequest,
        context: grpc.aio.ServicerContext[training_pb2.ProgressRequest, training_pb2.ProgressUpdate],
    ) -> AsyncIterator[training_pb2.ProgressUpdate]:
        if (request.protocol or 1) != CALLS:
            await protocol_refusal(request.protocol, "the caller", "this training", CALLS, "calls").abort(context)
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_INTERVAL_S
        if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
            reason = f"interval_seconds must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}, not {interval}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        if self.watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watchers already; try again later")
        self.watchers += 1
        try:
            async for moment in self._changes(interval):
                yield to_update(moment)
        finally:
            self.watchers -= 1

    async def _changes(self, interval: float) -> AsyncIterator[Moment]:
        """Each new moment, at most one an interval; the end is sent at once."""
        loop = asyncio.get_running_loop()
        told, due = None, loop.time()
        # Polling: the training never waits for a watcher, and holds no lock for one.
        while told is None or not told.state.ended:
            now = self.progress.now
            if now is not told and (loop.time() >= due or now.state.ended):
                told, due = now, loop.time() + interval
                yield now
            await asyncio.sleep(MIN_INTERVAL_S)


def to_update(moment: Moment) -> training_pb2.ProgressUpdate:
    """A moment as its message; a time that is not finite is left out."""
    left = moment.seconds_left
    return training_pb2.ProgressUpdate(
        run=moment.run,
        step=moment.step,
        steps=moment.steps,
        losses=moment.losses,
        seconds_left=left if left is not None and math.isfinite(left) else None,
        state=_STATES[moment.state],
    )


@contextmanager
def listening(address: str | None, progress: Progress) -> Iterator[int | None]:
    """Serve `progress` on `address` (None: not at all) from a thread of its own; gives the port.

    Marks the end of the training, whatever it is. Raises InputError for an address that other machines can reach:
    there is no encryption here.
    """
    if address is None:
        yield None
        return
    parse_address(address, "--listen")
    if not is_loopback(address):
        raise InputError(
            f"--listen {address} can be reached from other machines and this service has no encryption; "
            "listen on 127.0.0.1:PORT and reach it through a tunnel such as ssh -L"
        )
    server = _ServerThread(address, progress)
    port = server.start()
    state = TrainingState.FAILED
    try:
        yield port
        state = TrainingState.FINISHED
    except (Interrupted, KeyboardInterrupt):
        state = TrainingState.STOPPED
        raise
    finally:
        progress.enter(state)
        server.stop()


def add_health(server: grpc.aio.Server, service: str) -> HealthChecks:
    """Health of the process and of its service, both serving, and reflection of them."""
    checks = HealthChecks()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (service, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    for name in ("", service):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return checks


class _ServerThread:
    """An asyncio server beside the training, which keeps the main thread."""

    def __init__(self, address: str, progress: Progress) -> None:
        self.address, self.service = address, TrainingService(progress)
        self._port: Future[int] = Future()
        self._ended = threading.Event()
        # A thread for the server: signals reach the main thread, where the run handles them.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="progress", daemon=True)

    def start(self) -> int:
        """Listen; return the port. Raises what binding raises."""
        self._thread.start()
        return self._port.result()

    def stop(self) -> None:
        """Let the watchers hear of the end, then go."""
        self._ended.set()
        self._thread.join(2 * FAREWELL_S)

    async def _serve(self) -> None:
        try:
            server = new_server()
            training_pb2_grpc.add_TrainingServiceServicer_to_server(self.service, server)
            state = add_health(server, SERVICE)
            port = bind(server, self.address)
            await server.start()
        except BaseException as error:
            self._port.set_exception(error)
            return
        self._port.set_result(port)
        while not self._ended.is_set():
            await asyncio.sleep(MIN_INTERVAL_S)
        state.stop()
        await server.stop(FAREWELL_S)


async def follow(address: str, interval_s: float = 1.0) -> AsyncIterator[Moment]:
    """Moments of the training that listens at `address`, until it ends.

    Raises InputError for a bad address, ServiceError when nothing answers there or the training goes away.
    """
    async with open_channel(address) as channel:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        call = stub.Progress(training_pb2.ProgressRequest(interval_seconds=interval_s, protocol=CALLS))
        try:
            async for update in call:
                yield _to_moment(update)
        except grpc.aio.AioRpcError as error:
            raise _explain(address, error) from None


def describe(moment: Moment) -> str:
    """One line for people."""
    losses = "  ".join(f"{name} {value:.3f}" for name, value in sorted(moment.losses.items()))
    left = "" if moment.seconds_left is None or moment.state.ended else f"  {_clock(moment.seconds_left)} left"
    name = f"{moment.run}  step {moment.step}/{moment.steps}  " if moment.run else ""
    return f"{name}{moment.state.value}{left}  {losses}".rstrip()


def _to_moment(update: training_pb2.ProgressUpdate) -> Moment:
    name = training_pb2.TrainingState.Name(update.state).removeprefix("TRAINING_STATE_")
    return Moment(
        run=update.run,
        step=update.step,
        steps=update.steps,
        losses=dict(update.losses),
        seconds_left=update.seconds_left if update.HasField("seconds_left") else None,
        state=TrainingState[name] if name in TrainingState.__members__ else TrainingState.RUNNING,
    )


def _explain(address: str, error: grpc.aio.AioRpcError) -> ServiceError:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return ServiceError(f"no training answers at {address}; start one with --listen {address}, or wait for it")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ServiceError(f"what listens at {address} is not a training: it has no {SERVICE}")
    return ServiceError(f"{address} answered {error.code().name}: {error.details()}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
