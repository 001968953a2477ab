"""Validation of hops that carry pictures: every field is checked before anything of the pictures' size is allocated."""

import math

from torch import Tensor

from onesweep.stages.errors import CodecError
from onesweep.stages.host.parts import HostPlan, ModelSource
from onesweep.stages.host.requests import ConsultRequest, DenoiseRequest, DrawRequest
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.pictures.architecture import PictureArchitecture
from onesweep.stages.pictures.experts import MAX_MOVES, RULES, Turn
from onesweep.stages.pictures.trajectory import MAX_GUIDANCE, MAX_LEVELS, SOLVERS, DrawPlan, evaluations, most_pictures
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import AnyWork, PictureWork
from onesweep.stages.wire.status import failed_precondition, invalid

# E is a mean of numbers within the limit: the last bits of its sums may be beyond.
LIMIT_SLACK = 1.0001
EXACT = codec_named("fp32")


def check_drawn(work: AnyWork, plan: HostPlan) -> None:
    """Raise StatusError for text where pictures are drawn, and for pictures where text is written."""
    asks_pictures = isinstance(work, PictureWork)
    if plan.draws and not asks_pictures:
        raise failed_precondition("this checkpoint draws pictures: ask for pictures with `onesweep draw`")
    if asks_pictures and not plan.draws:
        raise failed_precondition("this checkpoint writes text: ask for text with `onesweep generate`")


def parse_draw(draw: stage_pb2.Draw, source: ModelSource) -> DrawRequest:
    """Raises StatusError."""
    a = source.manifest.picture_architecture
    plan = _plan(draw.drawing, a, least_levels=a.parts)
    if draw.block == 0 and draw.estimate:
        raise invalid("block 0 starts from noise: its message carries no estimate")
    try:
        codec = codec_named(draw.codec)
        estimate = _pictures(draw.estimate, codec, plan, a) if draw.block else None
    except CodecError as error:
        raise invalid(str(error)) from None
    return DrawRequest("chain", draw.number, plan, codec, estimate, draw.previews)


def parse_denoise(denoise: stage_pb2.Denoise, source: ModelSource) -> DenoiseRequest:
    """Raises StatusError."""
    a, level = source.manifest.picture_architecture, denoise.level
    plan = _plan(denoise.drawing, a, least_levels=1)
    if level > plan.levels:
        raise invalid(f"level {level} of pictures that are done after level {plan.levels}")
    needs_before = level > 0 and plan.solver == "2m"
    if denoise.estimate and not level:
        raise invalid("level 0 starts from noise: its message carries no estimate")
    if denoise.before and not needs_before:
        raise invalid("solver 2m alone, and after level 0, needs the pictures denoised before: send none")
    if denoise.hidden and not denoise.stage:
        raise invalid("stage 0 reads patches: its message carries no hidden states")
    try:
        codec = hidden_codec(denoise.codec)
        estimate = _pictures(denoise.estimate, EXACT, plan, a) if level else None
        before = _pictures(denoise.before, EXACT, plan, a) if needs_before else None
        hidden = None
        if denoise.stage:
            rows = plan.evaluations * a.tokens
            hidden = codec.decode(denoise.hidden, rows, a.features, FEATURE_LIMIT).view(-1, a.tokens, a.features)
    except CodecError as error:
        raise invalid(str(error)) from None
    return DenoiseRequest("steps", denoise.number, plan, codec, estimate, level, before, hidden)


def parse_consult(work: stage_pb2.Consult, source: ModelSource, hop: stage_pb2.Hop) -> ConsultRequest:
    """`hop`: the message that carries `work`. Raises StatusError."""
    a = source.manifest.picture_architecture
    rule = next((each for each in RULES if each == work.rule), None)
    if rule is None:
        raise invalid(f"unknown rule {work.rule[:40]!r}; choose from {', '.join(RULES)}")
    plan = _plan(work.drawing, a, least_levels=1)
    if plan.pictures != 1:
        raise invalid(f"{plan.pictures} pictures for experts: each goes its own way, so send one in a hop")
    if work.level > plan.levels or (rule == "once" and work.level):
        raise invalid(f"level {work.level}: the picture is done by then")
    if work.moves > MAX_MOVES:
        raise invalid(f"a picture that moved {work.moves} times; none moves more than {MAX_MOVES} times")
    _check_turn(work, hop, a.parts)
    needs_before = work.level > 0 and plan.solver == "2m"
    for name, payload, due in (("estimate", work.estimate, work.level), ("before", work.before, needs_before)):
        if payload and not due:
            raise invalid(f"a picture at this place, drawn by rule {rule}, carries no {name}")
    try:
        codec = codec_named(work.codec)
        estimate = _pictures(work.estimate, codec, plan, a) if work.level else None
        before = _pictures(work.before, codec, plan, a) if needs_before else None
    except CodecError as error:
        raise invalid(str(error)) from None
    turn = Turn(work.expert if work.HasField("expert") else None, work.level, estimate, before)
    return ConsultRequest("experts", work.number + work.moves, plan, codec, rule, turn)


def _check_turn(work: stage_pb2.Consult, hop: stage_pb2.Hop, parts: int) -> None:
    """Raise StatusError unless every expert has a place on the path, and the one whose turn it is, which this host
    holds, has this host's."""
    hosts = max(len(hop.path), 1)
    if len(work.places) != parts or max(work.places) >= hosts:
        raise invalid(f"{len(work.places)} places for {parts} experts on a path of {hosts} hosts: each needs one on it")
    if not work.HasField("expert"):
        if work.level:
            raise invalid("a picture on its way between experts names the one whose turn it is")
        return
    if work.places[work.expert] != hop.place:
        raise invalid(f"expert {work.expert} is at place {work.places[work.expert]} of the path, this is {hop.place}")


def _plan(drawing: stage_pb2.Drawing, a: PictureArchitecture, least_levels: int) -> DrawPlan:
    if not math.isfinite(drawing.guidance) or not 0 <= drawing.guidance <= MAX_GUIDANCE:
        raise invalid(f"guidance must be 0 to {MAX_GUIDANCE:g}, not {drawing.guidance}; 1 is none")
    pictures, most = len(drawing.classes), most_pictures(a, drawing.guidance)
    if not 1 <= pictures <= most:
        guided = "" if evaluations(drawing.guidance) == 1 else " with guidance"
        raise invalid(f"{pictures} pictures in a hop; of this model there can be 1 to {most}{guided}")
    if (largest := max(drawing.classes)) > len(a.classes):
        raise invalid(
            f"class {largest}; this model has classes 0 to {len(a.classes) - 1}, and {len(a.classes)} is none"
        )
    if not least_levels <= drawing.levels <= MAX_LEVELS:
        raise invalid(f"{drawing.levels} noise levels; this model takes {least_levels} to {MAX_LEVELS}")
    solver = next((each for each in SOLVERS if each == drawing.solver), None)
    if solver is None:
        raise invalid(f"unknown solver {drawing.solver[:40]!r}; choose from {', '.join(SOLVERS)}")
    return DrawPlan(drawing.seed, tuple(drawing.classes), drawing.levels, solver, drawing.guidance)


def _pictures(payload: bytes, codec: StateCodec, plan: DrawPlan, a: PictureArchitecture) -> Tensor:
    """(pictures, tokens, patch_dim). Raises CodecError."""
    rows = codec.decode(payload, plan.pictures * a.tokens, a.patch_dim, a.limit * LIMIT_SLACK)
    return rows.view(-1, a.tokens, a.patch_dim)
