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
from onesweep.serving.router.answer import same_result
from onesweep.stages.v1 import stage_pb2
from tests.serving.router.test_audit import deployed, reasons
from tests.stages.pictures.tiny import tiny_experts, tiny_picture_bundle

SEED = 7


def other_pixels(job: Any, outcome: Any) -> Any:
    """Pictures as if from other weights."""
    if isinstance(outcome, stage_pb2.Event) and outcome.HasField("pictures"):
        outcome.pictures.pixels = outcome.pictures.pixels[::-1]
    return outcome


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_picture_bundle(tmp_path_factory.mktemp("audited"), ("chain", "steps"))
    tiny_experts(directory / "experts")
    return directory


@pytest.mark.parametrize("mode", ["chain", "steps", "experts:1"])
def test_a_host_that_draws_something_else_is_named_and_never_believed(
    bundle: Path, servers: Callable[..., Any], mode: str
) -> None:
    with deployed(bundle, servers, None, audit_share=1.0) as client:
        wanted = client.draw("one", seed=SEED, mode=mode).pixels
        audits = client.status().audits
        assert (audits.sweeps, audits.audited, audits.faulty_hosts) == (1, 1, 0)
        assert reasons(client) == {}
    shown: dict[str, Any] = {"preview": lambda shown: None} if mode == "chain" else {}
    with deployed(bundle, servers, other_pixels, audit_share=1.0) as client:
        draw = partial(client.draw, "one", seed=SEED, mode=mode, **shown)
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


def test_neighbouring_shades_are_rounding_and_more_is_not() -> None:
    def pixels(*values: int) -> stage_pb2.Event:
        return stage_pb2.Event(pictures=stage_pb2.Pictures(pixels=bytes(values)))

    assert same_result(pixels(0, 255), pixels(1, 254))
    assert not same_result(pixels(0, 255), pixels(2, 255))
    assert not same_result(pixels(0, 255), pixels(0))
