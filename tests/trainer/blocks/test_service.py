"""The service over a real socket, with real clients."""

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from onesweep.stages.errors import InputError, Interrupted, ServiceError
from onesweep.trainer.blocks import service
from onesweep.trainer.blocks.progress import Moment, Progress, TrainingState
from onesweep.trainer.blocks.service import SERVICE, describe, follow, listening, to_update
from onesweep.trainer.v1 import training_pb2, training_pb2_grpc


@pytest.fixture
def progress() -> Progress:
    progress = Progress()
    progress.begin("block-0", 0, 10)
    return progress


@pytest.fixture
def served(progress: Progress) -> Iterator[str]:
    with listening("127.0.0.1:0", progress) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def channel(served: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served) as channel:
        yield channel


async def collect(address: str, interval: float = 0.05) -> list[Moment]:
    return [moment async for moment in follow(address, interval)]


def watch(address: str, interval: float = 0.05) -> list[Moment]:
    return asyncio.run(collect(address, interval))


def test_a_watcher_sees_the_training_to_its_end(progress: Progress) -> None:
    started = threading.Event()

    def train() -> None:
        started.wait(10)
        for step in range(1, 11):
            progress.reach(step)
            progress.record({"next_byte_nats": 5.0 / step})
            threading.Event().wait(0.03)

    with ThreadPoolExecutor() as pool:
        with listening("127.0.0.1:0", progress) as port:
            seen = [pool.submit(watch, f"127.0.0.1:{port}") for _ in range(3)]
            started.set()
            train()
        for future in seen:
            moments = future.result(10)
            assert [m.step for m in moments] == sorted(m.step for m in moments)
            assert len(moments) >= 2
            last = moments[-1]
            assert (last.run, last.step, last.steps, last.state) == ("block-0", 10, 10, TrainingState.FINISHED)
            assert last.losses == {"next_byte_nats": 0.5}


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Interrupted("stop"), TrainingState.STOPPED),
        (KeyboardInterrupt(), TrainingState.STOPPED),
        (ValueError(), TrainingState.FAILED),
    ],
)
def test_how_it_ended_is_told(progress: Progress, error: BaseException, state: TrainingState) -> None:
    def train() -> None:
        with listening("127.0.0.1:0", progress) as port:
            seen.append(pool.submit(watch, f"127.0.0.1:{port}"))
            threading.Event().wait(0.5)
            raise error

    seen: list[Future[list[Moment]]] = []
    with ThreadPoolExecutor() as pool:
        with pytest.raises(type(error)):
            train()
        assert seen[0].result(10)[-1].state is state


def test_updates_are_not_more_frequent_than_asked(progress: Progress) -> None:
    with ThreadPoolExecutor() as pool:
        with listening("127.0.0.1:0", progress) as port:
            seen = pool.submit(watch, f"127.0.0.1:{port}", 3600.0)
            for step in range(1, 8):
                threading.Event().wait(0.06)
                progress.reach(step)
        assert len(seen.result(10)) == 2, "the first and the end"


@pytest.mark.parametrize("interval", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_bad_interval_is_refused(served: str, channel: grpc.Channel, interval: float) -> None:
    stub = training_pb2_grpc.TrainingServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(stub.Progress(training_pb2.ProgressRequest(interval_seconds=interval), timeout=10)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(ServiceError, match=r"interval_seconds must be from 0.05 to 3600"):
        watch(served, interval)


def test_another_protocol_is_refused_by_name(channel: grpc.Channel) -> None:
    stub = training_pb2_grpc.TrainingServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="this training protocol 1: upgrade onesweep on this training") as caught:
        next(stub.Progress(training_pb2.ProgressRequest(protocol=2), timeout=10))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_no_interval_means_one_second(channel: grpc.Channel) -> None:
    stub = training_pb2_grpc.TrainingServiceStub(channel)
    call = stub.Progress(training_pb2.ProgressRequest(), timeout=10)
    assert next(iter(call)).run == "block-0"
    call.cancel()


def test_too_many_watchers_are_refused_until_one_leaves(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_WATCHERS", 1)
    stub = training_pb2_grpc.TrainingServiceStub(channel)
    first = stub.Progress(training_pb2.ProgressRequest(), timeout=20)
    assert next(iter(first)).run == "block-0"
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(stub.Progress(training_pb2.ProgressRequest(), timeout=10)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()

    def again() -> bool:
        try:
            return next(iter(stub.Progress(training_pb2.ProgressRequest(), timeout=10))).run == "block-0"
        except grpc.RpcError:
            return False

    assert any(again() or threading.Event().wait(0.1) for _ in range(50))


def test_health_and_reflection_are_there(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    assert SERVICE in {found.name for found in answer.list_services_response.service}


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:7000", "[::]:0", "example.org:80"])
def test_addresses_that_others_can_reach_are_refused(progress: Progress, address: str) -> None:
    with pytest.raises(InputError, match=r"has no encryption; listen on 127.0.0.1:PORT"), listening(address, progress):
        pass


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", "127.0.0.1:99999", ":7000"])
def test_what_is_no_address_is_refused(progress: Progress, address: str) -> None:
    with pytest.raises(InputError, match="must be HOST:PORT"), listening(address, progress):
        pass


def test_a_port_in_use_is_told(progress: Progress) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServiceError, match="port is in use"), listening(f"127.0.0.1:{port}", progress):
            pass


def test_without_an_address_nothing_listens(progress: Progress) -> None:
    with listening(None, progress) as port:
        assert port is None


def test_a_time_that_is_not_known_is_left_out() -> None:
    assert not to_update(Moment(seconds_left=math.inf)).HasField("seconds_left")
    assert to_update(Moment(seconds_left=0.0)).HasField("seconds_left")


# Watching what is not there


def test_nobody_there_is_told(unused_port: int) -> None:
    address = f"127.0.0.1:{unused_port}"
    with pytest.raises(ServiceError, match=f"no training answers at {address}; start one with --listen"):
        watch(address)


def test_another_service_is_told() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(ServiceError, match=r"is not a training: it has no trainer.v1.TrainingService"):
        watch(f"127.0.0.1:{port}")
    server.stop(None)


@pytest.mark.parametrize(
    ("moment", "line"),
    [
        (Moment(), "starting"),
        (
            Moment("ar", 5, 10, {"b_nats": 1.23456, "a_nats": 2.0}, 3725.2, TrainingState.RUNNING),
            "ar  step 5/10  running  1:02:05 left  a_nats 2.000  b_nats 1.235",
        ),
        (Moment("ar", 10, 10, {}, 0.0, TrainingState.FINISHED), "ar  step 10/10  finished"),
        (Moment("ar", 9, 10, {}, 61.0, TrainingState.RUNNING), "ar  step 9/10  running  1:01 left"),
    ],
)
def test_a_moment_is_one_line(moment: Moment, line: str) -> None:
    assert describe(moment) == line


def test_the_command_watches_to_the_end(progress: Progress, onesweep: Callable[..., Any]) -> None:
    with ThreadPoolExecutor() as pool:
        with listening("127.0.0.1:0", progress) as port:
            seen = pool.submit(watch, f"127.0.0.1:{port}")
            threading.Event().wait(0.3)
        seen.result(10)
    outcome = onesweep("train", "watch", f"127.0.0.1:{port}")
    assert (outcome.code, outcome.out) == (1, "")
    assert "no training answers" in outcome.message


def test_time_left_follows_the_pace(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("onesweep.trainer.blocks.progress.time.monotonic", lambda: now[0])
    progress = Progress()
    assert progress.now == Moment()
    progress.begin("block-1", step=10, steps=40)
    assert progress.now.seconds_left is None
    now[0] = 120.0
    progress.reach(20)
    assert progress.now == Moment("block-1", 20, 40, {}, 40.0, TrainingState.RUNNING)


def test_losses_are_the_last_of_each_name() -> None:
    progress = Progress()
    progress.begin("ar", 0, 10)
    progress.record({"a_nats": 2.0, "b_nats": 1.0})
    first = progress.now
    progress.record({"a_nats": 1.5})
    assert progress.now.losses == {"a_nats": 1.5, "b_nats": 1.0}
    assert first.losses == {"a_nats": 2.0, "b_nats": 1.0}, "a moment that was read does not change"
    progress.begin("next", 0, 10)
    assert progress.now.losses == {}


def test_which_states_are_ends() -> None:
    assert {state for state in TrainingState if state.ended} == {
        TrainingState.FINISHED,
        TrainingState.STOPPED,
        TrainingState.FAILED,
    }
