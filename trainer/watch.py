"""Following a training that runs elsewhere on this machine, or at the end of a tunnel."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from stages.errors import ServiceError
from stages.transport import open_channel
from trainer.progress import Moment, State
from trainer.service import SERVICE
from trainer.v1 import training_pb2, training_pb2_grpc


async def follow(address: str, interval_s: float = 1.0) -> AsyncIterator[Moment]:
    """Moments of the training that listens at `address`, until it ends.

    Raises InputError for a bad address, ServiceError when nothing answers there or the training goes away.
    """
    async with open_channel(address) as channel:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        call = stub.Progress(training_pb2.ProgressRequest(interval_seconds=interval_s))
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
        state=State[name] if name in State.__members__ else State.RUNNING,
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
