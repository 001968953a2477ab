"""A target of the fuzzer: it takes inputs, sends them, and books its answers and findings."""

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from onesweep.loadtest.fuzz.inputs import damaged
from onesweep.stages.v1 import stage_pb2

SAMPLE_BYTES = 4096  # kept of an input


@dataclass
class Finding:
    """Something that must not happen, and the first input after which it did."""

    target: str
    what: str
    sample: bytes  # its beginning
    sample_bytes: int  # of the whole input
    count: int = 1

    def to_record(self) -> dict[str, object]:
        counts = {"count": self.count, "sample_bytes": self.sample_bytes}
        return {"target": self.target, "what": self.what, **counts, "sample_hex": self.sample.hex()}


@dataclass
class TargetTally:
    """The inputs of one target, its answers, and its findings."""

    target: str
    findings: list[Finding] = field(default_factory=list)
    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # how often each status, or outcome, came

    def answer(self, what: str, count: int = 1) -> None:
        self.answers[what] += count

    def finding(self, what: str, sample: bytes = b"") -> None:
        """The same again is counted, not listed."""
        for finding in self.findings:
            if finding.what == what:
                finding.count += 1
                return
        self.findings.append(Finding(self.target, what, sample[:SAMPLE_BYTES], len(sample)))

    def rejections(self, receipt: stage_pb2.Ack, sample: bytes) -> None:
        for rejection in receipt.rejections:
            self.answer(f"rejection {rejection.code}")
            if rejection.code not in FINE_NUMBERS:
                self.finding(f"a hop is rejected with {rejection.code}: {rejection.message}", sample)

    def events(self, events: stage_pb2.Events) -> None:
        for event in events.events:
            self.answer(f"event {event.WhichOneof('outcome')}")
            if event.fault.code and event.fault.code not in FINE_NUMBERS:
                self.finding(f"a fault has code {event.fault.code}: {event.fault.message}")

    def to_record(self) -> dict[str, object]:
        return {"target": self.target, "inputs": self.inputs, "answers": dict(self.answers.most_common())}


AT_ONCE = 16


class FuzzTarget(ABC):
    """One of `settings.TARGETS`."""

    name: str
    batch_inputs: int = 250

    def __init__(self) -> None:
        self.tally = TargetTally(self.name)

    @abstractmethod
    async def send(self, count: int) -> None:
        """Send about `count` inputs; book them, and their answers."""

    async def close(self) -> None:
        """Let go of what it holds."""
        return


async def all_of(calls: Iterable[Awaitable[object]], at_once: int = AT_ONCE) -> None:
    """Await all, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(call: Awaitable[object]) -> None:
        async with places:
            await call

    await asyncio.gather(*map(one, calls))


_Code = grpc.StatusCode
UNEXPECTED = {_Code.UNKNOWN, _Code.INTERNAL, _Code.DATA_LOSS, _Code.ABORTED, _Code.OUT_OF_RANGE}
FINE = set(_Code) - UNEXPECTED  # statuses for a bad message. The others mean that the server did not expect it.
FINE_NUMBERS = {code.value[0] for code in FINE}
CALL_S = 20.0  # deadline of a call that is to be answered at once
MARGIN_S = 10.0  # by how much a call may outlive its deadline, on a machine that is busy


Answers = Any  # a call of grpc.aio whose answers are a stream


class RawCaller:
    """Sends raw bytes to one server, and books the end of each call."""

    def __init__(self, address: str, tally: TargetTally) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self.tally = tally

    async def unary(self, method: str, data: bytes) -> None:
        """A call that is to be answered once, and at once."""
        await self.stream(method, [data], 2)  # the second is the end, and its status

    async def read(
        self, method: str, data: bytes, most: int, timeout_s: float, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        """Up to `most` messages of an answer that is a stream, and may take until the deadline; then it is left."""
        make: Any = self.channel.unary_stream(method)
        call = make(data, timeout=timeout_s, metadata=tuple(metadata))
        await self._judged(call, most, method, data, timeout_s, is_patient=True)

    async def stream(
        self, method: str, parts: Sequence[bytes], most: int, timeout_s: float = CALL_S, is_half: bool = False
    ) -> list[bytes]:
        """Send a stream and read up to `most` answers. `is_half`: never say that it is complete."""

        async def sent() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
            if is_half:
                await asyncio.sleep(timeout_s)

        make: Any = self.channel.stream_stream(method)
        call = make(sent(), timeout=timeout_s)
        return await self._judged(call, most, method, b"".join(parts[:1]), timeout_s)

    async def close(self) -> None:
        await self.channel.close()

    async def _judged(
        self, call: Answers, most: int, method: str, data: bytes, timeout_s: float, is_patient: bool = False
    ) -> list[bytes]:
        """Up to `most` answers of a call that ends well, and then leave it. Its end is booked.

        :param is_patient: an answer may take until the deadline.
        """
        begin, found = time.monotonic(), list[bytes]()
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                while len(found) < most and (answer := await call.read()) is not grpc.aio.EOF:
                    found.append(answer)
            self.tally.answer("OK")
            return found
        except grpc.aio.AioRpcError as error:
            code = error.code()
            self.tally.answer(code.name)
            if code not in FINE:
                self.tally.finding(f"{method} answers {code.name}: {_shape(error.details() or '')}", data)
            elif code is _Code.DEADLINE_EXCEEDED and not is_patient and time.monotonic() - begin >= timeout_s:
                self.tally.finding(f"{method} does not answer within {timeout_s:g} s", data)
        except TimeoutError:
            self.tally.answer("HANG")
            self.tally.finding(f"{method} outlives its deadline of {timeout_s:g} s", data)
        finally:
            call.cancel()
        return []


def _shape(details: str) -> str:
    """A sentence without what differs from input to input."""
    return "".join("0" if letter.isdigit() else letter for letter in details)[:120]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
ENOUGH_S = 1.0  # a server that waits for the rest of a frame says nothing


async def garbage(address: str, rng: random.Random, tally: TargetTally) -> None:
    """Send bytes that are no HTTP/2 to a port where gRPC listens. The server may answer anything, but must survive."""
    host, _, port = address.rpartition(":")
    data = rng.choice((rng.randbytes(200), damaged(rng, PREFACE), PREFACE + rng.randbytes(100)))
    with contextlib.suppress(OSError):
        async with asyncio.timeout(MARGIN_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                writer.write_eof()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), ENOUGH_S)
            finally:
                writer.close()
    tally.answer("port")
