"""Features over real calls: the weights of one process, also if workers stop or are replaced."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stages.errors import Interrupted
from tests.conftest import PATIENCE_S, refused, until
from tests.trainer.rounds.network.calls import Start
from tests.trainer.small import corpus, rounds_config
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.client import FileGoneError
from trainer.rounds.service import STORE
from trainer.rounds.store import audit
from trainer.rounds.transfer import file_of, piece_of
from trainer.v1 import rounds_pb2

# Two parts with a worker each, three rounds of two steps.
scorer = replace(rounds_config, rounds=replace(rounds_config.rounds, model="scorer", replicas=1))
three = replace(scorer.architecture, parts=3, layers=1)
larger = replace(scorer, architecture=three, rounds=replace(scorer.rounds, replicas=2))


@pytest.mark.parametrize("config", [scorer, larger])
def test_workers_make_the_weights_of_one_process(network: Start, config: TrainingConfig) -> None:
    """At any speed, for each round begins when all have made the one before."""
    net, replicas = network(config), config.rounds.replicas
    parts = [part for part in range(config.architecture.parts) for _ in range(replicas)]
    assert net.work_together(*parts) == [3] * len(parts)
    net.check_weights()
    kept = {path.name for path in (net.out / STORE / "features").iterdir()}
    assert all(int(name.rpartition("-")[2]) >= 1 for name in kept), "those of rounds long closed are removed"


@dataclass(frozen=True)
class CountedCorpus(Corpus):
    """Counts a worker's steps, and asks it to stop in the third."""

    begun: list[int] = field(default_factory=list)
    stop: threading.Event | None = None

    def batch(self, seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
        self.begun.append(step)
        if self.stop is not None and len(self.begun) == 3:
            self.stop.set()
        return super().batch(seed, step, sequences, length)


def counted(stop: threading.Event | None = None) -> CountedCorpus:
    return CountedCorpus(corpus.name, corpus.train, corpus.valid, stop=stop)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_worker_stopped_in_a_round_resumes_it(network: Start, stopped: int) -> None:
    net = network(scorer)
    texts = [counted(net.stop if i == stopped else None) for i in range(2)]
    steps = []
    for until_the_end in (False, True):
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(net.work, f"w{i}", text, part=i) for i, text in enumerate(texts)]
            for job in jobs:
                if until_the_end:
                    job.result(PATIENCE_S)
                else:
                    with pytest.raises(Interrupted):
                        job.result(PATIENCE_S)
        steps.append([len(text.begun) for text in texts])
        net.stop.clear()
        texts = [counted(), counted()]
    assert [first + second for first, second in zip(*steps, strict=True)] == [6, 6], "three rounds of two, none twice"
    net.check_weights()


def test_workers_that_take_over_train_the_whole_round(network: Start) -> None:
    """The state of both is lost in the middle of a round; features that had come are read again."""
    net = network(scorer)
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(net.work, f"w{i}", text, part=i) for i, text in enumerate((None, counted(net.stop)))]:
            with pytest.raises(Interrupted):
                job.result(PATIENCE_S)
        net.stop.clear()
        for job in [pool.submit(net.work, f"new{i}", part=i) for i in range(2)]:
            job.result(PATIENCE_S)
    until(lambda: net.over)
    assert audit(net.out / "rounds").problems == []


def test_a_restarted_coordinator_keeps_received_features(network: Start, tmp_path: Path) -> None:
    net = network(scorer)
    first = net.join("first", part=0)

    def passed(lease: str, pieces: Any) -> Any:
        passing = rounds_pb2.Passing(worker="first", lease=lease, round=0)
        yield rounds_pb2.PassRequest(passing=passing)
        yield from (rounds_pb2.PassRequest(piece=piece) for piece in pieces)

    made = bytes(range(200))
    answers = net.stub.Pass(passed(first.lease, [piece_of(made, 0)]), timeout=PATIENCE_S)
    assert next(answers).offset == 0
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        next(answers)
    net.end()
    net = network(scorer)
    first, second = net.join("first", part=0), net.join("second", part=1)
    answer = next(iter(net.stub.Pass(passed(first.lease, []), timeout=PATIENCE_S)))
    assert answer.offset == len(made)
    fetch = rounds_pb2.FetchRequest(worker="second", lease=second.lease, name="features-0", offset=50)
    piece = next(iter(net.stub.Fetch(fetch, timeout=PATIENCE_S)))
    assert (piece.offset, piece.data) == (50, made[50:])
    with pytest.raises(FileGoneError):
        net.link().fetch(file_of(b"dropped", "p-0"), "second", second.lease, tmp_path / "p-0")


@pytest.mark.parametrize(
    ("worker", "requests", "code", "message"),
    [
        (0, [rounds_pb2.PassRequest(piece=piece_of(b"x", 0))], "INVALID_ARGUMENT", "features must begin with a header"),
        (0, [rounds_pb2.Passing(round=1)], "INVALID_ARGUMENT", "no worker reads the features of stage-0 in round 1"),
        (1, [rounds_pb2.Passing()], "INVALID_ARGUMENT", "no worker reads the features of stage-1 in round 0"),
        (0, [rounds_pb2.Passing(), piece_of(b"x", 7)], "INVALID_ARGUMENT", "got a piece at offset 7, expected 0"),
        (0, [rounds_pb2.Passing(lease="other")], "ALREADY_EXISTS", "another process already works as w0"),
    ],
)
def test_unread_features_are_refused(network: Start, worker: int, requests: list[Any], code: str, message: str) -> None:
    net = network(scorer)
    leases = [net.join(f"w{i}", part=i).lease for i in range(2)]

    def sent() -> Iterator[rounds_pb2.PassRequest]:
        for each in requests:
            if isinstance(each, rounds_pb2.Passing):
                each = rounds_pb2.Passing(worker=f"w{worker}", lease=each.lease or leases[worker], round=each.round)
                each = rounds_pb2.PassRequest(passing=each)
            elif isinstance(each, rounds_pb2.Piece):
                each = rounds_pb2.PassRequest(piece=each)
            yield each

    with refused(grpc.StatusCode[code], message):
        list(net.stub.Pass(sent(), timeout=PATIENCE_S))
