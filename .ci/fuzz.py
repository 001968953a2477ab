"""Coverage-guided fuzzing of one parser, with atheris: `pip install atheris`, then
`python .ci/fuzz.py TARGET --seconds 600 --corpus DIR`.

A target gets bytes, calls the real parser, and lets only the errors pass that the parser documents. A finding is any
other exception, over 2.5 GB of memory, or an input that takes over 20 s. Findings go to DIR-findings, one a cause; what
reaches new code stays in DIR, which is begun with messages that the code itself makes. Not a part of CI.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "weights"
RSS_MB, SLOW_S, MAX_BYTES = 2560, 20, 1 << 17
OWN = tuple(f"{ROOT / package}/" for package in ("onesweep", "stages", "serving", "trainer", "loadtest", ".ci"))
MEMORY = Path("/dev/shm")  # where inputs that are read from files lie
STARTS = 20  # of one call: libFuzzer ends with an input that is too slow or too large
WORDS = ("null", "true", "-1", "1e999", "NaN", "[]", "{}", '"\\ud800"', "9" * 30, "[" * 600, "[" * 60000, "1.5", '""')
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**400, 1e308, 0.5, "", "x", "\x00", "\ud800", "é" * 80),
    *([], [None], {}, {"a": {}}, ["x"] * 80, "a" * 5000),
)


@dataclass(frozen=True)
class Target:
    """One parser."""

    parse: Callable[[bytes], object]
    seeds: Iterable[bytes]
    mutate: Callable[[random.Random, bytes], bytes] | None = None  # by the structure of an input; ValueError: has none


def of_files(kind: str) -> Target:
    """The readers of loadtest/fuzz/files.py whose names begin so; the first byte of an input chooses one of several."""
    from onesweep.loadtest.fuzz.files import readers
    from onesweep.stages.checkpoint.manifest import Manifest
    from onesweep.stages.errors import OnesweepError

    found = [each for each in readers(Path(tempfile.mkdtemp())) if each.name.startswith(kind)]

    def parse(data: bytes) -> None:
        if data:
            with contextlib.suppress(OnesweepError):
                made = found[data[0] % len(found)].read(data[1:])
                if isinstance(made, Manifest):
                    made.to_json()
                    made.digest()

    seeds = [bytes([i]) + each.sample for i, each in enumerate(found)]
    return Target(parse, seeds, after(1, changed_header if kind == "weights" else changed_json))


def hop() -> Target:
    """A hop, for hosts of several deployments; the first byte chooses the host."""
    from google.protobuf.message import DecodeError

    from onesweep.loadtest.fuzz.healthy import record
    from onesweep.loadtest.fuzz.testbed import open_fuzz_testbed
    from onesweep.stages.host.parts import plan_host
    from onesweep.stages.host.validation import parse_hop
    from onesweep.stages.v1 import stage_pb2
    from onesweep.stages.wire.status import StatusError

    bundles = (WEIGHTS, WEIGHTS / "pictures")
    plans = [plan_host(bundle, blocks) for bundle in bundles for blocks in ((0,), (1,), (2,), (0, 1, 2))]

    def parse(data: bytes) -> None:
        if data:
            with contextlib.suppress(DecodeError, StatusError):
                parse_hop(stage_pb2.Hop.FromString(data[1:]), plans[data[0] % len(plans)])

    def seeds() -> Iterator[bytes]:
        async def captured(bundle: Path) -> list[bytes]:
            async with open_fuzz_testbed(bundle) as testbed:
                return (await record(testbed)).hops

        for number, bundle in enumerate(bundles):
            for i, data in enumerate(asyncio.run(captured(bundle))):
                refreshed = stage_pb2.Hop.FromString(data)
                refreshed.left_s = 60
                yield bytes([4 * number + i % 4]) + refreshed.SerializeToString()

    return Target(parse, seeds(), after(1, changed_message(stage_pb2.Hop)))


def request() -> Target:
    """A request to a router whose model has tokens and a chat template; the first byte of an input chooses the mode."""
    from google.protobuf.message import DecodeError
    from tokenizers import Tokenizer

    from onesweep.loadtest.fuzz.healthy import PROMPT, TEXTS
    from onesweep.serving.modes import MODES
    from onesweep.serving.modes.base import Mode
    from onesweep.serving.modes.chat_template import ChatTemplate
    from onesweep.serving.modes.pretrained_tokenizer import PretrainedTokenizer
    from onesweep.serving.router import validation
    from onesweep.serving.router.accounting import Account
    from onesweep.serving.router.request import Request
    from onesweep.serving.v1 import router_pb2
    from onesweep.stages.model.vocabulary import Alphabet
    from onesweep.stages.wire.status import StatusError
    from tests.stages.model.tiny_llama import tiny_tokenizer

    calls = "{{ tools | tojson }}" + '<tool_call>\n{"name": ..., "arguments": ...}</tool_call>'
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}" + calls, "", ""
    )
    encoding = Tokenizer.from_str(tiny_tokenizer(300))
    spoken = PretrainedTokenizer(encoding, Alphabet(300), frozenset({257}), template)

    class Served(Mode):
        problem, positions, tokenizer, fills, keeps_budget = "", 4096, spoken, True, True  # type: ignore[assignment]

        def __init__(self, name: str) -> None:
            self.name = name

        def generate(self, request: object, account: object) -> Any:  # noqa: ANN401
            raise NotImplementedError

    async def checked(schema: str) -> str:
        return ""  # the check takes a process of its own for each

    validation.schema_problem = checked
    modes, loop = [Served(name) for name in MODES], asyncio.new_event_loop()

    async def taken(message: router_pb2.GenerateRequest, mode: Mode) -> None:
        generation = validation.check_request(message, mode, time.monotonic() + 60)
        messages, tools = validation.parsed_chat(message)
        generation = await validation.tokenized(generation, messages, tools, mode, Account())
        validation.check_fit(generation, mode)

    def parse(data: bytes) -> None:
        if data:
            with contextlib.suppress(DecodeError, StatusError):
                message = router_pb2.GenerateRequest.FromString(data[1:])
                loop.run_until_complete(taken(message, modes[data[0] % len(modes)]))

    names = [*MODES]
    seeds = [
        bytes([names.index(str(asked["mode"]))]) + Request(prompt=PROMPT, **asked).message().SerializeToString()
        for asked in TEXTS
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    chat = router_pb2.GenerateRequest(max_tokens=4, mode="ar", tools=json.dumps([tool]), must_call=["f"])
    for role, more in (("system", {}), ("user", {}), ("assistant", {"tool_calls": [tool]}), ("tool", {"name": "f"})):
        chat.messages.add(role=role, content="the <extra_257> sea", more=json.dumps(more))
    seeds.append(bytes([names.index("ar")]) + chat.SerializeToString())
    return Target(parse, seeds, after(1, changed_message(router_pb2.GenerateRequest)))


def gguf() -> Target:
    """A GGUF file, to its last tensor and its tokenizer."""
    from onesweep.stages.checkpoint.gate import PROBE_TEXT
    from onesweep.stages.errors import OnesweepError
    from onesweep.stages.importing.gguf_file import GgufSource
    from onesweep.stages.importing.source import is_matrix, probe_tokens
    from onesweep.stages.model.llama import LlamaArchitecture, LlamaStage
    from tests.stages.importing.published import describe_letters, taken_apart, write_gguf

    shape = LlamaArchitecture((1,), 32, 4, 2, 8, 32, 64, 300)
    folder = Path(tempfile.mkdtemp())
    path = folder / "model.gguf"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(OnesweepError):
            source = GgufSource(path)
            source.check()
            probe_tokens(source.speech.tokenizer, source.architecture, PROBE_TEXT)
            for name in itertools.islice(source.shapes(), 100):
                source.tensor(name)
            replace(source.architecture, weights="q4")
            source.rounded_twice()
            for name, size in itertools.islice(source.shapes().items(), 100):
                if is_matrix(name, size):
                    source.four_bits(name)

    def pieces(writer: Any) -> None:  # noqa: ANN401
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁a", "bc"]
        tokens += [f"<{i}>" for i in range(300 - len(tokens))]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(300)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 6 + [4] * 35)
        writer.add_rope_scaling_type(writer_scaling)
        writer.add_rope_scaling_factor(2.0)
        writer.add_sliding_window(16)

    def seeds() -> Iterator[bytes]:
        tensors = taken_apart(LlamaStage(shape, 0))
        for matrices in ("F32", "Q4_0", "Q4_1"):
            for describe in (describe_letters, pieces):
                yield write_gguf(
                    folder / "seed.gguf", tensors, shape, describe=describe, matrices=matrices
                ).read_bytes()

    import gguf as package

    writer_scaling = package.RopeScalingType.LINEAR
    return Target(parse, seeds(), changed_metadata)


def folder() -> Target:
    """A Hugging Face folder, as JSON: its files of settings, and the shapes of its tensors."""
    import torch
    from safetensors.torch import save_file

    from onesweep.stages.errors import OnesweepError
    from onesweep.stages.importing import huggingface
    from onesweep.stages.importing.families import FAMILIES
    from onesweep.stages.importing.source import expected_shapes, is_matrix
    from onesweep.stages.model.llama import LlamaArchitecture
    from tests.stages.importing.published import config_of, their_name
    from tests.stages.model.tiny_llama import tiny_tokenizer

    shape = LlamaArchitecture((1,), 32, 4, 2, 8, 32, 64, 300)
    base = Path(tempfile.mkdtemp())
    (base / "tokenizer.json").write_text(tiny_tokenizer(300))
    settings = {name: f"{name}.json" for name in ("config", "tokenizer_config", "generation_config")}
    settings["index"] = huggingface.INDEX

    def parse(data: bytes) -> None:
        try:
            told = json.loads(data)
            sizes = dict(told["tensors"])
            stored = {name: torch.zeros(size) for name, size in sizes.items() if math.prod(size) <= MAX_BYTES}
        except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError):
            return
        for name, file in settings.items():
            (base / file).unlink(missing_ok=True)
            if told.get(name) is not None:
                (base / file).write_text(json.dumps(told[name]))
        save_file(stored, base / huggingface.SINGLE)
        with contextlib.suppress(OnesweepError):
            source = huggingface.HuggingFaceSource(base)
            source.check()
            for name, size in itertools.islice(source.shapes().items(), 100):
                source.tensor(name)
                if is_matrix(name, size) and size[1] % 32 == 0:
                    source.four_bits(name)

    def seeds() -> Iterator[bytes]:
        for family in FAMILIES:
            config: dict[str, Any] = {**config_of(shape), "architectures": [family.name], "head_dim": 8}
            config |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
            config |= {"hidden_activation": "gelu_pytorch_tanh"}
            expected = expected_shapes(family.architecture(config))
            sizes = {their_name(name): size for name, size in expected.items() if not name.startswith("layers.")}
            for theirs, ours in family.tensors.items():
                parts = [expected.get(f"layers.0.{each.replace('*', '0')}.weight") for each in ours.split(" ")]
                if None not in parts:
                    sizes[f"model.layers.0.{theirs.replace('*', '0')}.weight"] = (
                        sum(each[0] for each in parts),
                        *parts[0][1:],
                    )
            yield json.dumps({"config": config, "tensors": sizes, "tokenizer_config": {"eos_token": "x"}}).encode()

    return Target(parse, seeds(), changed_json)


def tokenizer() -> Target:
    """A tokenizer.json, and texts through what it describes."""
    from onesweep.serving.modes.pretrained_tokenizer import read_pretrained_tokenizer
    from onesweep.stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
    from onesweep.stages.errors import OnesweepError
    from onesweep.stages.host.grammar import with_tags_as_text
    from onesweep.stages.importing.gguf_tokenizer import SPLITS, Vocabulary, tokenizer_json
    from onesweep.stages.model.llama import LlamaArchitecture
    from onesweep.stages.wire.status import StatusError
    from tests.stages.model.tiny_llama import tiny_tokenizer

    folder = Path(tempfile.mkdtemp())
    manifest = Manifest("ar", LlamaArchitecture((1,), 32, 2, 1, 8, 32, 64, 300), (None,), probe_tokens=(1, 2))
    text = "the sea,\n  <s> é🚢 12345 </s>"

    def parse(data: bytes) -> None:
        (folder / TOKENIZER_NAME).write_bytes(data)
        named = replace(manifest, tokenizer="tokens", files={TOKENIZER_NAME: hashlib.sha256(data).hexdigest()})
        with contextlib.suppress(OnesweepError, StatusError):
            made = read_pretrained_tokenizer(folder, named)
            symbols = made.encode_piece(text)
            made._encode(text, True)
            reader = made.detokenizer(symbols)
            for symbol in range(0, 300, 7):
                made.token_text(symbol)
                reader.feed(made.alphabet.encode([symbol]))
            reader.end()
            with_tags_as_text(data.decode())

    def seeds() -> Iterator[bytes]:
        yield tiny_tokenizer(300).encode()
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁a", "bc", "<x>"]
        kinds = [2, 3, 3] + [6] * 256 + [1] * 6 + [4]
        scores = [-float(i) for i in range(len(tokens))]
        for pre, model in [*((pre, "gpt2") for pre in SPLITS), ("default", "llama")]:
            told = Vocabulary(model, pre, tokens, kinds, scores, ["b c"], 1, 2, 0, [2], True, True, False)
            yield tokenizer_json(told).encode()

    return Target(parse, seeds(), changed_json)


def http() -> Target:
    """A body that is posted to the gateway; the first byte of an input chooses the path."""
    import grpc.aio

    from onesweep.loadtest.fuzz import http as bodies
    from onesweep.loadtest.fuzz.healthy import PICTURES, TEXTS
    from onesweep.serving.client.client import AsyncClient
    from onesweep.serving.gateway.app import make_app
    from onesweep.serving.gateway.commands import HttpSettings
    from onesweep.serving.gateway.middleware import HttpCounters
    from onesweep.serving.v1 import router_pb2, router_pb2_grpc
    from onesweep.stages.v1 import stage_pb2

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    class Router(router_pb2_grpc.RouterServiceServicer):
        """Draws two classes, it says, and answers all requests with UNIMPLEMENTED."""

        async def Status(self, request: object, context: object) -> router_pb2.StatusResponse:
            shown = stage_pb2.PictureInfo(classes=["0", "1"], height=8, width=8, channels=1)
            return router_pb2.StatusResponse(ready=True, pictures=shown, drawing_modes=["chain", "steps", "local"])

        async def Generate(self, request: object, context: Any) -> None:  # noqa: ANN401
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no texts here")

        Draw = Generate

    async def started() -> Callable[..., Any]:
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        kept.append(server)
        router = f"127.0.0.1:{port}"
        return make_app(HttpSettings(router=router), AsyncClient(router), HttpCounters())

    kept: list[object] = []
    app = loop.run_until_complete(started())

    def parse(data: bytes) -> None:
        if not data:
            return
        status, answer = loop.run_until_complete(posted(app, bodies.PATHS[data[0] % len(bodies.PATHS)], data[1:]))
        if status == 500 or (status == 502 and b"unimplemented" not in answer):
            raise AssertionError(f"status {status}: {answer[:200]!r}")

    asked = [each for mode in TEXTS for each in bodies._bodies(mode)]
    asked += [each for mode in PICTURES for each in bodies._picture_bodies(mode)]
    seeds = [bytes([bodies.PATHS.index(path)]) + json.dumps(body).encode() for path, body in asked]
    return Target(parse, seeds, after(1, changed_json))


async def posted(app: Callable[..., Any], path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an ASGI application's answer."""
    messages, sent = [{"type": "http.request", "body": body, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


def update() -> Target:
    """A payload of an update, or of features; the first two bytes choose codec and shapes, and its length is made right
    where it is too long."""
    import torch

    from onesweep.stages.errors import CodecError
    from onesweep.trainer.rounds.codecs import CODECS, receive, shapes, zeros_like
    from onesweep.trainer.rounds.features import FeatureFormat

    sizes: list[dict[str, tuple[int, ...]]] = [
        {"a": (3, 5), "b": (7,)},
        {"a": ()},
        {"a": (0, 4), "b": (16,)},
        {"a": (257,), "b": (2, 128)},
        {"a": (2, 3, 4), "b": (1, 1)},
    ]
    names, formats = list(CODECS), [FeatureFormat(1, 2, 8, 16), FeatureFormat(1, 1, 1, 1)]

    def parse(data: bytes) -> None:
        if len(data) < 2:
            return
        number, like, payload = data[0] % (len(names) + len(formats)), sizes[data[1] % len(sizes)], data[2:]
        with contextlib.suppress(CodecError):
            if number >= len(names):
                formats[number - len(names)].decode(payload)
                return
            codec = CODECS[names[number]]
            exact = payload[: codec.size(like)]
            told = receive(zeros_like({name: torch.zeros(shape) for name, shape in like.items()}), exact, codec.name)
            assert shapes(told) == like
            codec.decode(codec.encode(told), like)

    def seeds() -> Iterator[bytes]:
        for i, name in enumerate(names):
            for j, like in enumerate(sizes):
                tensors = {each: torch.randn(shape) for each, shape in like.items()}
                yield bytes([i, j]) + CODECS[name].encode(tensors)
        for i, form in enumerate(formats):
            yield bytes([len(names) + i, 0]) + form.encode(torch.randn(form.sequences, form.positions, form.width))

    return Target(parse, seeds())


def config() -> Target:
    """Settings of a training: as JSON, which a coordinator sends, or as a TOML file; the first byte chooses."""
    from onesweep.stages.errors import InputError
    from onesweep.stages.settings import from_toml, read_toml
    from onesweep.trainer.blocks.config import PROFILES, TrainingConfig, parse_config

    path = Path(tempfile.mkdtemp()) / "config.toml"

    def parse(data: bytes) -> None:
        with contextlib.suppress(InputError):
            if data[:1] < b"\x80":
                made = parse_config(data[1:].decode(errors="replace"), "settings")
                parse_config(json.dumps(asdict(made)), "settings")
            else:
                path.write_bytes(data[1:])
                from_toml(TrainingConfig, read_toml(path), "file", TrainingConfig())

    toml = (
        b'steps = 5\nchunks = [1, 8]\n[architecture]\nwidth = 64\n[noise]\npartition = "equal_probability"\n[rounds]\n'
    )
    seeds = [b"\0" + json.dumps(asdict(profile)).encode() for profile in PROFILES.values()]
    return Target(parse, [*seeds, b"\xff" + toml], after(1, changed_json))


def rounds() -> Target:
    """Calls to a training's coordinator, what workers read of its answers, and files that both keep.

    The first byte chooses one; bits of the second leave lease and round, digest, or pieces as they are. Messages follow
    that, each behind its length in 2 bytes, or a file.
    """
    from google.protobuf.message import DecodeError

    from onesweep.stages.errors import OnesweepError
    from onesweep.stages.wire.status import StatusError
    from onesweep.stages.wire.tokens import Keyring
    from onesweep.trainer.rounds.cache import WeightCache
    from onesweep.trainer.rounds.codecs import CODECS, scale
    from onesweep.trainer.rounds.coordinator import Coordinator
    from onesweep.trainer.rounds.members import Members, Place
    from onesweep.trainer.rounds.publishing import Publisher
    from onesweep.trainer.rounds.server import ledger_of
    from onesweep.trainer.rounds.service import RoundsService, WorkerAccess
    from onesweep.trainer.rounds.settings import CoordinatorSettings, WorkerSettings
    from onesweep.trainer.rounds.spec import RunSpec
    from onesweep.trainer.rounds.store import open_store
    from onesweep.trainer.rounds.transfer import Parcel, piece_of
    from onesweep.trainer.rounds.worker import join_request, spec_of
    from onesweep.trainer.rounds.worker_state import WorkerProgress, load_worker, save_worker
    from onesweep.trainer.v1 import rounds_pb2
    from tests.trainer.rounds.network.test_features_travel import chained
    from tests.trainer.small import corpus

    folder, loop = Path(tempfile.mkdtemp()), asyncio.new_event_loop()
    config = replace(chained, rounds=replace(chained.rounds, rounds=1 << 20, codec="int8", down_codec="int8"))
    spec = RunSpec.begin(config, corpus, folder)
    settings = CoordinatorSettings("127.0.0.1:1", folder, lease_s=86400, publish_every=1 << 20)
    methods = list(rounds_pb2.DESCRIPTOR.services_by_name["RoundsService"].methods)
    kinds = [getattr(rounds_pb2, each.input_type.name) for each in methods]
    kinds += [rounds_pb2.JoinResponse, rounds_pb2.Weights]
    stack, opened = contextlib.ExitStack(), list[Coordinator]()

    async def aborted(refusal: StatusError, context: object) -> None:
        raise refusal

    async def noted(metadata: object) -> None:
        pass

    StatusError.abort = aborted  # type: ignore[method-assign, assignment]
    context: Any = SimpleNamespace(send_initial_metadata=noted)
    files: Any = SimpleNamespace(fetch=lambda file, *others: bytes(Parcel(file.size, file.sha256).check().size))

    def coordinator() -> Coordinator:
        """Of a run with few rounds so far, whose two places are taken."""
        if not opened or opened[0].ledger.round(spec.parts[0]) > 100:
            stack.close()
            own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ledger = ledger_of(spec, stack.enter_context(open_store(own)))
            opened[:] = [Coordinator(spec, corpus, ledger, Publisher(spec, folder, corpus), own, settings)]
        members = opened[0].members
        for place in (Place(0, 0), Place(1, 0)):
            member = members.at(place)
            if member is None or not member.lease or member.worker != f"w{place.part}":
                if member is not None:
                    members.leave(member)
                members.join(f"w{place.part}", place.part, opened[0].clock())
        return opened[0]

    def put_right(messages: list[Any], flags: int) -> None:
        run, head = coordinator(), messages[0]
        member = run.members.at(Place(flags & 1, 0))
        assert member is not None
        if "step" in head.DESCRIPTOR.oneofs_by_name:
            offset, head = 0, getattr(head, head.WhichOneof("step") or "piece")
            for each in messages[1:] if not flags & 8 else ():
                each.piece.CopyFrom(piece_of(each.piece.data, offset))
                offset += len(each.piece.data)
        if not flags & 2 and hasattr(head, "worker") and hasattr(head, "lease"):
            head.worker, head.lease = member.worker, member.lease
        if not flags & 4 and isinstance(head, rounds_pb2.Submission):
            head.round = head.base_version = run.ledger.round(spec.parts[member.place.part])
            parcel = Parcel.of(b"".join(each.piece.data for each in messages[1:]))
            head.size, head.sha256 = parcel.size, parcel.sha256
        if isinstance(head, rounds_pb2.NextRequest):
            head.wait_seconds *= 1e-12  # infinite as before

    async def called(method: Any, messages: list[Any]) -> None:  # noqa: ANN401
        async def requests() -> AsyncIterator[Any]:
            for each in messages:
                yield each

        service = RoundsService(coordinator(), WorkerAccess(Keyring(), mutual=False))
        answer = getattr(service, method.name)(requests() if method.client_streaming else messages[0], context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01 if method.name in ("Fetch", "Watch") else 5):  # they wait for more
                if method.server_streaming:
                    async with contextlib.aclosing(answer):
                        async for each in answer:
                            each.SerializeToString()
                else:
                    (await answer).SerializeToString()
        await coordinator().step()

    def parse(data: bytes) -> None:
        if len(data) < 2:
            return
        which, path = data[0] % (len(kinds) + 2), folder / "file"
        path.write_bytes(data[2:])
        with contextlib.suppress(OnesweepError, StatusError, DecodeError):
            if which == len(kinds):
                load_worker(path)
            elif which > len(kinds):
                Members(path, 2, 1, 30.0, 0.0)
            elif messages := [kinds[which].FromString(each) for each in _parts(data[2:])]:
                put_right(messages, data[1])
                if which < len(methods):
                    loop.run_until_complete(called(methods[which], messages))
                elif kinds[which] is rounds_pb2.JoinResponse:
                    spec_of(messages[0], folder, corpus)
                elif messages[0].part in spec.fragments.like:
                    WeightCache(files, "w0", "", folder, spec.fragments.like).fetch(messages[0], "int8")

    def seeds() -> Iterator[bytes]:
        run = coordinator()
        lease = run.members.at(Place(0, 0)).lease  # type: ignore[union-attr]
        asked = rounds_pb2.NextRequest(worker="w0", lease=lease, after=0, held=[rounds_pb2.Held(part=spec.parts[0])])
        order: Any = loop.run_until_complete(run._alone(run._filled, rounds_pb2.Order(round=0), spec.parts[0], {}))
        small = dict(sorted(run.ledger.weights(spec.parts[0]).items(), key=lambda named: named[1].numel())[:2])
        updates = [CODECS["int8"].encode(scale(run.ledger.weights(part), 0.01)) for part in spec.parts]
        passing = rounds_pb2.PassRequest(passing=rounds_pb2.Passing())
        submission = rounds_pb2.Submission(id="x", steps=2, sequences=4, codec="int8", losses={"next_byte_nats": 2.0})
        sent: list[list[Any]] = [
            [join_request(corpus, WorkerSettings("w0", folder, 0))],
            [asked],
            [rounds_pb2.FetchRequest(name=order.base.files[0].name)],
            [rounds_pb2.FetchRequest(name="features-0")],
            [passing, *(rounds_pb2.PassRequest(piece=piece_of(bytes(100), 0)) for _ in range(3))],
            *(
                [
                    rounds_pb2.SubmitRequest(submission=submission),
                    *(rounds_pb2.SubmitRequest(piece=piece_of(each, 0)) for each in (update[:2000], update[2000:])),
                ]
                for update in updates
            ),
            [rounds_pb2.BeatRequest(losses={"next_byte_nats": 2.0}, steps=1, busy_seconds=1.0)],
            [rounds_pb2.WatchRequest(interval_seconds=1.0)],
            [loop.run_until_complete(run.join(join_request(corpus, WorkerSettings("w0", folder, 0))))],
            [order.base],
            [rounds_pb2.LeaveRequest()],
        ]
        for messages in sent:
            for flags in (0, 1):
                yield bytes([kinds.index(type(messages[0])), flags]) + b"".join(
                    _part(each.SerializeToString()) for each in messages
                )
        save_worker(folder / "file", spec.run, WorkerProgress(spec.parts[0]), {"base": small})
        yield bytes([len(kinds), 0]) + (folder / "file").read_bytes()
        run.members.save(run.members.records())
        yield bytes([len(kinds) + 1, 0]) + run.members.path.read_bytes()

    def mutate(rng: random.Random, data: bytes) -> bytes:
        which = data[0] % (len(kinds) + 2) if data else 0
        if which >= len(kinds):
            return after(2, (changed_header, changed_json)[which - len(kinds)])(rng, data)
        parts = list(_parts(data[2:]))
        at = rng.randrange(max(len(parts), 1))
        parts[at : at + 1] = [changed_message(kinds[which])(rng, b"".join(parts[at : at + 1]))]
        return data[:2] + b"".join(_part(each) for each in parts if len(each) < 1 << 16)

    return Target(parse, seeds(), mutate)


def _part(data: bytes) -> bytes:
    return len(data).to_bytes(2, "little") + data


def _parts(data: bytes) -> Iterator[bytes]:
    while data:
        size = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + size]
        data = data[2 + size :]


TARGETS: dict[str, Callable[[], Target]] = {
    "hop": hop,
    "manifest": lambda: of_files("manifest"),
    "weights": lambda: of_files("weights"),
    "topology": lambda: of_files("topology"),
    "files": lambda: of_files(""),
    "gguf": gguf,
    "folder": folder,
    "tokenizer": tokenizer,
    "http": http,
    "update": update,
    "config": config,
    "rounds": rounds,
    "request": request,
}


# Mutations that know what an input is made of; libFuzzer's own know only bytes.


def after(count: int, mutate: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    """`mutate` for all but the first bytes."""
    return lambda rng, data: data[:count] + mutate(rng, data[count:])


def changed_message(kind: type[Message]) -> Callable[[random.Random, bytes], bytes]:
    """Changes fields of a protobuf message."""
    from google.protobuf.message import DecodeError

    from onesweep.loadtest.fuzz.inputs import changed

    def mutate(rng: random.Random, data: bytes) -> bytes:
        try:
            message = kind.FromString(data)
        except DecodeError as error:
            raise ValueError from error
        changed(rng, message)
        return message.SerializeToString()

    return mutate


def changed_metadata(rng: random.Random, data: bytes) -> bytes:
    """Changes type or value of one entry in a GGUF file's metadata or list of tensors: 4 or 8 bytes after its name."""
    names = [match.end() for match in re.finditer(rb"[a-z0-9_]+(\.[a-z0-9_]+)+", data[: 1 << 15])]
    if not names:
        raise ValueError
    at, size = rng.choice(names) + rng.choice((0, 0, 4, 4, 4, 8, 12, 20)), rng.choice((4, 4, 8))
    number = rng.choice(
        (0, 1, 2, 3, 5, 8, 9, 12, 32, 300, 2**16, 2**31, 2**32 - 1, 2**62, 2**64 - 1, rng.getrandbits(64))
    )
    return data[:at] + (number % 256**size).to_bytes(size, "little") + data[at + size :]


def changed_header(rng: random.Random, data: bytes) -> bytes:
    """Changes the JSON at the head of a safetensors file, and tells its length."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = changed_json(rng, data[8:end])
    return len(head).to_bytes(8, "little") + head + data[end:]


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """Changes one value of a JSON text, or writes a word where a value begins."""
    if rng.random() < 0.3:
        begins = [match.end() for match in re.finditer(rb"[:=,\[]", data)]
        if begins:
            at = rng.choice(begins)
            until = re.compile(rb"[,\n\]}]").search(data, at)
            return data[:at] + rng.choice(WORDS).encode() + data[until.start() if until else len(data) :]
    return json.dumps(_changed(rng, json.loads(data))).encode()


def _changed(rng: random.Random, value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if (way := rng.random()) < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if way < 0.2:
            return {**value, rng.choice(("x", "", *value)): value[key]}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]] if rng.random() < 0.8 else [*value, value[at]]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 0.5))
    return rng.choice(VALUES)


# The process that libFuzzer runs in, and the one that starts it.


def fuzz(name: str, seconds: int, corpus: Path, findings: Path) -> None:
    """Run libFuzzer on one target. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["onesweep", "gguf", "tomllib"]):
        target = TARGETS[name]()
    if not any(corpus.iterdir()):
        for seed in target.seeds:
            (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    seen: set[str] = set()

    def one(data: bytes) -> None:
        begin = time.thread_time()
        try:
            target.parse(data)
        except Exception as error:
            where = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(OWN)][-1]
            cause = f"{type(error).__name__} at {where.filename.removeprefix(str(ROOT))}:{where.lineno}"
            if cause not in seen:
                seen.add(cause)
                kept = findings / re.sub(r"\W+", "-", cause)
                kept.write_bytes(data)
                print(f"FINDING {cause}: {str(error)[:300]} ({kept})", flush=True)
        if time.thread_time() - begin > SLOW_S / 4:
            print(f"SLOW: {time.thread_time() - begin:.1f} s for {data[:80]!r}", flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        with contextlib.suppress(ValueError, RecursionError, OverflowError):
            if target.mutate is not None and rng.random() < 0.5:
                return target.mutate(rng, data)[:most]
        return bytes(atheris.Mutate(data, most))

    flags = {"max_total_time": seconds, "rss_limit_mb": RSS_MB, "timeout": SLOW_S, "max_len": MAX_BYTES}
    flags |= {"print_final_stats": 1, "artifact_prefix": f"{findings}/", "len_control": 0}
    options = [f"-{flag}={value}" for flag, value in flags.items()]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, **({"custom_mutator": mutate} if target.mutate else {}))
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, help="default runs/fuzz/TARGET")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    corpus = (options.corpus or ROOT / "runs/fuzz" / options.target).absolute()
    findings = corpus.with_name(f"{corpus.name}-findings")
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    if options.inside:
        fuzz(options.target, options.seconds, corpus, findings)
    executions, coverage, until = 0, "", time.monotonic() + options.seconds
    # libFuzzer ends at an input that is too slow or too large: start again, as long as there is time
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "TMPDIR": folder}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        for _ in range(STARTS):
            if (left := int(until - time.monotonic())) <= 0:
                break
            command = [sys.executable, __file__, options.target, "--inside", f"--seconds={left}", f"--corpus={corpus}"]
            with subprocess.Popen(command, env={**os.environ, "RUST_BACKTRACE": "0", **own}, **streams) as run:
                for line in run.stdout or ():
                    if found := re.search(r"cov: \d+ ft: \d+ corp: \d+", line):
                        coverage = found[0]
                    elif found := re.search(r"stat::number_of_executed_units: +(\d+)", line):
                        executions += int(found[1])
                    elif re.match(r"FINDING|SLOW|SUMMARY|Traceback|  File|\w*Error", line):
                        print(line, end="", flush=True)
    kept = sorted(findings.iterdir())
    print(f"{options.target}: {executions} executions, {coverage}, {len(kept)} findings in {findings}")
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main())
