"""A host that draws something else than it should is found, and its pictures are never handed out."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from onesweep.serving.client.client import RouterError
from onesweep.serving.router.audit import agree
from onesweep.stages.host.host import Host
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import copy_of
from tests.serving.router.test_audit import deployed, reasons
from tests.stages.pictures.tiny import tiny_picture_bundle

SEED = 7


def other_pixels(host: Host, outcome: Any) -> Any:
    """Pictures as if from other weights."""
    if isinstance(outcome, stage_pb2.Event) and outcome.HasField("pictures"):
        outcome.pictures.pixels = outcome.pictures.pixels[::-1]
    return outcome


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture_bundle(tmp_path_factory.mktemp("audited"), ("chain", "steps"))


@pytest.mark.parametrize("alone", [True, False], ids=["always", "only in the ring"])
def test_a_host_that_draws_something_else_is_named_and_never_believed(
    bundle: Path, servers: Callable[..., Any], alone: bool
) -> None:
    with deployed(bundle, servers, None, True, audit_share=1.0) as client:
        wanted = client.draw("one", seed=SEED).pixels
        assert client.draw("one", seed=SEED, mode="steps").sweeps == 13
        audits = client.status().audits
        assert (audits.sweeps, audits.audited, audits.faulty_hosts) == (1, 1, 0), "steps are not audited"
        assert reasons(client) == {}
    with deployed(bundle, servers, other_pixels, alone, audit_share=1.0) as client:
        draw = partial(client.draw, "one", seed=SEED, preview=lambda shown: None)
        for _ in range(50):  # several at once, so that both hosts of a pair have work
            with ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(draw) for _ in range(4)]
            for each in asked:
                try:
                    assert np.array_equal(each.result().pixels, wanted)
                except RouterError as error:  # all its tries met the host before it could be named: rare, on busy cores
                    if error.code is not grpc.StatusCode.UNAVAILABLE:
                        raise
            if reasons(client):
                break
        assert set(reasons(client)) == {"b-1"}


def test_neighbouring_shades_and_numbers_are_rounding_and_more_is_not() -> None:
    def pixels(*values: int) -> stage_pb2.Event:
        return stage_pb2.Event(pictures=stage_pb2.Pictures(pixels=bytes(values)))

    assert agree(pixels(0, 255), pixels(1, 254))
    assert not agree(pixels(0, 255), pixels(2, 255))
    assert not agree(pixels(0, 255), pixels(0))
    model = stage_pb2.ModelInfo(pictures=stage_pb2.PictureInfo(height=4, width=4, channels=1, patch=2))
    numbers = np.linspace(-1, 1, 16, dtype="<f4")
    drawing = stage_pb2.Drawing(classes=[0], levels=3)
    mine = stage_pb2.Hop(draw=stage_pb2.Draw(block=1, codec="fp32", drawing=drawing, estimate=numbers.tobytes()))
    theirs = copy_of(mine)
    theirs.draw.estimate = (numbers + np.float32(5e-4)).tobytes()
    assert agree(mine, theirs, model)
    theirs.draw.estimate = (numbers + np.float32(5e-3)).tobytes()
    assert not agree(mine, theirs, model)
    theirs.draw.CopyFrom(mine.draw)
    theirs.draw.drawing.seed = 1
    assert not agree(mine, theirs, model)
