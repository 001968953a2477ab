"""A worker that means harm: `python -m loadtest.training.saboteur --coordinator HOST:PORT --name w0 --lie flipped ...`.

It takes a worker's place, waits until it has seen how its part moves, and hands in that movement, made false: numbers
that are none, far too long, somewhat too long, or backwards. It speaks the real protocol, which it knows from what the
coordinator says of itself over reflection. Numbers travel as float32 in one row, so that shapes need not be known.

A line of JSON for each update that it handed in goes to its standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from numpy.typing import NDArray

from loadtest.training.lies import LIES

SERVICE = "trainer.v1.RoundsService"
PIECE_BYTES = 256 << 10
CALL_S, TRANSFER_S, WAIT_S, AGAIN_S = 30.0, 120.0, 10.0, 0.5
TRIES = 60
PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
)
"""Worth another try, if need be with a new lease."""

Row = NDArray[np.float32]


class Coordinator:
    """Calls by name, with messages of the types that the coordinator describes."""

    def __init__(self, channel: grpc.Channel) -> None:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self._channel, self._methods = channel, pool.FindServiceByName(SERVICE).methods_by_name

    def message(self, method: str, **fields: Any) -> Any:  # noqa: ANN401 - its type is known when it runs only
        return GetMessageClass(self._methods[method].input_type)(**fields)

    def call(self, method: str, kind: str, request: Any, timeout_s: float) -> Any:  # noqa: ANN401
        """:param kind: of gRPC's calls: `unary_unary`, `unary_stream`, `stream_stream`."""
        answer = GetMessageClass(self._methods[method].output_type)
        dial = getattr(self._channel, kind)
        ready = dial(f"/{SERVICE}/{method}", request_serializer=_serialized, response_deserializer=answer.FromString)
        return ready(request, timeout=timeout_s)


class Saboteur:
    """One place of a run, misused."""

    def __init__(self, coordinator: Coordinator, options: argparse.Namespace) -> None:
        self.coordinator, self.options = coordinator, options
        self.after: int | None = None
        self.seen: list[tuple[int, Row]] = []
        """The last two versions, with their numbers."""

    def join(self) -> None:
        o = self.options
        request = self.coordinator.message(
            "Join", worker=o.name, version=version("onesweep"), part=o.part, data_kind="bytes", data=o.digest
        )
        self.lease = self.coordinator.call("Join", "unary_unary", request, CALL_S).lease

    def work(self) -> bool:
        """One turn; whether an update was handed in."""
        fields = {} if self.after is None else {"after": self.after}
        request = self.coordinator.message("Next", wait_seconds=WAIT_S, **self._who, **fields)
        answer = self.coordinator.call("Next", "unary_unary", request, WAIT_S + CALL_S)
        if answer.WhichOneof("next") == "end":
            raise SystemExit(0)
        if answer.WhichOneof("next") != "order":
            return False
        order = answer.order
        if not self.seen or self.seen[-1][0] != order.base.version:
            self.seen = [*self.seen[-1:], (order.base.version, self._weights(order))]
        if len(self.seen) < 2:
            self.after = order.round  # the next one: it shows where the part moves
            return False
        verdict = self._hand_in(order)
        print(json.dumps({"round": order.round, "lie": self.options.lie, **verdict}), flush=True)
        self.after = order.round
        return True

    @property
    def _who(self) -> dict[str, str]:
        return {"worker": self.options.name, "lease": self.lease}

    def _weights(self, order: Any) -> Row:  # noqa: ANN401
        (file,) = order.base.files  # whole, for we say that we hold nothing
        request = self.coordinator.message("Fetch", name=file.name, **self._who)
        pieces = self.coordinator.call("Fetch", "unary_stream", request, TRANSFER_S)
        return np.frombuffer(b"".join(piece.data for piece in pieces), "<f4")

    def _hand_in(self, order: Any) -> dict[str, Any]:  # noqa: ANN401
        (_, before), (_, now) = self.seen
        payload = LIES[self.options.lie](before - now, self.options.norm).astype("<f4").tobytes()
        digest = hashlib.sha256(payload)
        name = f"false-{order.round}-{digest.hexdigest()[:16]}"
        header = self.coordinator.message("Submit")
        for field, value in {
            **self._who,
            "id": name,
            "round": order.round,
            "base_version": order.base.version,
            "steps": order.steps,
            "sequences": order.steps * self.options.sequences,
            "codec": "fp32",
            "size": len(payload),
            "sha256": digest.digest(),
        }.items():
            setattr(header.submission, field, value)
        answers = self.coordinator.call("Submit", "stream_stream", self._requests(header, payload), TRANSFER_S)
        for answer in answers:
            if answer.WhichOneof("step") == "verdict":
                outcome = answer.DESCRIPTOR.fields_by_name["verdict"].message_type.fields_by_name["outcome"].enum_type
                said = outcome.values_by_number[answer.verdict.outcome].name.removeprefix("OUTCOME_").lower()
                return {"id": name, "outcome": said, "reason": answer.verdict.reason}
        return {"id": name, "outcome": "unknown", "reason": "no verdict came"}

    def _requests(self, header: Any, payload: bytes) -> Iterator[Any]:  # noqa: ANN401
        """From its begin: what is false is not gone on with."""
        yield header
        for start in range(0, len(payload), PIECE_BYTES):
            part = payload[start : start + PIECE_BYTES]
            request = self.coordinator.message("Submit")
            request.piece.offset, request.piece.data, request.piece.crc32 = start, part, zlib.crc32(part)
            yield request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--digest", required=True, help="SHA-256 of the training text")
    parser.add_argument("--lie", choices=LIES, required=True)
    parser.add_argument("--norm", type=float, required=True, help="of an honest update")
    parser.add_argument("--sequences", type=int, required=True, help="of a step")
    parser.add_argument("--count", type=int, default=1, help="updates to hand in")
    options = parser.parse_args()
    with grpc.insecure_channel(options.coordinator) as channel:
        left, saboteur = options.count, None
        for _ in itertools.repeat(None, TRIES):
            try:
                if saboteur is None:
                    saboteur = Saboteur(Coordinator(channel), options)
                    saboteur.join()
                left -= saboteur.work()
                if not left:
                    return
            except grpc.RpcError as error:
                if error.code() not in PASSING:
                    raise
                saboteur = None if error.code() is grpc.StatusCode.ABORTED else saboteur
                time.sleep(AGAIN_S)


def _serialized(message: Any) -> bytes:  # noqa: ANN401
    return bytes(message.SerializeToString())


if __name__ == "__main__":
    main()
