"""Targets that are messages: a hop to a host, a request to a router, a body to the gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import httpx
from google.protobuf.message import DecodeError
from target import Target, changed_json, changed_message
from tokenizers import Tokenizer

from serving.client.client import AsyncClient
from serving.gateway.app import make_app
from serving.gateway.settings import HttpSettings
from serving.modes import MODES
from serving.modes.base import Mode
from serving.modes.chat_template import ChatTemplate
from serving.modes.pretrained_tokenizer import PretrainedTokenizer
from serving.router import validation
from serving.router.accounting import Account
from serving.router.request import Request
from serving.router.topology import SHIPPED
from serving.v1 import router_pb2, router_pb2_grpc
from stages.host.plan import ModelSource, plan_host
from stages.host.validation import parse_hop
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import put_work
from stages.wire.status import StatusError
from tests.stages.hops import step
from tests.stages.model.tiny_llama import tiny_tokenizer
from tests.stages.pictures.lines import PLAN, drawing_of

PROMPT = "The old man looked at the sea and said that"
SEED = 5
# One request of each mode, for a bundle that writes and for one that draws.
TEXTS: tuple[dict[str, Any], ...] = (
    {"mode": "sweep", "max_tokens": 16},
    {"mode": "chunked", "max_tokens": 16, "chunk": 8},
    {"mode": "ar", "max_tokens": 8},
    {"mode": "ar-speculative", "max_tokens": 12},
    {"mode": "resample", "max_tokens": 8, "chunk": 8, "candidates": 4},
    {"mode": "local", "max_tokens": 8},
)
PICTURES: tuple[dict[str, Any], ...] = (
    {"classes": "0", "mode": "chain", "levels": 6, "pictures": 2},
    {"classes": "1", "mode": "steps", "levels": 3, "codec": "int8"},
    {"classes": "0", "mode": "local", "levels": 3},
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/api/race", "/v1/images/generations", "/v1/responses")


def hop() -> Target:
    """A hop, for hosts of several deployments; the first byte chooses the host."""
    bundles = (SHIPPED, SHIPPED / "pictures")
    plans = [plan_host(bundle, blocks) for bundle in bundles for blocks in ((0,), (1,), (2,), (0, 1, 2))]

    def parse(data: bytes) -> None:
        parse_hop(stage_pb2.Hop.FromString(data[1:]), plans[data[0] % len(plans)])

    def seeds() -> Iterator[bytes]:
        for number, plan in enumerate(plans):
            for kind, source in plan.models.items() if plan.is_first else ():
                for work in first_works(kind, source):
                    hop = stage_pb2.Hop(router="r", session="s", digest=source.digest, capacity=90, left_s=60)
                    put_work(hop, work)
                    yield bytes([number]) + hop.SerializeToString()

    return Target(parse, seeds(), (DecodeError, StatusError), changed_message(stage_pb2.Hop), chooses=1)


def first_works(kind: str, source: ModelSource) -> list[Any]:
    """What may open a session of a model of this kind."""
    if source.manifest.draws:
        work = stage_pb2.Draw if kind == "chain" else stage_pb2.Denoise
        return [work(drawing=drawing_of(PLAN, classes=[0, 1]), codec="int8")]
    vocabulary = source.vocabulary
    sampling, clean = stage_pb2.Sampling(seed=SEED, temperature=0.8), vocabulary.encode(range(40))
    if kind == "chain":
        return [stage_pb2.Sweep(clean=clean, slots=16, steps=2, codec="int8", sampling=sampling)]
    read: dict[str, Any] = {"clean": clean, "codec": "fp32", "sampling": sampling}
    candidates = [vocabulary.encode(range(n, n + 6)) for n in range(4)]
    return [
        step(prompt=40, **read),
        step(prompt=35, draft=5, **read),
        step(prompt=36, draft=4, depths=(0, 1, 1, 2), **read),
        step(candidates=candidates, **read),
    ]


def request() -> Target:
    """A request to a router whose model has tokens and a chat template; the first byte of an input chooses the mode."""
    calls = "{{ tools | tojson }}" + '<tool_call>\n{"name": ..., "arguments": ...}</tool_call>'
    written = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    encoding, template = Tokenizer.from_str(tiny_tokenizer(300)), ChatTemplate(written + calls)
    spoken = PretrainedTokenizer(encoding, Vocabulary(300), frozenset({257}), template)

    class Served(Mode):
        problem, positions, tokenizer = "", 4096, spoken

        def __init__(self, name: str) -> None:
            self.name = name

        def generate(self, request: object, account: object) -> Any:  # noqa: ANN401
            raise NotImplementedError

    modes, loop = [Served(name) for name in MODES], asyncio.new_event_loop()

    class Pools(validation.PromptPools):
        async def schema_problem(self, caller: str, schema: str) -> str:
            return ""  # the check takes a process of its own for each

    pools = Pools()

    async def taken(message: router_pb2.GenerateRequest, mode: Mode) -> None:
        generation = validation.check_request(message, mode, time.monotonic() + 60)
        chat = validation.parsed_chat(message)
        generation = await validation.tokenized(generation, chat, mode, Account(), pools)
        validation.check_fit(generation, mode)

    def parse(data: bytes) -> None:
        message = router_pb2.GenerateRequest.FromString(data[1:])
        loop.run_until_complete(taken(message, modes[data[0] % len(modes)]))

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    chat = router_pb2.GenerateRequest(max_tokens=4, mode="ar", tools=json.dumps([tool]), must_call=["f"])
    for role, more in (("system", {}), ("user", {}), ("assistant", {"tool_calls": [tool]}), ("tool", {"name": "f"})):
        chat.messages.add(role=role, content="the <extra_257> sea", more=json.dumps(more))
    sent = [*(Request(prompt=PROMPT, **asked).message() for asked in TEXTS), chat]
    seeds = [bytes([[*MODES].index(each.mode)]) + each.SerializeToString() for each in sent]
    mutate = changed_message(router_pb2.GenerateRequest)
    return Target(parse, seeds, (DecodeError, StatusError), mutate, chooses=1)


class Router(router_pb2_grpc.RouterServiceServicer):
    """Draws two classes, it says, and answers all requests with UNIMPLEMENTED."""

    async def Tokenize(self, request: object, context: Any) -> router_pb2.TokenizeResponse:  # noqa: ANN401
        return await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no texts here")

    async def Status(self, request: object, context: object) -> router_pb2.StatusResponse:
        shown = stage_pb2.PictureInfo(classes=["0", "1"], height=8, width=8, channels=1)
        return router_pb2.StatusResponse(ready=True, pictures=shown, drawing_modes=["chain", "steps", "local"])

    async def Generate(self, request: object, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        yield await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no texts here")

    async def Deploy(self, request_iterator: object, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        yield await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no texts here")

    Draw = Rollback = Generate


def http() -> Target:
    """A body that is posted to the gateway; the first byte of an input chooses the path."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def started() -> tuple[grpc.aio.Server, httpx.AsyncClient]:
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
        router = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        app: Any = make_app(HttpSettings(router=router), AsyncClient(router))
        json_bodies = {"content-type": "application/json"}
        return server, httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", headers=json_bodies
        )

    running = loop.run_until_complete(started())  # a server that nothing holds stops

    def parse(data: bytes) -> None:
        answer = loop.run_until_complete(running[1].post(PATHS[data[0] % len(PATHS)], content=data[1:]))
        if answer.status_code == 500 or (answer.status_code == 502 and b"unimplemented" not in answer.content):
            raise AssertionError(f"status {answer.status_code}: {answer.content[:200]!r}")

    asked = [each for mode in TEXTS for each in text_bodies(mode)]
    asked += [each for mode in PICTURES for each in picture_bodies(mode)]
    seeds = [bytes([PATHS.index(path)]) + json.dumps(body).encode() for path, body in asked]
    return Target(parse, seeds, (), changed_json, chooses=1)


def text_bodies(asked: dict[str, Any]) -> list[tuple[str, Any]]:
    """A body for each path that writes."""
    own = {key: value for key, value in asked.items() if key != "max_tokens"} | {"timeout_s": 3.0}
    common = {"model": "onesweep", "max_tokens": 4, "seed": SEED, "temperature": 0.5, "onesweep": own}
    messages = [{"role": "user", "content": PROMPT}]
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    items = [*messages, call, {"type": "function_call_output", "call_id": "x", "output": "y"}]
    tools = {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}
    race = {"prompt": PROMPT, "entrants": ["sweep", str(asked["mode"])], "max_bytes": 4}
    return [
        (PATHS[0], {**common, "prompt": PROMPT, "n": 1, "stop": ["."], "stream": False}),
        (PATHS[1], {**common, "messages": messages, "stream": True}),
        (PATHS[2], race),
        (PATHS[4], {"model": "onesweep", "max_output_tokens": 4, "input": items, **tools, "onesweep": own}),
    ]


def picture_bodies(asked: dict[str, Any]) -> list[tuple[str, Any]]:
    """A body for each path that draws."""
    own = {key: value for key, value in asked.items() if key not in ("classes", "pictures")} | {"timeout_s": 3.0}
    body = {"model": "onesweep", "seed": SEED, "onesweep": own, "prompt": asked["classes"], "n": 1, "size": "auto"}
    return [(PATHS[3], {**body, "response_format": "b64_json"})]
