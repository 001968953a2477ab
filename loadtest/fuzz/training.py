"""Target `training`: the service of a running training, known here by what it says of itself over reflection."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from loadtest.fuzz.calls import Caller
from loadtest.fuzz.inputs import Inputs
from loadtest.fuzz.ports import garbage
from loadtest.fuzz.scene import Scene
from loadtest.fuzz.target import Target, all_of
from serving.ports import free_port_block
from stages.errors import ServiceError

SERVICE = "trainer.v1.TrainingService"
METHOD = f"/{SERVICE}/Progress"
SMALL = "steps = 1000000\n[architecture]\nlayers = 1\nwidth = 32\nheads = 2\n"
READY_S = 120.0
BRIEF_S = 0.3
NAME = "training"


class TrainingTarget(Target):
    name = "training"

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        super().__init__()
        self.scene, self.rng = scene, rng
        self.address = f"127.0.0.1:{free_port_block(1)}"
        self.directory = Path(tempfile.mkdtemp(prefix="onesweep-fuzz-"))
        self._inputs: Inputs | None = None

    async def send(self, count: int) -> None:
        """The training runs only meanwhile: it would take a processor."""
        if self._inputs is None:
            self._begin()
            self._inputs = await asyncio.to_thread(self._described)
        self.scene.extra[NAME].send_signal(signal.SIGCONT)
        caller = Caller(self.address, self.tally)
        try:
            calls: list[Awaitable[object]] = [
                caller.read(METHOD, data, 1, BRIEF_S) for data in self._inputs.take(count)
            ]
            calls += [garbage(self.address, self.rng, self.tally) for _ in range(max(count // 20, 1))]
            self.tally.inputs += len(calls)
            await all_of(calls)
        finally:
            await caller.close()
            self.scene.extra[NAME].send_signal(signal.SIGSTOP)

    async def close(self) -> None:
        if NAME in self.scene.extra:
            self.scene.extra[NAME].send_signal(signal.SIGCONT)
            await asyncio.to_thread(self.scene.end, NAME)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _begin(self) -> None:
        text = self.directory / "text.txt"
        text.write_text("The sea was calm. " * 5000)
        config = self.directory / "small.toml"
        config.write_text(SMALL)
        files = ("--out", str(self.directory / "chain"), "--data", str(text), "--config", str(config))
        self.scene.spawn(NAME, "train", "blocks", *files, "--listen", self.address, "--threads", "1", "--block", "0")

    def _described(self) -> Inputs:
        """Inputs of the service's own request type. Raises ServiceError when it does not come up."""
        deadline = time.monotonic() + READY_S
        with grpc.insecure_channel(self.address) as channel:
            while True:
                try:
                    grpc.channel_ready_future(channel).result(timeout=1.0)
                    break
                except grpc.FutureTimeoutError:
                    if time.monotonic() > deadline or self.scene.processes()[NAME] is None:
                        words = self.scene.log(NAME).read_text()[-300:]
                        raise ServiceError(f"the training to be fuzzed does not come up: {words}") from None
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            method = pool.FindServiceByName(SERVICE).methods_by_name["Progress"]
            request = GetMessageClass(method.input_type)
        return Inputs(request, [request(interval_seconds=1.0).SerializeToString()], self.rng)
