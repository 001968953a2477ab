"""One hop's arithmetic: a message becomes tensors, goes through this host's parts, and becomes a message again.

The one place that ties the wire to the model, and so the place where another backend would be chosen.
"""

from __future__ import annotations

import torch

from stages.admission import HIDDEN
from stages.codec import FEATURE_LIMIT, codec_named
from stages.parts import Parts
from stages.randomness import sample_bytes
from stages.sessions import Session
from stages.sweep import Boundary, SweepPlan, run_block
from stages.v1 import stage_pb2

Outcome = stage_pb2.PushRequest | stage_pb2.Event
"""Work for the next host, or text for the router."""


def run_hop(request: stage_pb2.PushRequest, session: Session, parts: Parts, following: int) -> Outcome:
    """Run every part of this host on an admitted request. `following`: the block or stage after them."""
    if request.WhichOneof("work") == "sweep":
        return _sweep(request, session, following)
    return _step(request, session, parts, following)


def next_step(request: stage_pb2.PushRequest, text: bytes) -> stage_pb2.PushRequest:
    """The AR step that reads the byte which `request` ended in."""
    after = stage_pb2.PushRequest(
        router=request.router,
        session=request.session,
        deadline_unix_ms=request.deadline_unix_ms,
        digest=request.digest,
        capacity=request.capacity,
    )
    after.step.number = request.step.number + 1
    after.step.start = request.step.start + len(request.step.clean)
    after.step.clean = text
    after.step.remaining = request.step.remaining - 1
    after.step.sampling.CopyFrom(request.step.sampling)
    return after


def _sweep(request: stage_pb2.PushRequest, session: Session, following: int) -> Outcome:
    sweep = request.sweep
    start = sweep.clean_start + len(sweep.clean)
    plan = SweepPlan(sweep.sampling.seed, start, sweep.slots, sweep.steps, sweep.sampling.temperature)
    codec = codec_named(sweep.codec)
    boundary = Boundary(sweep.estimate, sweep.features) if sweep.block else None
    for sequence in session.blocks.values():
        outcome = run_block(sequence, plan, codec, sweep.clean, boundary)
        if isinstance(outcome, bytes):
            return stage_pb2.Event(session=request.session, number=sweep.number, text=outcome)
        boundary = outcome
    assert boundary is not None
    after = stage_pb2.PushRequest()
    after.CopyFrom(request)
    after.sweep.block = following
    after.sweep.estimate, after.sweep.features = boundary.estimate, boundary.features
    return after


@torch.inference_mode()
def _step(request: stage_pb2.PushRequest, session: Session, parts: Parts, following: int) -> Outcome:
    step, x = request.step, torch.empty(0)
    if step.stage == 0:
        x = torch.frombuffer(bytearray(step.clean), dtype=torch.uint8).long()[None]
    else:
        width = next(iter(parts.ar.values())).architecture.width
        x = HIDDEN.decode(step.hidden, len(step.clean), width, FEATURE_LIMIT)[None]
    for index, stage in parts.ar.items():
        x = stage.read(x, session.stages[index])
        if stage.is_last:
            position = step.start + len(step.clean)
            logits = stage.next_byte(x[:, -1:])[0]
            text = sample_bytes(logits, step.sampling.temperature, step.sampling.seed, position)
            return stage_pb2.Event(session=request.session, number=step.number, text=text)
    after = stage_pb2.PushRequest()
    after.CopyFrom(request)
    after.step.stage = following
    after.step.hidden = HIDDEN.encode(x[0])
    return after
