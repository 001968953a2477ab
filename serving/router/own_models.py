"""The router's own computation: a small model that drafts and generates without a sweep, and the repeat of hosts' work.

This imports torch, which costs a second and 150 MB: a router that computes nothing does not load it.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from serving.modes.tokenizer import tokenizer_id
from stages.backends.packed import PipelineRunner
from stages.backends.whole_model import Continuations, WholeModel
from stages.clock import monotonic
from stages.errors import CheckpointError
from stages.host.parts import Parts, load_parts
from stages.host.plan import HostPlan, plan_host
from stages.host.sessions import HostSession, SessionStore
from stages.host.validation import parse_hop
from stages.limits import MAX_CANDIDATES
from stages.model.randomness import sample_tokens
from stages.model.resampling import Candidates
from stages.model.scoring import MAX_LOGITS, PLAIN, Shaping
from stages.v1 import stage_pb2
from stages.wire.messages import Outcome, copy_of, merged, results_of
from stages.wire.status import StatusError, deadline_exceeded, failed_precondition

# Tokens generated before other requests get a turn.
TOKENS_PER_TURN = 8


class LocalModel(WholeModel):
    """The router's own small model, which computes on its own thread."""

    # Limit on the KV caches of all continuations generated together, for one request or many. With two layers of
    # width 128, a cache of 256 tokens takes 0.5 MB, so 512 fit.
    max_draft_bytes = 256 << 20

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError."""
        super().__init__(directory)
        # The `Tokenizer.id` of its tokens, and the name of the model.
        self.tokenizer_id, self.digest = tokenizer_id(self.manifest), self.manifest.digest()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")

    @cached_property
    def stages(self) -> list[PipelineRunner]:
        """The stages, as for any model. Raises StatusError: only the first request loads them."""
        try:
            return super().stages
        except CheckpointError as error:
            raise failed_precondition(f"the router cannot load its own model: {error}") from None

    def max_branches(self, length: int) -> int:
        """Most continuations of `length` tokens that one request may generate together."""
        fit = self.max_draft_bytes // max(self.text_bytes(length), 1)
        return min(fit, MAX_CANDIDATES, MAX_LOGITS // self.vocabulary.size)

    async def draft(self, written: Continuations, due_at: float) -> Candidates:
        """Draft all of it before other requests get a turn. Raises StatusError at the deadline (monotonic clock)."""
        gone = threading.Event()

        def write() -> Candidates:
            begin = monotonic()
            while not written.is_done:
                if gone.is_set() or due_at <= monotonic():
                    raise late()
                self.write([written])
            return written.candidates((monotonic() - begin) * 1000)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.compute, write)
        finally:
            gone.set()

    async def generate(
        self, prompt: bytes, max_tokens: int, temperature: float, seed: int, due_at: float, shaping: Shaping = PLAIN
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """Yield pieces as (tokens, compute milliseconds). Raises StatusError when the deadline passes."""
        first, loop = self.vocabulary.count(prompt), asyncio.get_running_loop()
        text, known = self.open(first + max_tokens), prompt

        def turn(begin: int, end: int) -> tuple[bytes, float]:
            began, whole = monotonic(), known
            for position in range(begin, end):
                logits = shaping.adjusted(text.logits_after(whole), np.array(self.vocabulary.tokens(whole)))
                whole += sample_tokens(logits, temperature, seed, position, shaping)
            return whole[len(known) :], (monotonic() - began) * 1000

        for begin in range(first, first + max_tokens, TOKENS_PER_TURN):
            if due_at <= monotonic():
                raise late()
            end = min(begin + TOKENS_PER_TURN, first + max_tokens)
            piece, compute_ms = await loop.run_in_executor(self.compute, turn, begin, end)
            yield piece, compute_ms
            known += piece


def late() -> StatusError:
    return deadline_exceeded("the deadline of this request has passed")


# The router's own computation of a host's work: the third opinion when two hosts disagree.

MAX_BYTES = 1 << 30


class ReferenceVerifier:
    """The models of the served bundles, read on first use. Blocks the calling thread."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoints: tuple[Path, ...] = (checkpoint,)
        self._loaded: dict[Path, Parts] = {}

    def look_at(self, *checkpoints: Path) -> None:
        """Use exactly these bundles."""
        self._checkpoints = checkpoints
        self._loaded = {path: parts for path, parts in self._loaded.items() if path in checkpoints}

    @torch.inference_mode()
    def results(self, steps: Sequence[Sequence[stage_pb2.Hop]]) -> list[stage_pb2.Event]:
        """Compute the results of some steps' hops; the first step opens a session, with weights that this has.

        Raises OnesweepError, and StatusError for a hop that no host would take.
        """
        first = steps[0][0]
        found = self.find(first.digest)
        assert found is not None
        path, plan = found
        parts = self._loaded.get(path) or load_parts(plan)
        self._loaded[path] = parts
        kind = parse_hop(first, plan).kind
        session = SessionStore(MAX_BYTES, lease_s=MAX_BYTES).open(
            first.session, first.router, kind, first.capacity, parts, now_s=0.0
        )
        results = list[stage_pb2.Event]()
        for hops in steps:
            events = [event for hop in hops for event in _events(hop, session)]
            continues = hops[-1].read.score.remaining > 0
            results += events if continues else [merged(events[-results_of(hops) :])]
        return results

    def find(self, digest: str) -> tuple[Path, HostPlan] | None:
        """The bundle with these weights, if any, and the plan of a host that holds all of it. Raises OnesweepError."""
        for checkpoint in self._checkpoints:
            loaded = self._loaded.get(checkpoint)
            plan = loaded.plan if loaded else plan_host(checkpoint, tuple(range(plan_host(checkpoint, (0,)).parts)))
            if digest and digest in plan.weights:
                return checkpoint, plan
        return None


def _events(hop: stage_pb2.Hop, session: HostSession) -> Iterator[stage_pb2.Event]:
    parts = session.parts
    outcome: Outcome | None = hop
    while isinstance(outcome, stage_pb2.Hop):  # the next step of pictures or candidates starts from the last one's hop
        work = parse_hop(copy_of(outcome), parts.plan)
        work.begin(session, parts.plan.blocks[-1] + 1)
        while work.outcome is None:
            call = work.next_op()
            work.complete(call.compute([call.piece])[0])
        outcome = work.outcome
        if work.result is not None:
            yield work.result
    assert outcome is not None
    yield outcome
