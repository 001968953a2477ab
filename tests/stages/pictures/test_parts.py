"""A host's plan and parts of models that draw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.checkpoint.manifest import Manifest
from stages.host.parts import load_parts
from stages.host.plan import HostPlan, ModelSource, full_state_bytes, plan_host
from stages.host.server import MESSAGE_BYTES
from stages.host.validation import parse_hop
from stages.host.work.pictures import PictureWork
from stages.pictures.trajectory import DrawPlan, max_pictures
from stages.v1 import stage_pb2
from stages.wire.hop_stream import BATCH_BYTES
from stages.wire.messages import put_work
from stages.wire.status import StatusError
from tests.stages.pictures.lines import drawing_of
from tests.stages.pictures.tiny import TINY, tiny_partition

WIDE = replace(TINY, height=64, width=64, channels=3, patch=4, features=512)


def test_a_loaded_model_is_not_read_again(drawing: Path) -> None:
    held = load_parts(plan_host(drawing, (1,)))
    assert (list(held.runners["chain"]), list(held.runners["steps"])) == ([1], [1])
    again = load_parts(plan_host(drawing, (1,)), held=[held])
    assert all(again.runners[kind][1] is held.runners[kind][1] for kind in ("chain", "steps"))


def test_a_plan_has_the_models_of_the_bundle(drawing: Path) -> None:
    assert plan_host(drawing, (0, 1, 2)).is_last
    assert list(plan_host(drawing / "steps", (0,)).models) == ["steps"]
    assert full_state_bytes(plan_host(drawing, (0,))) < full_state_bytes(plan_host(drawing / "steps", (0,)))


@pytest.mark.parametrize("kind", ["chain", "steps"])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("architecture", [TINY, WIDE], ids=["tiny", "wide"])
def test_the_most_pictures_fit_a_message_and_one_more_is_refused(architecture: Any, kind: Any, guidance: float) -> None:
    manifest = Manifest(kind, architecture, (None,) * 3, partition=tiny_partition(kind))
    plan = HostPlan((1,), 3, {kind: ModelSource(Path("nowhere"), manifest, "d")})
    draws = DrawPlan(0, (1,) * max_pictures(architecture, guidance), 256, "2m", guidance)
    state = bytes(4 * draws.pictures * architecture.tokens * architecture.patch_dim)
    work: stage_pb2.Draw | stage_pb2.Denoise = stage_pb2.Draw(block=1, codec="fp32", estimate=state)
    if kind == "steps":
        hidden = bytes(4 * draws.evaluations * architecture.tokens * architecture.features)
        fields = {"stage": 1, "level": 1, "estimate": state, "before": state, "hidden": hidden}
        work = stage_pb2.Denoise(codec="fp32", **fields)
    work.drawing.CopyFrom(drawing_of(draws))
    hop = stage_pb2.Hop(router="r", session="s", digest="d", left_s=60)
    put_work(hop, work)
    request = parse_hop(hop, plan)
    assert isinstance(request, PictureWork)
    assert request.plan == draws
    assert hop.ByteSize() + BATCH_BYTES < plan.message_bytes() < MESSAGE_BYTES
    work.drawing.classes.append(1)
    put_work(hop, work)
    with pytest.raises(StatusError, match=f"of this model can have 1 to .*, not {draws.pictures + 1}$"):
        parse_hop(hop, plan)
