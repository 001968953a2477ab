"""Random sweeps are computed again by other hosts: one that lies is named and taken out.

An audited sweep goes hop by hop to each of its hosts and to a replica with the same blocks, from the router. Where the
two disagree by more than rounding, a third opinion decides: another replica, or the router itself where it has the
checkpoint. A host that lies only where nobody asks it alone is found by sending the sweep round again with each host
in turn left out. Nobody is quarantined who could be honest, if one host of those asked lies, however seldom.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from onesweep.serving.router.paths import HostLink, HostPath, Weights
from onesweep.serving.router.topology import HostEntry
from onesweep.stages.backends.sweep import FEATURES
from onesweep.stages.errors import CodecError, OnesweepError
from onesweep.stages.host.parts import MODEL_KINDS, HostPlan, ModelKind, Parts, load_parts, plan_host
from onesweep.stages.host.sessions import Session, SessionStore
from onesweep.stages.host.validation import check_timings, parse_hop
from onesweep.stages.host.work import begin_work
from onesweep.stages.model.codec import CODECS, FEATURE_LIMIT, HIDDEN, StateCodec
from onesweep.stages.model.vocabulary import BYTES, Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import Outcome, StageWork, copy_of, hidden_rows, merged, results_of, work_of
from onesweep.stages.wire.status import StatusError, internal, unavailable

if TYPE_CHECKING:
    from onesweep.serving.router.ring import Ring

log = logging.getLogger(__name__)

# Whether two hosts gave the same answer to the same hop, as far as honest machines do.


# Largest difference of honest numbers, relative to the largest of their row where that is over one: what backends are
# held to (stages/backends/runner_checks.py), and above what they were measured to differ by.
TOLERANCE = 1e-3
# And where they were rounded to integers, so many steps more: a rounding may fall either way.
STEPS = 1.01


def agree(one: Outcome, other: Outcome, model: stage_pb2.ModelInfo | None = None) -> bool:
    """True where two outcomes of one hop differ by no more than rounding. `model`: the hop's; None reads bytes."""
    if isinstance(one, stage_pb2.Event) or isinstance(other, stage_pb2.Event):
        return isinstance(one, stage_pb2.Event) and isinstance(other, stage_pb2.Event) and same_result(one, other)
    if _but_numbers(one) != _but_numbers(other):
        return False
    if one.WhichOneof("work") == "sweep":
        mine, theirs, alphabet = one.sweep, other.sweep, _alphabet(model)
        estimates = _near(mine.estimate, theirs.estimate, CODECS.get(mine.codec), mine.slots)
        read = _near(mine.features, theirs.features, FEATURES, alphabet.count(mine.clean))
        return estimates and read and _near(mine.slot_features, theirs.slot_features, FEATURES, mine.slots)
    if one.WhichOneof("work") == "draw":
        draw, shown = one.draw, (model or stage_pb2.ModelInfo()).pictures
        side = max(shown.patch, 1)
        rows = len(draw.drawing.classes) * (shown.height // side) * (shown.width // side)
        return _near(draw.estimate, other.draw.estimate, CODECS.get(draw.codec), rows)
    step, theirs_step = work_of(one), work_of(other)
    assert isinstance(step, StageWork)
    assert isinstance(theirs_step, StageWork)
    return _near(step.hidden, theirs_step.hidden, HIDDEN.get(step.codec), hidden_rows(step, _alphabet(model)))


def all_agree(ours: Sequence[Outcome], theirs: Sequence[Outcome], model: stage_pb2.ModelInfo) -> bool:
    """True where two hosts answered the same hops alike, one by one."""
    return all(agree(*pair, model) for pair in zip(ours, theirs, strict=True))


def same_result(one: stage_pb2.Event, other: stage_pb2.Event) -> bool:
    """True where two sweeps ended alike: the same text, or the same numbers but for rounding."""
    kind = one.WhichOneof("outcome")
    if kind != other.WhichOneof("outcome"):
        return False
    if kind == "scores":
        mine, theirs = one.scores, other.scores
        return mine.batch == theirs.batch and _close(_floats(mine.nats, "<f8"), _floats(theirs.nats, "<f8"))
    if kind == "verification":
        verdict, another = one.verification, other.verification
        same = (verdict.accepted, verdict.symbols) == (another.accepted, another.symbols)
        return same and _close(_floats(verdict.odds), _floats(another.odds))
    if kind == "pictures":
        drawn, again = (np.frombuffer(event.pictures.pixels, np.uint8).astype(np.int16) for event in (one, other))
        # Honest numbers that differ by TOLERANCE may round to neighbouring shades.
        return drawn.shape == again.shape and np.allclose(drawn, again, rtol=0, atol=1)
    told, told_again = (_floats(event.logprobs.nats + event.logprobs.top_nats) for event in (one, other))
    return (one.text, one.complete) == (other.text, other.complete) and _close(told, told_again)


def _alphabet(model: stage_pb2.ModelInfo | None) -> Alphabet:
    return Alphabet(model.vocabulary) if model is not None and model.vocabulary else BYTES


def _but_numbers(hop: stage_pb2.Hop) -> stage_pb2.Hop:
    """A hop without its computed numbers: the part that must be equal to the last bit."""
    told = copy_of(hop)
    for name in ("timings", "session"):
        told.ClearField(name)
    if told.WhichOneof("work") is not None:
        work = work_of(told)
        for payload in {"estimate", "features", "slot_features", "hidden"} & set(work.DESCRIPTOR.fields_by_name):
            work.ClearField(payload)  # type: ignore[arg-type]
    return told


def _near(mine: bytes, theirs: bytes, codec: StateCodec | None, rows: int) -> bool:
    if mine == theirs:  # as on machines of one kind
        return True
    if codec is None or len(mine) != len(theirs) or not rows:
        return False
    try:
        a, b = (codec.decode(each, rows, codec.dim(len(each), rows), FEATURE_LIMIT).numpy() for each in (mine, theirs))
    except CodecError:
        return False
    magnitudes = np.maximum(np.abs(a), np.abs(b))
    largest = magnitudes.max(axis=1, initial=0.0, keepdims=True)
    allowed = TOLERANCE * np.maximum(largest, 1.0) + STEPS * codec.steps(magnitudes)
    return bool((np.abs(a - b) <= allowed).all())


def _floats(payload: bytes, dtype: str = "<f4") -> NDArray[np.float64]:
    size = np.dtype(dtype).itemsize
    return np.frombuffer(payload[: len(payload) // size * size], dtype=dtype).astype(np.float64)


def _close(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> bool:
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


# The router's own computation of a host's work: the third opinion where two hosts disagree.

MOST_BYTES = 1 << 30


class ReferenceVerifier:
    """Any blocks of the bundles that are served, read when they are first asked for. Blocks the thread that asks."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoints: tuple[Path, ...] = (checkpoint,)
        self._parts: dict[tuple[Path, tuple[int, ...]], Parts] = {}

    def look_at(self, *checkpoints: Path) -> None:
        """Know these bundles, and no others."""
        self._checkpoints = checkpoints
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] in checkpoints}

    def knows(self, host: HostEntry, digest: str) -> bool:
        """True where it has those weights for that host's blocks. Raises OnesweepError."""
        return self._plan(host.blocks, digest) is not None

    @torch.inference_mode()
    def outcomes(self, hops: Sequence[stage_pb2.Hop], host: HostEntry) -> list[Outcome]:
        """Outcomes of hops, the first of which opens a session on `host`, whose weights it `knows`.

        Raises OnesweepError, and Refusal for a hop that no host would take.
        """
        first = hops[0]
        found = self._plan(host.blocks, first.digest)
        assert found is not None
        key, plan = (found[0], host.blocks), found[1]
        parts = self._parts.get(key) or load_parts(plan)
        self._parts[key] = parts
        kind = parse_hop(first, parts.plan).kind
        source = parts.plan.models[kind]
        session = SessionStore(MOST_BYTES, lease_s=MOST_BYTES).open(
            first.session, first.router, kind, first.capacity, source.manifest, parts
        )
        return [_outcome(hop, session) for hop in hops]

    def _plan(self, blocks: tuple[int, ...], digest: str) -> tuple[Path, HostPlan] | None:
        """The bundle that has those weights, and what a host with `blocks` has of it."""
        for checkpoint in self._checkpoints:
            loaded = self._parts.get((checkpoint, blocks))
            plan = loaded.plan if loaded else plan_host(checkpoint, blocks)
            if _kind(plan, digest) is not None:
                return checkpoint, plan
        return None


def _outcome(hop: stage_pb2.Hop, session: Session) -> Outcome:
    parts = session.parts
    work = begin_work(parse_hop(hop, parts.plan), copy_of(hop), session, parts.plan.blocks[-1] + 1)
    while work.outcome is None:
        call = work.next_op()
        work.complete(call.compute([call.piece])[0])
    if isinstance(work.outcome, stage_pb2.Hop) and hop.path:
        work.outcome.place = (hop.place + 1) % len(hop.path)  # addressed as a host does, or no host would ever agree
    return work.outcome


def _kind(plan: HostPlan, digest: str) -> ModelKind | None:
    return next((kind for kind in MODEL_KINDS if kind in plan.models and plan.models[kind].digest == digest), None)


@dataclass
class AuditCounters:
    """Cost and findings of audits."""

    # That could have been audited.
    sweeps: int = 0
    audited: int = 0
    # Computed again.
    hops: int = 0
    # Of hosts, for audits.
    compute_ms: float = 0.0
    faulty_hosts: int = 0


@dataclass(frozen=True)
class AuditedSweep:
    """A sweep that came back."""

    path: HostPath
    weights: Weights
    # Its first hop, or its pieces, for hosts that have read nothing yet.
    opening: Sequence[stage_pb2.Hop]
    # The end of it.
    event: stage_pb2.Event
    # Of the weights: it tells how numbers lie in rows.
    model: stage_pb2.ModelInfo


class Auditor:
    """Audits a share of all sweeps."""

    def __init__(self, ring: Ring, share: float, verifier: ReferenceVerifier | None, seed: int | None = None) -> None:
        """:param share: of sweeps that are audited; 0 = none.
        :param verifier: the router's own computation, if it has the checkpoint."""
        self.ring, self.share, self.verifier = ring, share, verifier
        self.counters = AuditCounters()
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    def picks(self) -> bool:
        """True where the sweep that just came back is to be audited."""
        self.counters.sweeps += 1
        return self._random.random() < self.share

    async def audit(self, sweep: AuditedSweep) -> bool:
        """Compute a sweep again; False when it was wrong. Who lied is taken out, where that can be told.

        Where hosts fail meanwhile, the audit ends without a finding.
        """
        if not any(self._replicas(link, sweep.weights) for link in sweep.path):
            return True
        self.counters.audited += 1
        try:
            return await self._audit(sweep)
        except StatusError as refusal:
            log.info("an audit was given up: %s", refusal.message)
            return True

    async def _audit(self, sweep: AuditedSweep) -> bool:
        hops, compared = sweep.opening, 0
        outcomes: Sequence[Outcome] = sweep.opening
        for link in sweep.path:
            others = self._replicas(link, sweep.weights)
            try:
                outcomes = await self._ask(link, hops)
            except StatusError:  # what a liar might do, too: the end will tell
                outcomes = await self._ask_others(link, hops, others, sweep.model)
                compared += 1
                others = []
            for other in others[:1]:
                theirs = await self._ask(other, hops)
                compared += 1
                if not all_agree(outcomes, theirs, sweep.model):
                    told = (link, outcomes), (other, theirs)
                    guilty, outcomes = await self._judge(hops, *told, others[1:], sweep.model)
                    if guilty is link:
                        return False
            if isinstance(outcomes[-1], stage_pb2.Event):
                break
            hops = [outcome for outcome in outcomes if isinstance(outcome, stage_pb2.Hop)]
        ends = [outcome for outcome in outcomes if isinstance(outcome, stage_pb2.Event)]
        if len(ends) < len(outcomes):
            raise internal("the last host handed a hop on instead of ending it")
        result = merged(ends[-results_of(sweep.opening) :])
        if same_result(result, sweep.event) or not compared:
            return True
        await self._find_by_leaving_out(sweep, result)
        return False

    async def _ask(self, link: HostLink, hops: Sequence[stage_pb2.Hop]) -> Sequence[Outcome]:
        """A host's outcomes of hops, one after the other, in a session that is freed at once. Raises Refusal."""
        session = secrets.token_hex(16)
        try:
            return [await self._ask_one(link, hop, session) for hop in hops]
        except TimeoutError:
            raise unavailable(f"{link.relay.host} did not answer within {link.relay.hop_timeout_s:g} s") from None
        finally:
            self.ring.spawn(link.release(session))

    async def _ask_one(self, link: HostLink, hop: stage_pb2.Hop, session: str) -> Outcome:
        question = copy_of(hop)
        question.session = session
        del question.timings[:]
        async with asyncio.timeout(link.relay.hop_timeout_s):
            outcome = await link.relay.run(question)
        check_timings(outcome.timings)
        self.counters.hops += 1
        self.counters.compute_ms += outcome.timings[-1].compute_ms if outcome.timings else 0.0
        return outcome

    async def _ask_others(
        self, link: HostLink, hops: Sequence[stage_pb2.Hop], others: list[HostLink], model: stage_pb2.ModelInfo
    ) -> Sequence[Outcome]:
        """The right outcomes where `link` does not answer: two other hosts must agree on them. Raises Refusal."""
        for other in others[:1]:
            theirs = await self._ask(other, hops)
            third = await self._third(hops, link, others[1:])
            if third is not None and all_agree(theirs, third, model):
                return theirs
        raise unavailable(f"host {link.entry.name} cannot be asked alone")

    async def _judge(
        self,
        hops: Sequence[stage_pb2.Hop],
        mine: tuple[HostLink, Sequence[Outcome]],
        theirs: tuple[HostLink, Sequence[Outcome]],
        others: list[HostLink],
        model: stage_pb2.ModelInfo,
    ) -> tuple[HostLink | None, Sequence[Outcome]]:
        """Which of two hosts that disagree lied, if that can be told, and the answers to go on with."""
        third = await self._third(hops, mine[0], others)
        for (link, outcomes), (_, right) in ((mine, theirs), (theirs, mine)):
            if third is not None and all_agree(right, third, model) and not all_agree(outcomes, third, model):
                self._quarantine(link, "it computed something else than two others")
                return link, right
        log.error(
            "hosts %s and %s disagree on a hop, and nobody can tell which of them is wrong: start the router with "
            "--checkpoint, or add a third replica",
            mine[0].entry.name,
            theirs[0].entry.name,
        )
        return None, mine[1]

    async def _third(
        self, hops: Sequence[stage_pb2.Hop], link: HostLink, others: list[HostLink]
    ) -> Sequence[Outcome] | None:
        try:
            if self.verifier is not None and self.verifier.knows(link.entry, hops[0].digest):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self.verifier.outcomes, hops, link.entry)
        except OnesweepError as error:
            log.warning("the router's own checkpoint cannot be used for audits: %s", error)
        return await self._ask(others[0], hops) if others else None

    async def _find_by_leaving_out(self, sweep: AuditedSweep, right: stage_pb2.Event) -> None:
        """Take the host of `path` out that lied in the ring, and not when it was asked alone."""
        path, opening = sweep.path, sweep.opening
        names = ", ".join(link.entry.name for link in path)
        if same_result(await self._send_round(path, opening), right):
            log.warning("a sweep over %s was wrong once, and right when it was sent again", names)
            return
        # the liar had a part in every sweep that was wrong; one that was right tells little: it may lie now and then
        suspects, mended = set(path), set[HostLink]()
        for index, link in enumerate(path):
            for other in self._replicas(link, sweep.weights)[:1]:
                around = (*path[:index], other, *path[index + 1 :])
                if same_result(await self._send_round(around, opening), right):
                    mended.add(link)
                else:
                    suspects &= set(around)
        if len(suspects) == 1 and suspects <= mended:
            self._quarantine(suspects.pop(), "its part of a sweep was wrong, and right when it was asked alone")
        else:
            log.error("a sweep over %s was wrong, and nobody can tell why", names)

    # sent as any other sweep: no host can tell an audited one in the ring
    async def _send_round(self, path: HostPath, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Event:
        """Send one sweep round a path, as any other, in a session of its own. Raises StatusError."""
        came = asyncio.Queue[stage_pb2.Event](results_of(hops))
        attempt = self.ring.begin(path, lambda _, event: None if came.full() else came.put_nowait(event))
        events = list[stage_pb2.Event]()
        try:
            for hop in hops:
                sent = copy_of(hop)
                sent.session, sent.place = attempt.name, 0
                sent.path[:] = [link.entry.address for link in path]
                await path[0].relay.push(sent)
            while len(events) < came.maxsize:
                async with asyncio.timeout(self.ring.settings.hop_timeout_s):
                    events.append(await came.get())
                fault = events[-1].fault
                if events[-1].WhichOneof("outcome") == "fault":
                    raise StatusError.numbered(fault.code, fault.message)
        except TimeoutError:
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "an audited sweep did not come back") from None
        finally:
            self.ring.end(attempt)
        return merged(events)

    def _quarantine(self, link: HostLink, reason: str) -> None:
        if not link.quarantined:  # by another audit, meanwhile
            self.counters.faulty_hosts += 1
            self.ring.quarantine(link, reason)

    def _replicas(self, link: HostLink, weights: Weights) -> list[HostLink]:
        """Other hosts with the same blocks and weights."""
        return [
            other
            for other in self.ring.links
            if other is not link
            and other.entry.blocks == link.entry.blocks
            and not other.problem
            and weights in other.held
        ]
