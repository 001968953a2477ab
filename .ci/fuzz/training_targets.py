"""Targets that belong to a training: payloads of updates, and all that coordinator and workers tell each other."""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from google.protobuf.message import DecodeError
from target import Target, changed_header, changed_message

from stages.errors import CodecError, OnesweepError
from stages.wire.status import StatusError
from stages.wire.tokens import Keyring
from tests.trainer.rounds.network.test_features_travel import scorer
from tests.trainer.small import corpus
from trainer.rounds.cache import WeightCache
from trainer.rounds.codecs import CODECS, receive, scale, shapes
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.members import Place
from trainer.rounds.parts import FeatureFormat
from trainer.rounds.publishing import Publisher
from trainer.rounds.service import RoundsService, WorkerAccess, ledger_of
from trainer.rounds.settings import CoordinatorSettings, WorkerSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import open_store
from trainer.rounds.transfer import checked, file_of, piece_of
from trainer.rounds.worker import join_request
from trainer.rounds.worker_state import WorkerProgress, load_worker, save_worker
from trainer.v1 import rounds_pb2

SIZES: list[list[tuple[int, ...]]] = [[(3, 5), (7,)], [()], [(0, 4), (16,)], [(257,), (2, 128)], [(2, 3, 4), (1, 1)]]
LIKE = [dict(zip("ab", sizes, strict=False)) for sizes in SIZES]
FORMATS = (FeatureFormat(1, 2, 8, 16), FeatureFormat(1, 1, 1, 1))
METHODS = rounds_pb2.DESCRIPTOR.services_by_name["RoundsService"].methods
# Kinds of input of `rounds`: a method's requests, one of two answers, or else the file that a worker keeps.
KINDS = [*(getattr(rounds_pb2, each.input_type.name) for each in METHODS), rounds_pb2.JoinResponse, rounds_pb2.Weights]
WORKER_FILE = len(KINDS)
# Bits of an input's second byte. Lease, round and digest are put right unless a bit says to leave them.
SECOND_PLACE, OWN_LEASE, OWN_DIGEST, OWN_PIECES = 1, 2, 4, 8
ROUNDS = 100  # of one coordinator, whose ledger grows


def update() -> Target:
    """A payload of an update, or of features; the first two bytes choose codec and shapes, and its length is made right
    where it is too long."""
    codecs = list(CODECS.items())

    def parse(data: bytes) -> None:
        number, like, payload = data[0] % (len(codecs) + len(FORMATS)), LIKE[data[1] % len(LIKE)], data[2:]
        if number >= len(codecs):
            FORMATS[number - len(codecs)].decode(payload)
            return
        name, codec = codecs[number]
        public = {name: torch.zeros(shape) for name, shape in like.items()}
        received = receive(public, payload[: codec.size(like)], name)
        assert shapes(received) == like
        codec.decode(codec.encode(received), like)

    def seeds() -> Iterator[bytes]:
        for i, (_, codec) in enumerate(codecs):
            for j, like in enumerate(LIKE):
                yield bytes([i, j]) + codec.encode({name: torch.randn(shape) for name, shape in like.items()})
        for i, form in enumerate(FORMATS, len(codecs)):
            yield bytes([i, 0]) + form.encode(torch.randn(form.sequences, form.positions, form.width))

    return Target(parse, seeds(), (CodecError,), chooses=2)


def rounds() -> Target:
    """Calls to a training's coordinator, what workers read of its answers, and the file that a worker keeps.

    The first byte chooses one, bits of the second are those above. Messages follow, each behind its length in 2 bytes,
    or a file.
    """
    training = Training()
    return Target(training.parse, training.seeds(), (OnesweepError, StatusError, DecodeError), training.mutate)


class Training:
    """A coordinator with few rounds so far, whose two places are taken, and a worker's folder."""

    def __init__(self) -> None:
        self.folder, self.loop = Path(tempfile.mkdtemp()), asyncio.new_event_loop()
        self.file = self.folder / "file"
        rounds = replace(scorer.rounds, rounds=1 << 20, codec="int8", down_codec="int8")
        self.spec = RunSpec.begin(replace(scorer, rounds=rounds), corpus, self.folder)
        self.stack = contextlib.ExitStack()
        self.run = self.begun()

        async def aborted(refusal: StatusError, context: object) -> None:
            raise refusal

        patch.object(StatusError, "abort", aborted).start()

    def begun(self) -> Coordinator:
        self.stack.close()
        own = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        ledger = ledger_of(self.spec, self.stack.enter_context(open_store(own)))
        settings = CoordinatorSettings("127.0.0.1:1", self.folder, lease_s=86400, publish_every=1 << 20)
        return Coordinator(self.spec, corpus, ledger, Publisher(self.spec, self.folder, corpus), own, settings)

    def coordinator(self) -> Coordinator:
        if self.run.ledger.round(self.spec.parts[0]) > ROUNDS:
            self.run = self.begun()
        members = self.run.members
        for part in (0, 1):
            member = members.at(Place(part, 0))
            if not (member and member.lease and member.worker == f"w{part}"):
                if member:
                    members.leave(member)
                members.join(f"w{part}", part, self.run.clock())
        return self.run

    def parse(self, data: bytes) -> None:
        if len(data) < 2:
            return
        which, flags = data[0] % (len(KINDS) + 1), data[1]
        self.file.write_bytes(data[2:])
        if which == WORKER_FILE:
            load_worker(self.file)
        elif messages := [KINDS[which].FromString(each) for each in split(data[2:])]:
            self.fix_checksums(messages, flags)
            if which < len(METHODS):
                self.loop.run_until_complete(self.call(METHODS[which], messages))
            elif KINDS[which] is rounds_pb2.JoinResponse:
                RunSpec.joined(messages[0], self.folder, corpus)
            elif messages[0].part in self.spec.shapes:
                self.fetch(messages[0])

    def fix_checksums(self, messages: list[Any], flags: int) -> None:
        """Write in a call what only the coordinator knows, and what no mutation guesses."""
        run, head = self.coordinator(), messages[0]
        member = run.members.at(Place(flags & SECOND_PLACE, 0))
        assert member is not None
        if "step" in head.DESCRIPTOR.oneofs_by_name:
            offset, head = 0, getattr(head, head.WhichOneof("step") or "piece")
            for each in messages[1:] if not flags & OWN_PIECES else ():
                each.piece.CopyFrom(piece_of(each.piece.data, offset))
                offset += len(each.piece.data)
        if not flags & OWN_LEASE and hasattr(head, "worker") and hasattr(head, "lease"):
            head.worker, head.lease = member.worker, member.lease
        if not flags & OWN_DIGEST and isinstance(head, rounds_pb2.Submission):
            head.round = head.base_version = run.ledger.round(self.spec.parts[member.place.part])
            file = file_of(b"".join(each.piece.data for each in messages[1:]))
            head.size, head.sha256 = file.size, file.sha256
        if isinstance(head, rounds_pb2.NextRequest):
            head.wait_seconds *= 1e-12  # infinite as before

    async def call(self, method: Any, messages: list[Any]) -> None:  # noqa: ANN401
        async def requests() -> AsyncIterator[Any]:
            for each in messages:
                yield each

        async def noted(metadata: object) -> None:
            pass

        service = RoundsService(self.coordinator(), WorkerAccess(Keyring(), mutual=False))
        context: Any = SimpleNamespace(send_initial_metadata=noted)
        answer = getattr(service, method.name)(requests() if method.client_streaming else messages[0], context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01 if method.name in ("Fetch", "Watch") else 5):  # they wait for more
                if method.server_streaming:
                    async with contextlib.aclosing(answer):
                        async for each in answer:
                            each.SerializeToString()
                else:
                    (await answer).SerializeToString()
        await self.coordinator().step()

    def fetch(self, weights: rounds_pb2.Weights) -> None:
        """A worker's way to these weights, from files of zeros."""
        files: Any = SimpleNamespace(fetch=lambda file, *others: bytes(checked(file).size))
        WeightCache(files, "w0", "", self.folder, self.spec.shapes).fetch(weights, "int8")

    def seeds(self) -> Iterator[bytes]:
        run, part = self.coordinator(), self.spec.parts[0]
        for messages in self.talk(run):
            for flags in (0, SECOND_PLACE):
                parts = join(each.SerializeToString() for each in messages)
                yield bytes([KINDS.index(type(messages[0])), flags]) + parts
        small = dict(sorted(run.ledger.weights(part).items(), key=lambda named: named[1].numel())[:2])
        save_worker(self.file, self.spec.run, WorkerProgress(part), {"base": small})
        yield bytes([WORKER_FILE, 0]) + self.file.read_bytes()

    def talk(self, run: Coordinator) -> Iterator[list[Any]]:
        """Messages of each call, and both answers."""
        part, joining = self.spec.parts[0], join_request(corpus, WorkerSettings("w0", self.folder, 0))
        member = run.members.at(Place(0, 0))
        assert member is not None
        held = [rounds_pb2.Held(part=part)]
        order: Any = run._fill_order(rounds_pb2.Order(round=0), part, {})
        yield [joining]
        yield [rounds_pb2.NextRequest(worker="w0", lease=member.lease, after=0, held=held)]
        yield from ([rounds_pb2.FetchRequest(name=name)] for name in (order.base.files[0].name, "features-0"))
        pieces = [rounds_pb2.PassRequest(piece=piece_of(bytes(100), 0)) for _ in range(3)]
        yield [rounds_pb2.PassRequest(passing=rounds_pb2.Passing()), *pieces]
        losses = {"next_byte_nats": 2.0}
        submission = rounds_pb2.Submission(id="x", steps=2, sequences=4, codec="int8", losses=losses)
        for each in self.spec.parts:
            update = CODECS["int8"].encode(scale(run.ledger.weights(each), 0.01))
            halves = [rounds_pb2.SubmitRequest(piece=piece_of(half, 0)) for half in (update[:2000], update[2000:])]
            yield [rounds_pb2.SubmitRequest(submission=submission), *halves]
        yield [rounds_pb2.BeatRequest(losses=losses, steps=1, busy_seconds=1.0)]
        yield [rounds_pb2.WatchRequest(interval_seconds=1.0)]
        yield [self.loop.run_until_complete(run.join(joining))]
        yield [order.base]
        yield [rounds_pb2.LeaveRequest()]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        which = data[0] % (len(KINDS) + 1) if data else 0
        if which >= len(KINDS):
            return data[:2] + changed_header(rng, data[2:])
        parts = list(split(data[2:]))
        at = rng.randrange(max(len(parts), 1))
        parts[at : at + 1] = [changed_message(KINDS[which])(rng, b"".join(parts[at : at + 1]))]
        return data[:2] + join(each for each in parts if len(each) < 1 << 16)


def join(parts: Iterator[bytes]) -> bytes:
    """Parts, each behind its length in 2 bytes."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def split(data: bytes) -> Iterator[bytes]:
    while data:
        size = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + size]
        data = data[2 + size :]
