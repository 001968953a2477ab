"""The smoke test of a release: under load, beside faulty hosts, and by its loss."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from serving.router import active_release as module
from serving.router.active_release import LOSS_TOLERANCE, _when_free, expected_nats, smoke_test
from serving.router.audit import AuditFailed
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.wire.status import exhausted
from tests.conftest import refused


async def test_the_smoke_test_waits_for_busy_hosts_and_avoids_faulty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_PAUSE_S", 0.0)
    left = [exhausted("full", 10), AuditFailed("host b is faulty")]

    async def job() -> int:
        if left:
            raise left.pop(0)
        return 3

    assert await _when_free(job) == 3


@pytest.mark.parametrize("off_nats", [0.3, -0.3, float("nan")])
async def test_a_release_with_another_loss_than_its_manifest_is_refused(
    bundles: Path, monkeypatch: pytest.MonkeyPatch, off_nats: float
) -> None:
    """The parts were measured one by one: only their loss together shows that they belong together."""
    directory = bundles / "own"
    pipeline = find_bundle(directory).ar
    manifest = read_manifest(pipeline)
    expected = expected_nats(manifest)
    assert manifest.probe_tolerance + LOSS_TOLERANCE < 0.3
    release: Any = SimpleNamespace(view=None, served_modes=[], modes={}, drawing_modes=[])

    async def measured(*_: Any) -> float:
        return expected + off_nats

    monkeypatch.setattr(module, "_nats", measured)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "the parts do not form the right model"):
        await smoke_test(release, directory, lambda line: None)
