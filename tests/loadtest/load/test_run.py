"""Short real runs: what is right, wrong, refused, failed and lost is found as such."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import pytest

from loadtest.load.plan import LoadPlan, LoadSettings, Outcome
from loadtest.load.run import judge, recorded, run_load
from loadtest.workload.caller import Access
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import AS_FOUND, Network, Testbed
from loadtest.workload.texts import Texts
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import ServiceError
from tests.conftest import PATIENCE_S

Settings = Callable[..., LoadSettings]


class Wordless(router_pb2_grpc.RouterServiceServicer):
    """A router that takes requests and never answers."""

    def __init__(self) -> None:
        self.closing = threading.Event()

    def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        self.closing.wait(PATIENCE_S)
        yield from ()


@pytest.fixture
def wordless(locust: None) -> Iterator[str]:
    server, service = grpc.server(futures.ThreadPoolExecutor(8)), Wordless()
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    service.closing.set()
    server.stop(None).wait()


def test_an_unexpected_text_is_wrong(settings: Settings, texts: Texts) -> None:
    texts.of("ar", [2])
    texts._known["ar", 2] = b"something else"
    result = run_load(settings(), texts, "ar", 2)
    both = (result.metrics.counts, result.metrics.outside)
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


def test_a_request_without_an_answer_is_lost(wordless: str) -> None:
    samples = recorded(somewhere(wordless), plan(wordless, warm_up_s=0.0, seconds=1.5)).samples
    assert len(samples) > 0
    assert {outcome for _, outcome in judge(samples, {})} == {Outcome.LOST}
    assert all(sample.latency_ms >= 950 for sample in samples)


def test_a_load_generator_that_dies_is_an_error(wordless: str) -> None:
    nowhere = somewhere(wordless, "sh", "-c", "echo broken >&2; exit 3")
    with pytest.raises(ServiceError, match=r"the load generator exited with code 3: broken"):
        recorded(nowhere, plan(wordless))
