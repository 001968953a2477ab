"""A scorer on a ring of three processes: the steps of a request as a router sends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.router.accounting import Account
from serving.router.ring import Ring, RingView
from serving.router.session import Session
from serving.router.topology import Topology, local_topology
from stages.checkpoint.checkpoint import load_ar
from stages.model.pipeline import ArModel
from stages.model.randomness import sample_symbols
from stages.v1 import stage_pb2
from stages.wire.status import StatusError
from tests.stages.hops import step

KNOWN = b"Nobody had seen the harbour so quiet "
SAMPLING = stage_pb2.Sampling(seed=11, temperature=0.8)


@pytest.fixture(scope="module")
def topology(bundles: Path) -> Iterator[Topology]:
    planned = local_topology(3, 3, bundles / "scored", free_port_block(4) + 1)
    with temporary_deployment(planned, bundles / "scored"):
        yield planned


@pytest.fixture(scope="module")
def models(bundles: Path) -> dict[str, ArModel]:
    return {kind: load_ar(bundles / "scored" / kind) for kind in ("ar", "scorer")}


def tell(topology: Topology, story: Callable[[RingView], Awaitable[Any]]) -> Any:
    """Run `story` with a ring of one's own."""

    async def main() -> Any:
        ring = Ring(topology.hosts)
        await ring.open()
        try:
            view = RingView(ring)
            await view.usable(20.0)
            return await asyncio.wait_for(story(view), 60)
        finally:
            await ring.close()

    return asyncio.run(main())


async def ask(session: Session, clean: bytes, start: int = 0, **fields: Any) -> stage_pb2.Event:
    await session.push(step(clean=clean, start=start, sampling=SAMPLING, **{"remaining": 1, "codec": "fp32", **fields}))
    return await session.event()


def deadline() -> int:
    return int(time.time() * 1000) + 60_000


def logits_after(model: ArModel, text: bytes) -> torch.Tensor:
    return model(torch.tensor([list(text)]))[0, -1:]


@pytest.mark.parametrize("kind", ["ar", "scorer"])
def test_a_chunk_is_scored_chosen_and_gone_on_from(topology: Topology, models: dict[str, ArModel], kind: Any) -> None:
    async def story(ring: RingView) -> None:
        rng, known, clean, start = np.random.default_rng(0), KNOWN, KNOWN, 0
        with Session(ring, kind, 200, deadline(), Account()) as session:
            for number in range(3):
                candidates = [rng.bytes(9) for _ in range(6)]
                event = await ask(session, clean, start, number=number, candidates=candidates)
                assert [passage.host for passage in event.timings] == ["host-1", "host-2", "host-3"]
                found = np.frombuffer(event.scores.nats, "<f4").reshape(6, 9)
                texts = torch.tensor([list(known + candidate) for candidate in candidates])
                nats = (models[kind](texts).double() / 0.8).log_softmax(-1)[:, len(known) - 1 : -1]
                wanted = nats.gather(2, texts[:, len(known) :, None])[:, :, 0].numpy()
                assert np.allclose(found, wanted, rtol=1e-4, atol=1e-4)
                start, clean = len(known), candidates[int(found.sum(axis=1).argmax())]
                known += clean

    with torch.inference_mode():
        tell(topology, story)


def test_steps_and_verdicts_of_the_scorer(topology: Topology, models: dict[str, ArModel]) -> None:
    async def story(ring: RingView) -> tuple[bytes, stage_pb2.Verdict]:
        text = b""
        with Session(ring, "scorer", 200, deadline(), Account()) as session:
            event = await ask(session, KNOWN, remaining=12)
            text += event.text
            while len(text) < 12:
                text += (await session.event()).text
        with Session(ring, "scorer", 200, deadline(), Account()) as session:
            guesses, odds = text[:4] + b"zzzz", np.array([1e-9] * 4 + [1.0] * 4, dtype="<f4").tobytes()
            event = await ask(session, KNOWN + guesses, draft=8, odds=odds, draws=2)
        return text, event.verification

    with torch.inference_mode():
        text, verdict = tell(topology, story)
        wanted = b""
        while len(wanted) < 12:
            position = len(KNOWN) + len(wanted)
            wanted += sample_symbols(logits_after(models["scorer"], KNOWN + wanted), 0.8, SAMPLING.seed, position)
        assert text == wanted
        assert verdict.accepted >= 4
        whole = KNOWN + text[:4] + b"zzzz"[: verdict.accepted - 4]
        assert verdict.accepted < 8
        p = (logits_after(models["scorer"], whole)[0].double() / 0.8).softmax(-1).numpy()
        assert np.allclose(np.frombuffer(verdict.odds, "<f4"), p, atol=1e-5)


def test_hosts_say_what_is_wrong(topology: Topology) -> None:
    async def story(ring: RingView) -> StatusError:
        model = ring.model("scorer")
        assert model is not None
        assert ring.digest("scorer") == model.digest != ring.digest("ar")
        with Session(ring, "scorer", 200, deadline(), Account()) as session, pytest.raises(StatusError) as caught:
            await ask(session, KNOWN, candidates=[b"one", b"three"])
        return caught.value

    refusal = tell(topology, story)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "candidates must have one length" in refusal.message
