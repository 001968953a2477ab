"""Requests to an engine: hops, each made of the results before it."""

import secrets
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import put_work
from tests.stages.raw_client import ROUTER

Hops = Generator[stage_pb2.Hop, stage_pb2.Event, None]
Make = Callable[[], Hops]
PROMPT = b"The rain had stopped, and "


def step(
    *,
    remaining: int = 1,
    draft: int = 0,
    depths: Sequence[int] = (),
    candidates: Sequence[bytes] = (),
    sampling: stage_pb2.Sampling | None = None,
    drafting: stage_pb2.Drafting | None = None,
    **fields: Any,
) -> stage_pb2.Read:
    """A step of a pipeline: it scores `candidates`, or samples after `draft` draft tokens, or after none."""
    if candidates:
        temperature = sampling.temperature if sampling else 0.0
        return stage_pb2.Read(score=stage_pb2.Score(candidates=candidates, temperature=temperature), **fields)
    tree = stage_pb2.DraftTree(depths=depths) if depths else None
    sample = stage_pb2.Sample(sampling=sampling, draft=draft, tree=tree, drafting=drafting)
    if drafting or not (draft or depths):
        sample.remaining = remaining
    return stage_pb2.Read(sample=sample, **fields)


LONG_PROMPT = bytes(i * 37 % 96 + 32 for i in range(400))


def opening(digest: str = "", session: str = "s", **fields: Any) -> stage_pb2.Hop:
    """The first step of a session: it reads LONG_PROMPT, unless `fields` tell otherwise."""
    hop = stage_pb2.Hop(router=ROUTER, session=session, digest=digest, capacity=500)
    hop.left_s = 30
    sampling = stage_pb2.Sampling(seed=3, temperature=0.8)
    fields = {"clean": LONG_PROMPT, "codec": "fp32", **fields}
    if not fields.get("candidates"):
        fields = {"prompt": len(fields["clean"]) - fields.get("draft", 0), **fields}
    put_work(hop, step(**fields, sampling=sampling))
    return hop


# Requests: hops, each made of the results before it
def envelope(kind: str, capacity: int) -> stage_pb2.Hop:
    return stage_pb2.Hop(router=kind, session=secrets.token_hex(8), capacity=capacity, left_s=600)


def sweeps(
    prompt: bytes = PROMPT, chunks: Sequence[int] = (16,), seed: int = 0, temperature: float = 0.8, **fields: Any
) -> Hops:
    """One sweep for each chunk. `router` holds the model's kind: no server listens here."""
    hop, start, clean = envelope("chain", len(prompt) + sum(chunks[:-1])), 0, prompt
    sampling = stage_pb2.Sampling(seed=seed, temperature=temperature)
    for number, slots in enumerate(chunks):
        sweep = {"steps": 2, "codec": "int8", **fields, "start": start, "clean": clean, "slots": slots}
        hop.sweep.CopyFrom(stage_pb2.Sweep(number=number, sampling=sampling, **sweep))
        event = yield hop
        start, clean = start + len(clean), event.text


def steps(
    prompt: bytes = PROMPT,
    count: int = 4,
    seed: int = 0,
    temperature: float = 0.8,
    codec: str = "fp32",
    draft: Callable[[bytes], bytes] = lambda text: b"",
) -> Hops:
    """AR steps until there are `count` bytes; `draft` may say what comes next."""
    hop, text, read = envelope("ar", len(prompt) + count - 1), b"", 0
    sampling = stage_pb2.Sampling(seed=seed, temperature=temperature)
    number = 0
    while left := count - len(text):
        drafted = draft(text)[: left - 1]
        clean = (prompt + text)[read:] + drafted
        fields = {"number": number, "start": read, "clean": clean, "draft": len(drafted), "prompt": len(prompt)}
        put_work(hop, step(**fields, sampling=sampling, codec=codec))
        event = yield hop
        text += event.text
        read, number = len(prompt + text) - 1, number + 1


def scores(
    prompt: bytes = PROMPT,
    chunks: Sequence[int] = (6, 6),
    count: int = 5,
    seed: int = 0,
    temperature: float = 0.8,
    codec: str = "fp32",
) -> Hops:
    """`count` candidates for each chunk; the likeliest is the text. What comes back for it are the scores."""
    hop, clean, start = envelope("ar", len(prompt) + sum(chunks[:-1])), prompt, 0
    sampling, rng = stage_pb2.Sampling(seed=seed, temperature=temperature), np.random.default_rng(seed)
    for number, length in enumerate(chunks):
        candidates = [rng.bytes(length) for _ in range(count)]
        fields = {"start": start, "clean": clean, "candidates": candidates, "codec": codec}
        put_work(hop, step(number=number, sampling=sampling, **fields))
        event = yield hop
        nats = np.frombuffer(event.scores.nats, "<f8")
        start, clean = start + len(clean), candidates[int(nats.argmax())]


def hidden_rows(read: stage_pb2.Read, vocabulary: Vocabulary) -> int:
    """Rows of hidden states that travel with `read`; nothing is asked after the last token of a candidate."""
    inner = sum(vocabulary.count(each) - 1 for each in read.score.candidates)
    return vocabulary.count(read.clean) + inner
