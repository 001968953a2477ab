"""Short real runs: what is right, wrong, refused, failed and lost is found as such."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import pytest

from loadtest.load.plan import LoadPlan, LoadSettings
from loadtest.load.run import result_of, run_load, start_generator
from loadtest.workload.caller import Access
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import AS_FOUND, Network, Testbed
from loadtest.workload.texts import Texts
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import ServiceError
from tests.conftest import PATIENCE_S

Settings = Callable[..., LoadSettings]


class Wordless(router_pb2_grpc.RouterServiceServicer):
    """A router that takes requests and never says anything."""

    def __init__(self) -> None:
        self.asked, self.closing = threading.Event(), threading.Event()

    def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        self.asked.set()
        self.closing.wait(PATIENCE_S)
        yield from ()


@pytest.fixture
def silence() -> Wordless:
    return Wordless()


@pytest.fixture
def wordless(silence: Wordless, locust: None) -> Iterator[str]:
    server, service = grpc.server(futures.ThreadPoolExecutor(8)), silence
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    service.closing.set()
    server.stop(None).wait()


def test_a_text_that_is_not_the_expected_one_is_wrong(settings: Settings, texts: Texts) -> None:
    texts.of("ar", [2])
    texts._known["ar", 2] = b"something else"
    result = run_load(settings(), texts, "ar", 2)
    both = (result.figures.counts, result.figures.outside)
    assert sum(counts.wrong for counts in both) > 0
    assert sum(counts.right + counts.wrong for counts in both) == sum(counts.requests for counts in both)
    assert "alone:      b'something else'" in result.wrong


class Scripted(Network):
    """Runs one command in place of every other."""

    script: tuple[str, ...] = ()

    def command(self, node: str, argv: list[str]) -> list[str]:
        return list(self.script) or argv


def somewhere(router: str, *script: str) -> Testbed:
    network = type("_", (Scripted,), {"script": script})(AS_FOUND, 0, 0)
    return Testbed(Access(router), network, None)  # type: ignore[arg-type]


def plan(address: str, **changes: Any) -> LoadPlan:
    few = (SeededPrompt("The sea was calm.", 0),)
    return replace(LoadPlan(Access(address), "sweep", 8, few, 2, 0.1, 0.5, 0.5, grace_s=0.5), **changes)


def test_a_request_without_answer_and_status_is_lost(wordless: str) -> None:
    nowhere = somewhere(wordless)
    with start_generator(nowhere, plan(wordless, warm_up_s=0.0, seconds=1.5)) as generator:
        recording = generator.drain()
    result = result_of(recording, Texts(nowhere, plan(wordless).cases, 8), "sweep", 2, interrupted=False)
    lost = result.figures.counts.lost + result.figures.outside.lost
    assert lost == len(recording.samples) > 0
    assert all(sample.latency_ms >= 950 for sample in recording.samples)


def test_open_requests_of_a_run_that_is_stopped_are_cut_and_not_lost(wordless: str, silence: Wordless) -> None:
    def press_ctrl_c() -> None:
        silence.asked.wait(PATIENCE_S)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    nowhere = somewhere(wordless)
    with start_generator(nowhere, plan(wordless, warm_up_s=0.0, seconds=60.0, timeout_s=60.0)) as generator:
        presser = threading.Thread(target=press_ctrl_c)
        presser.start()
        recording = generator.drain()
        presser.join()
    result = result_of(recording, Texts(nowhere, plan(wordless).cases, 8), "sweep", 2, generator.stopped)
    assert result.interrupted
    counts = (result.figures.counts, result.figures.outside)
    assert [sum(getattr(c, name) for c in counts) for name in ("requests", "cut", "lost")] == [2, 2, 0]


def test_a_generator_that_dies_is_an_error_and_no_figure(wordless: str) -> None:
    nowhere = somewhere(wordless, "sh", "-c", "echo broken >&2; exit 3")
    with (
        start_generator(nowhere, plan(wordless)) as generator,
        pytest.raises(ServiceError, match=r"the load generator ended \(exit code 3\): broken"),
    ):
        generator.drain()
