"""A trial of a release through the hosts, before anybody is served with it.

Each host has measured its own parts (stages/checkpoint.py); here the whole is: that every mode writes, and that what
the pipelines make of the manifest's probe text is as likely as the manifest says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc

from serving.accounting import Account
from serving.admission import check_fit, spelled
from serving.again import truthful
from serving.candidates import check_scores, read_scores
from serving.modes import Generation, Mode
from serving.served import Served
from serving.session import Betrayed
from serving.view import RingView
from stages.alphabet import Alphabet
from stages.bundle import find_bundle
from stages.manifest import Manifest, read_manifest
from stages.probe import probe_symbols
from stages.refusal import Refusal, failed_precondition
from stages.scoring import most_scored
from stages.sessions import Kind
from stages.v1 import stage_pb2

PROMPT, SUFFIX = b"The old man said that ", b" and went home."
TRIAL_TOKENS = 8
TRIAL_S = 60.0
TOLERANCE = 0.05
"""Nats: what a backend may round beyond the manifest's own tolerance. Parts that do not belong together miss by far."""
BUSY_TRIES, BUSY_PAUSE_S = 10, 0.5
PIPELINES: tuple[Kind, ...] = ("ar", "scorer")

T = TypeVar("T")


async def try_out(served: Served, directory: Path, say: Callable[[str], object]) -> dict[str, float]:
    """Nats a symbol that each pipeline gives its probe text, by kind. Raises Refusal with what is wrong."""
    measured: dict[str, float] = {}
    paths = vars(find_bundle(directory))
    for kind in PIPELINES:
        if paths[kind] is not None:
            manifest = read_manifest(paths[kind])
            measured[kind] = await _when_free(partial(_nats, served.view, kind, manifest))
            _judge(kind, manifest, measured[kind])
            say(f"{kind}: {measured[kind]:.4f} nats a symbol on its probe text, through the hosts")
    for name in served.served_modes:
        await _when_free(partial(_write, served.modes[name]))
    say(f"modes that write: {', '.join(served.served_modes)}")
    return measured


async def _when_free(job: Callable[[], Awaitable[T]]) -> T:
    """What `job` gives, once hosts that are busy with requests have room for it, and none of them lies."""
    for left in reversed(range(BUSY_TRIES)):
        try:
            return await job()
        except Betrayed as betrayed:  # that host is taken out
            if not left:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{betrayed} in the trial: look at the hosts") from None
        except Refusal as refusal:
            if refusal.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or not left:
                raise
            await asyncio.sleep(BUSY_PAUSE_S)
    raise AssertionError


def expected_nats(manifest: Manifest) -> float | None:
    """Loss for a symbol on the probe text that a manifest recorded for its last part."""
    last = manifest.parts[-1]
    measure = "next_byte_nats" if manifest.tokenizer == "bytes" else "next_token_nats"
    return last.probe.get(measure) if last else None


def _judge(kind: str, manifest: Manifest, nats: float) -> None:
    expected = expected_nats(manifest)
    if expected is None or not abs(nats - expected) <= manifest.probe_tolerance + TOLERANCE:  # true for NaN too
        raise failed_precondition(
            f"{kind}/: its probe text takes {nats:.4f} nats a symbol through the hosts, its manifest says {expected}: "
            "the parts do not make the model that they should"
        )


async def _write(mode: Mode) -> None:
    generation = Generation(
        PROMPT, TRIAL_TOKENS, 1, _deadline(), codec=mode.default_codec, suffix=SUFFIX if mode.fills else b""
    )
    try:
        account = Account()
        generation = await spelled(generation, (), mode, account)
        check_fit(generation, mode)
        async for _ in truthful(mode, generation, account):
            pass
    except Refusal as refusal:
        raise Refusal(refusal.code, f"mode {mode.name} fails with it: {refusal.message}") from None
    if account.output_tokens != TRIAL_TOKENS and not generation.ends:
        raise failed_precondition(f"mode {mode.name} wrote {account.output_tokens} tokens of {TRIAL_TOKENS} with it")


async def _nats(view: RingView, kind: Kind, manifest: Manifest) -> float:
    alphabet, most = Alphabet(manifest.architecture.vocabulary), most_scored(manifest.architecture.width)
    known = probe_symbols(manifest)[0].tolist()
    total = 0.0
    async with view.session(kind, len(known), _deadline(), Account()) as session:
        number, read = 0, 0
        for at in range(1, len(known), most):
            piece = known[at : at + most]
            step = stage_pb2.Step(
                number=number,
                start=read,
                clean=alphabet.encode(known[read:at]),
                remaining=1,
                sampling=stage_pb2.Sampling(temperature=1.0),
                codec="fp32",
                candidates=[alphabet.encode(piece)],
            )
            await session.push(step)
            event = await session.event(partial(check_scores, shape=(1, len(piece))))
            total -= float(read_scores(event.scores.nats, 1, len(piece)).sum())
            number, read = number + 1, at
    return total / (len(known) - 1)


def _deadline() -> int:
    return int((time.time() + TRIAL_S) * 1000)
