"""A coordinator in this process, real calls to it, and workers in threads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stages.wire.tokens import Keyring
from tests.conftest import PATIENCE_S, until
from tests.trainer.small import corpus, rounds_config
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.client import RoundsClient
from trainer.rounds.codecs import CODECS, Tensors, scale, shapes
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.publishing import Publisher
from trainer.rounds.service import STORE, ledger_of, open_port
from trainer.rounds.settings import PROTOCOL, CoordinatorSettings, WorkerSettings
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import audit, open_store
from trainer.rounds.worker import work
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

OPEN_S, WORK_S, END_S = 60.0, 100.0, 60.0


class Network:
    """One coordinator, on a loop of its own."""

    def __init__(self, config: TrainingConfig, corpus: Corpus, out: Path, **settings: Any) -> None:
        self.config, self.corpus, self.out = config, corpus, out
        self.settings = CoordinatorSettings("127.0.0.1:0", out, **settings)
        self.stop = threading.Event()
        self._links = list[RoundsClient]()
        self._opened: Future[int] = Future()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def opened(self) -> Network:
        """With its port open."""
        self.address = f"127.0.0.1:{self._opened.result(OPEN_S)}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = rounds_pb2_grpc.RoundsServiceStub(self.channel)
        return self

    @property
    def over(self) -> bool:
        """True once the run has ended, and its last checkpoint is written."""
        return self.rounds.done()

    def in_one_process(self) -> dict[str, Tensors]:
        """Weights that a run of these settings has in the end without a network."""
        engine = Simulation(self.spec, self.corpus, SimulatedWorkers())
        engine.run()
        return engine.published()

    def check_weights(self) -> None:
        """The run comes to its end, and its weights are those of one process."""
        until(lambda: self.over)  # modules are drawn from one generator: no other code may draw meanwhile
        for part, expected in self.in_one_process().items():
            found = self.ledger.weights(part)
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        assert audit(self.out / "rounds").problems == []

    def check_audit(self, updates: int) -> None:
        """So many updates were accepted, and all of them merged."""
        found = audit(self.out / "rounds")
        assert (found.problems, found.accepted, found.merged) == ([], updates, updates)

    def end(self) -> None:
        self.stop.set()
        self._ended.set()
        for link in self._links:
            link.close()
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "the coordinator did not end"
        if hasattr(self, "channel"):
            self.channel.close()

    def _run(self) -> None:
        with open_store(self.out / STORE) as store:
            try:
                asyncio.run(self._serve(store))
            except BaseException as error:
                if not self._opened.done():
                    self._opened.set_exception(error)

    async def _serve(self, store: Any) -> None:
        self.spec = RunSpec.begin(self.config, self.corpus, self.out)
        self.ledger = ledger_of(self.spec, store)
        publisher = Publisher(self.spec, self.out, self.corpus)
        self.coordinator = Coordinator(self.spec, self.corpus, self.ledger, publisher, self.out / STORE, self.settings)
        async with open_port(self.coordinator, Keyring(self.settings.tokens)) as port:
            self.rounds = asyncio.create_task(self.coordinator.run())
            self._opened.set_result(port)
            await asyncio.to_thread(self._ended.wait)
            self.coordinator.stop()
            self.rounds.cancel()
            await asyncio.gather(self.rounds, return_exceptions=True)

    # As a worker

    def link(self, **settings: Any) -> RoundsClient:
        """Closed with the network."""
        link = RoundsClient(self.address, asked_to_stop=self.stop.is_set, **settings)
        self._links.append(link)
        return link

    def work(self, name: str, corpus: Corpus | None = None, **changes: Any) -> int:
        settings = WorkerSettings(name, self.out.parent / f"state-{name}", **changes)
        return work(self.link(patience_s=60.0), corpus or self.corpus, settings)

    def work_together(self, *parts: int | None) -> list[int]:
        """So many workers, to the end of the run; the rounds that each has trained."""
        with ThreadPoolExecutor(len(parts)) as pool:
            jobs = [pool.submit(self.work, f"w{i}", part=part) for i, part in enumerate(parts)]
            try:
                return [job.result(WORK_S) for job in jobs]
            except BaseException:  # leaving waits for all of them
                self.stop.set()
                raise

    # By hand

    def join(self, worker: str = "hand", **changes: Any) -> Any:
        fields = {"version": version("onesweep"), "protocol": PROTOCOL}
        fields |= {"worker": worker, "data": self.corpus.digest(), **changes}
        return self.stub.Join(rounds_pb2.JoinRequest(**fields), timeout=PATIENCE_S)

    def delta(self, part: str, size: float = 0.01) -> Tensors:
        return scale(self.ledger.weights(part), size)

    def submission(self, place: Any, payload: bytes, worker: str = "hand", **changes: Any) -> Any:
        sha256 = hashlib.sha256(payload)
        fields = {"worker": worker, "lease": place.lease, "id": f"by-hand-{sha256.hexdigest()[:8]}", "codec": "fp32"}
        fields |= {"round": 0, "base_version": 0, "steps": 2, "sequences": 4, "size": len(payload)}
        return rounds_pb2.Submission(**{**fields, "sha256": sha256.digest(), **changes})

    def payload(self, part: str, tensors: Tensors | None = None) -> bytes:
        return CODECS["fp32"].encode(self.delta(part) if tensors is None else tensors)

    def shapes(self, part: str) -> Any:
        return shapes(self.ledger.weights(part))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """`network(**changes of [rounds])`: a coordinator that takes calls, in the directory `out`."""
    with contextlib.ExitStack() as stack:

        def start(
            config: TrainingConfig | None = None, coordinator: dict[str, Any] | None = None, **changes: Any
        ) -> Network:
            config = config or rounds_config
            config = replace(config, rounds=replace(config.rounds, **changes))
            started = Network(config, corpus, tmp_path / "out", **(coordinator or {}))
            stack.callback(started.end)
            return started.opened()

        yield start
