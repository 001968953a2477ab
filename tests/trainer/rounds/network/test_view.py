import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from trainer.rounds.client import RoundsClient
from trainer.rounds.commands import framed, lines_of, show
from trainer.v1 import rounds_pb2, rounds_pb2_grpc


def run() -> rounds_pb2.WatchUpdate:
    """One of the workers is late, the other is gone."""
    part = rounds_pb2.PartStatus(name="block-0", round=3, replicas=2, present=1, arrived=1, seconds_left=4.4)
    part.losses["denoise_nats"] = 2.25
    late = rounds_pb2.WorkerStatus(
        worker="ann",
        device="cpu",
        doing=rounds_pb2.DOING_TRAINING,
        round=2,
        steps=7,
        late=True,
        accepted=2,
        busy_seconds=45,
        lived_seconds=50,
        sent_bytes=1_200_000,
        received_bytes=3_000_000,
    )
    gone = rounds_pb2.WorkerStatus(
        worker="bob", replica=1, gone=True, silent_seconds=61, refused=1, problem="refused: its norm is absurd"
    )
    return rounds_pb2.WatchUpdate(
        run="0123456789abcdef",
        state=rounds_pb2.RUN_STATE_RUNNING,
        rounds=9,
        parts=[part],
        workers=[late, gone],
        received_bytes=1500,
        sent_bytes=2_000_000,
        problem="the disk is full",
        seconds=100,
    )


def test_a_run_is_shown_as_two_tables() -> None:
    assert lines_of(run()) == [
        "run 0123456789ab  running  9 rounds",
        "1 of 2 workers present, 1 late, 1 gone  updates in 1.5 kB (15 B/s)  weights out 2 MB (20 kB/s)  in 100 s",
        "problem: the disk is full",
        "",
        "part     round  left  present  arrived  published  losses in nats",
        "block-0  3/9    4 s   1/2      1        -          denoise 2.250",
        "",
        "worker  part       device  state     round  step  busy  up      down  silent  accepted",
        "ann     block-0.0  cpu     training  2      7     90%   1.2 MB  3 MB  0 s     2              "
        "late: round 3 is open",
        "bob     block-0.1  -       gone      0      0     -     0 B     0 B   61 s    0 (1 refused)  "
        "refused: its norm is absurd",
    ]


def test_names_cannot_contain_terminal_commands() -> None:
    worker = rounds_pb2.WorkerStatus(worker="\x1b[2Jx", problem="\r\x1b]0;title\x07")
    last = lines_of(rounds_pb2.WatchUpdate(workers=[worker]))[-1]
    assert "�[2Jx" in last
    assert last.isprintable()


def test_the_terminal_is_redrawn_in_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert framed(["a" * 30, "b", "c", "d"], os.terminal_size((5, 4))) == (
        "\x1b[Haaaaa\x1b[K\nb\x1b[K\n... 2\x1b[K\n\x1b[J"
    )  # the last line stays free, else the terminal would scroll
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    show(["a", "b"], once=False)
    assert capsys.readouterr().out == "a\nb\n\n"


# Watching a run whose coordinator goes away: it is looked for again, and the outcome is shown.


RUNNING, STOPPING, FINISHED = (
    rounds_pb2.RUN_STATE_RUNNING,
    rounds_pb2.RUN_STATE_STOPPING,
    rounds_pb2.RUN_STATE_FINISHED,
)
Serve = Callable[..., grpc.Server]


class Shown(rounds_pb2_grpc.RoundsServiceServicer):
    """Sends the same states to every watcher."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        for state in self.states:
            yield rounds_pb2.WatchUpdate(state=state)


@pytest.fixture
def address(unused_port: int) -> str:
    return f"127.0.0.1:{unused_port}"


@pytest.fixture
def serve(address: str) -> Iterator[Serve]:
    """`serve(*states)`: what a coordinator shows before its stream ends; there is one at a time."""
    servers = list[grpc.Server]()

    def start(*states: Any) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        rounds_pb2_grpc.add_RoundsServiceServicer_to_server(Shown(*states), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(None).wait()


def test_watching_reconnects_to_a_restarted_coordinator(address: str, serve: Serve) -> None:
    first, link = serve(RUNNING, STOPPING), RoundsClient(address)
    updates = link.watch(0.1)
    assert [next(updates).state, next(updates).state] == [RUNNING, STOPPING]
    first.stop(None).wait()
    serve(RUNNING, FINISHED)
    assert [update.state for update in updates] == [RUNNING, FINISHED]
    link.close()


def test_the_exit_code_shows_whether_the_run_finished(address: str, serve: Serve, onesweep: Callable[..., Any]) -> None:
    first = serve(RUNNING, STOPPING)
    found = onesweep("train", "status", address, "--json", "--patience", 0)
    assert (found.code, found.message) == (1, f"the coordinator at {address} has stopped; gave up after 0 s")
    assert [json.loads(line)["state"] for line in found.out.splitlines()] == ["RUN_STATE_RUNNING", "RUN_STATE_STOPPING"]
    first.stop(None).wait()
    serve(FINISHED)
    assert onesweep("train", "status", address).code == 0
